"""Tolerations, affinity and topology spread, as k8s.io/kubernetes validates them. Values may be of any type."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from opd_api.kubernetes.values import (
    Problems,
    entries,
    key_problem,
    label_problems,
    list_problems,
    mapping,
    short,
    value_problem,
)

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
#: Lt and Gt exist behind a feature gate.
_TOLERATION_OPERATORS = ("Exists", "Equal", "Lt", "Gt")
_LABEL_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")
_NODE_OPERATORS = (*_LABEL_OPERATORS, "Gt", "Lt")
_UNSATISFIABLE = ("DoNotSchedule", "ScheduleAnyway")


def toleration_problems(path: str, tolerations: Any) -> Problems:
    """`tolerations` of a pod."""
    yield from list_problems(path, tolerations)
    for place, item in entries(path, tolerations):
        key, operator, value = item.get("key") or "", item.get("operator") or "", item.get("value") or ""
        effect, seconds = item.get("effect") or "", item.get("tolerationSeconds")
        if key and (problem := key_problem(key)):
            yield f"{place}.key", problem
        if operator and operator not in _TOLERATION_OPERATORS:
            yield f"{place}.operator", _not_one_of(operator, _TOLERATION_OPERATORS[:2])
        elif not key and operator != "Exists":
            yield f"{place}.operator", "a toleration without a key tolerates every taint. Write operator: Exists."
        elif operator == "Exists" and value:
            yield f"{place}.value", "operator Exists takes no value. Remove value, or write operator: Equal."
        elif operator in ("", "Equal") and (problem := value_problem(value)):
            yield f"{place}.value", problem
        if effect and effect not in _EFFECTS:
            yield f"{place}.effect", _not_one_of(effect, _EFFECTS)
        elif seconds is not None and effect != "NoExecute":
            yield f"{place}.effect", "tolerationSeconds is for one effect only. Write effect: NoExecute."


def affinity_problems(path: str, affinity: Any) -> Problems:
    """`affinity` of a pod."""

    def found() -> Problems:
        yield from _node_affinity(f"{path}.nodeAffinity", affinity.get("nodeAffinity"))
        for kind in ("podAffinity", "podAntiAffinity"):
            yield from _pod_affinity(f"{path}.{kind}", affinity.get(kind))

    yield from mapping(path, affinity, found())


def spread_problems(path: str, constraints: Any) -> Problems:
    """`topologySpreadConstraints` of a pod."""
    yield from list_problems(path, constraints)
    for place, item in entries(path, constraints):
        skew, when = item.get("maxSkew"), item.get("whenUnsatisfiable")
        if not isinstance(skew, int) or skew < 1:
            yield f"{place}.maxSkew", f"{short(skew)} is no difference to allow. Write maxSkew: 1."
        if when not in _UNSATISFIABLE:
            yield f"{place}.whenUnsatisfiable", _not_one_of(when, _UNSATISFIABLE)
        yield from _topology_key(place, item)
        yield from _selector(f"{place}.labelSelector", item.get("labelSelector"))


def _node_affinity(path: str, affinity: Any) -> Problems:
    def found() -> Problems:
        required = affinity.get(_REQUIRED)
        yield from mapping(f"{path}.{_REQUIRED}", required, _node_terms(f"{path}.{_REQUIRED}", required))
        yield from _weighted(f"{path}.{_PREFERRED}", affinity.get(_PREFERRED), "preference", _node_term)

    yield from mapping(path, affinity, found())


def _node_terms(path: str, required: Any) -> Problems:
    terms = required.get("nodeSelectorTerms")
    if not terms:
        yield f"{path}.nodeSelectorTerms", "no term is there. Write nodeSelectorTerms: [{matchExpressions: [...]}]."
    yield from list_problems(f"{path}.nodeSelectorTerms", terms)
    for place, term in entries(f"{path}.nodeSelectorTerms", terms):
        yield from _node_term(place, term)


def _node_term(path: str, term: dict[str, Any]) -> Problems:
    yield from _expressions(f"{path}.matchExpressions", term.get("matchExpressions"), _NODE_OPERATORS)


def _pod_affinity(path: str, affinity: Any) -> Problems:
    def found() -> Problems:
        required = affinity.get(_REQUIRED)
        yield from list_problems(f"{path}.{_REQUIRED}", required)
        for place, term in entries(f"{path}.{_REQUIRED}", required):
            yield from _pod_term(place, term)
        yield from _weighted(f"{path}.{_PREFERRED}", affinity.get(_PREFERRED), "podAffinityTerm", _pod_term)

    yield from mapping(path, affinity, found())


def _pod_term(path: str, term: dict[str, Any]) -> Problems:
    yield from _topology_key(path, term)
    yield from _selector(f"{path}.labelSelector", term.get("labelSelector"))


def _weighted(path: str, preferred: Any, inner: str, check: Callable[[str, dict[str, Any]], Problems]) -> Problems:
    yield from list_problems(path, preferred)
    for place, item in entries(path, preferred):
        weight, term = item.get("weight"), item.get(inner)
        if not isinstance(weight, int) or not 1 <= weight <= 100:
            yield f"{place}.weight", f"{short(weight)} is no weight. Write a number from 1 to 100."
        if isinstance(term, dict):
            yield from check(f"{place}.{inner}", term)
        else:
            yield f"{place}.{inner}", f"{inner} is not there. Write it, or remove the element."


def _topology_key(path: str, term: dict[str, Any]) -> Problems:
    problem = key_problem(term.get("topologyKey"))
    if problem is not None:
        yield f"{path}.topologyKey", f"{problem} The label of a node's place: topologyKey: kubernetes.io/hostname."


def _selector(path: str, selector: Any) -> Problems:
    def found() -> Problems:
        yield from label_problems(f"{path}.matchLabels", selector.get("matchLabels"))
        yield from _expressions(f"{path}.matchExpressions", selector.get("matchExpressions"), _LABEL_OPERATORS)

    yield from mapping(path, selector, found())


def _expressions(path: str, expressions: Any, operators: Collection[str]) -> Problems:
    yield from list_problems(path, expressions)
    for place, item in entries(path, expressions):
        operator, values = item.get("operator"), item.get("values") or []
        if problem := key_problem(item.get("key")):
            yield f"{place}.key", problem
        if operator not in operators:
            yield f"{place}.operator", _not_one_of(operator, operators)
        elif operator in ("In", "NotIn") and not values:
            yield f"{place}.values", f"operator {operator} needs values. Write values: [...]."
        elif operator in ("Exists", "DoesNotExist") and values:
            yield f"{place}.values", f"operator {operator} takes no values. Remove them, or write operator: In."
        elif operator in ("Gt", "Lt") and not _is_one_number(values):
            yield f"{place}.values", f'operator {operator} compares with one number. Write values: ["8"].'
        elif operator in ("In", "NotIn"):
            for index, value in enumerate(values if isinstance(values, list) else [values]):
                if problem := value_problem(value):
                    yield f"{place}.values[{index}]", problem


def _is_one_number(values: Any) -> bool:
    return (
        isinstance(values, list) and len(values) == 1 and isinstance(values[0], str) and values[0].lstrip("-").isdigit()
    )


def _not_one_of(value: Any, choices: Collection[str]) -> str:
    return f"{short(value)} is not one of {', '.join(choices)}. Write one of them."
