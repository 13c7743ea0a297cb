"""Variables, resources and pod templates, as k8s.io/kubernetes validates them. Values may be of any type."""

from __future__ import annotations

import re
from typing import Any

from opd_api.kubernetes.scheduling import affinity_problems, spread_problems, toleration_problems
from opd_api.kubernetes.values import (
    Problems,
    annotation_problems,
    entries,
    label_problems,
    list_problems,
    mapping,
    quantity,
    resource_name_problem,
    short,
    subdomain_problem,
)

#: Sources of a variable, and the field that each must name.
_SOURCES = {
    "secretKeyRef": "key",
    "configMapKeyRef": "key",
    "fieldRef": "fieldPath",
    "resourceFieldRef": "resource",
    "fileKeyRef": "key",
}
_NAMED = ("secretKeyRef", "configMapKeyRef")
_FIELD_PATHS = (
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
)
_SUBSCRIPTED = re.compile(r"metadata\.(labels|annotations)\['[^']+'\]")


def env_problems(path: str, variables: Any) -> Problems:
    """`env` of a container."""
    yield from list_problems(path, variables)
    for place, item in entries(path, variables):
        name, value, source = item.get("name"), item.get("value"), item.get("valueFrom")
        if not isinstance(name, str) or not name or "=" in name or not name.isascii() or not name.isprintable():
            yield f"{place}.name", f"{short(name)} is no name of a variable. Write letters, digits and '_'."
        if value is not None and not isinstance(value, str):
            yield f"{place}.value", f'{short(value)} is no text. Write it in quotes: "{value}".'
        if source is not None and value:
            yield f"{place}.valueFrom", "the variable has both value and valueFrom. Remove one of them."
        if source is not None:
            yield from _source_problems(f"{place}.valueFrom", source)


def _source_problems(path: str, source: Any) -> Problems:
    chosen = {key: value for key, value in source.items() if value is not None} if isinstance(source, dict) else {}
    kind = next(iter(chosen), "")
    if len(chosen) != 1 or kind not in _SOURCES:
        yield path, f"{short(source)} is no source. Write exactly one of {', '.join(_SOURCES)}."
        return
    inner = chosen[kind]
    needed = ("name", _SOURCES[kind]) if kind in _NAMED else (_SOURCES[kind],)
    for field in needed:
        if not isinstance(inner, dict) or not isinstance(inner.get(field), str) or not inner[field]:
            yield f"{path}.{kind}.{field}", f"{kind} does not say which {field}. Write {field}."
            return
    if kind in _NAMED and (problem := subdomain_problem(inner["name"])):
        yield f"{path}.{kind}.name", problem
    if kind == "fieldRef" and not (inner["fieldPath"] in _FIELD_PATHS or _SUBSCRIPTED.fullmatch(inner["fieldPath"])):
        yield (
            f"{path}.{kind}.fieldPath",
            f"no variable shows {short(inner['fieldPath'])}. Write status.podIP or another.",
        )


def resource_problems(path: str, resources: Any) -> Problems:
    """`resources` of a container."""

    def found() -> Problems:
        asked, most = resources.get("requests"), resources.get("limits")
        for side, values in (("requests", asked), ("limits", most)):
            yield from mapping(f"{path}.{side}", values, _quantities(f"{path}.{side}", values))
        if isinstance(asked, dict) and isinstance(most, dict):
            for name in asked.keys() & most.keys():
                low, high = quantity(asked[name]), quantity(most[name])
                if low is not None and high is not None and low > high:
                    yield (
                        f"{path}.requests.{name}",
                        f"{asked[name]} is more than the limit {most[name]}. Write at most it.",
                    )

    yield from mapping(path, resources, found())


def _quantities(path: str, values: Any) -> Problems:
    for name, value in values.items():
        number = quantity(value)
        if problem := resource_name_problem(name):
            yield f"{path}.{name}", problem
        if number is None:
            yield f"{path}.{name}", f"{short(value)} is no quantity. Write a number with a unit: 500m, 8, 64Gi."
        elif number < 0:
            yield f"{path}.{name}", f"{short(value)} is less than nothing. Write a positive quantity: 500m, 8, 64Gi."
        elif "/" in str(name) and number != number.to_integral_value():
            yield f"{path}.{name}", f"{short(value)}: {name} comes in whole units. Write 1."


def template_problems(path: str, template: Any) -> Problems:
    """A PodTemplateSpec that is merged over a generated one."""

    def found() -> Problems:
        metadata, spec = template.get("metadata"), template.get("spec")
        yield from mapping(f"{path}.metadata", metadata, _metadata(f"{path}.metadata", metadata))
        yield from mapping(f"{path}.spec", spec, _pod(f"{path}.spec", spec))

    yield from mapping(path, template, found())


def _metadata(path: str, metadata: Any) -> Problems:
    yield from label_problems(f"{path}.labels", metadata.get("labels"))
    yield from annotation_problems(f"{path}.annotations", metadata.get("annotations"))


def _pod(path: str, spec: Any) -> Problems:
    yield from label_problems(f"{path}.nodeSelector", spec.get("nodeSelector"))
    yield from toleration_problems(f"{path}.tolerations", spec.get("tolerations"))
    yield from affinity_problems(f"{path}.affinity", spec.get("affinity"))
    yield from spread_problems(f"{path}.topologySpreadConstraints", spec.get("topologySpreadConstraints"))
    for kind in ("initContainers", "containers"):
        yield from list_problems(f"{path}.{kind}", spec.get(kind))
        for place, container in entries(f"{path}.{kind}", spec.get(kind)):
            yield from env_problems(f"{place}.env", container.get("env"))
            yield from resource_problems(f"{place}.resources", container.get("resources"))
