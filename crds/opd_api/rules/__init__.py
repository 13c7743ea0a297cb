"""Cross-field rules: a document -> findings, each with a stable code, a path and what to write instead.

The table is `RULES`; docs/rules.md is generated from it. Structural rules also run in the API server (opd_api.crd), from
the same numbers and codes.
"""

from __future__ import annotations

from typing import Any

from opd_api.rules import arguments, cluster, distillation, effect, not_yet, objective, pods, teachers
from opd_api.rules.finding import Finding, Level, Rule
from opd_api.rules.schema import closest, parse
from opd_api.v1alpha1 import OPDJob
from opd_api.vocabulary import Severity

RULES: tuple[Rule, ...] = tuple(
    sorted(
        (
            *distillation.RULES,
            *objective.RULES,
            *teachers.RULES,
            *cluster.RULES,
            *arguments.RULES,
            *pods.RULES,
            *not_yet.RULES,
            *effect.RULES,
        ),
        key=lambda item: item.number,
    )
)
#: Codes that spec.acknowledge may name.
OVERRIDABLE = frozenset(item.code for item in RULES if item.level is Level.OVERRIDABLE)
UNKNOWN_ACKNOWLEDGEMENT = "UnknownAcknowledgement"


def check(job: OPDJob, *, local: bool = False) -> list[Finding]:
    """All findings of the rules for a job, errors first. `local`: for `opd run`, which has no cluster."""
    acknowledged = set(job.spec.acknowledge)
    found = _unknown_acknowledgements(job)
    for item in RULES:
        if not (local and item.cluster_only):
            found += item.findings(job, acknowledged=item.code in acknowledged)
    return _errors_first(found)


def check_document(document: Any, *, local: bool = False) -> tuple[OPDJob | None, list[Finding]]:
    """A manifest as read from YAML -> the job and its findings; no job when it does not fit the models. Never raises for a
    document of any form."""
    job, found = parse(document)
    return job, (found if job is None else check(job, local=local))


def refused(findings: list[Finding]) -> bool:
    """Whether a job with these findings must not run."""
    return any(finding.severity is Severity.ERROR for finding in findings)


def _unknown_acknowledgements(job: OPDJob) -> list[Finding]:
    found = []
    codes = {item.code for item in RULES}
    for index, code in enumerate(job.spec.acknowledge):
        if code in OVERRIDABLE:
            continue
        guess = closest(code, sorted(OVERRIDABLE))
        hint = f"Did you mean {guess}?" if guess else f"Codes that can be: {', '.join(sorted(OVERRIDABLE))}."
        reason = "cannot be acknowledged" if code in codes else "is no code of a rule"
        message = f"{code!r} {reason}. {hint}"
        found.append(Finding(UNKNOWN_ACKNOWLEDGEMENT, Severity.ERROR, f"spec.acknowledge[{index}]", message))
    return found


def _errors_first(found: list[Finding]) -> list[Finding]:
    order = list(Severity)
    return sorted(found, key=lambda finding: order.index(finding.severity))


__all__ = [
    "OVERRIDABLE",
    "RULES",
    "UNKNOWN_ACKNOWLEDGEMENT",
    "Finding",
    "Level",
    "Rule",
    "check",
    "check_document",
    "refused",
]
