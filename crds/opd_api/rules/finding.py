"""What a rule is and what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from opd_api.v1alpha1 import FindingStatus, OPDJob
from opd_api.vocabulary import Severity


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to put right, or to know."""

    code: str
    severity: Severity
    #: Dotted as in YAML: spec.teachers[0].model.
    path: str
    #: Says what to write instead.
    message: str

    def to_status(self) -> FindingStatus:
        """As it stands in the status of an OPDJob; the message is cut to its bound."""
        return FindingStatus(
            code=self.code, severity=str(self.severity), path=self.path[:1024], message=self.message[:1024]
        )


class Level(StrEnum):
    """What a broken rule does to the job."""

    ERROR = "E"
    #: An error that spec.acknowledge turns into a warning: the recipe runs, but not for the reason one may think.
    OVERRIDABLE = "E*"
    WARNING = "W"


#: (path, message) for each place where a rule is broken.
Hits = Iterator[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table. `find` yields nothing when the rule is kept."""

    number: int
    code: str
    level: Level
    summary: str
    find: Callable[[OPDJob], Hits]
    #: Not asked of `opd run`, which has no cluster.
    cluster_only: bool = False

    def findings(self, job: OPDJob, *, acknowledged: bool) -> list[Finding]:
        """The findings of this rule for one job."""
        warns = self.level is Level.WARNING or (self.level is Level.OVERRIDABLE and acknowledged)
        severity = Severity.WARNING if warns else Severity.ERROR
        suffix = ""
        if self.level is Level.OVERRIDABLE:
            suffix = " (acknowledged)" if acknowledged else f" Or add {self.code} to spec.acknowledge."
        return [Finding(self.code, severity, path, message + suffix) for path, message in self.find(job)]


def rule(
    number: int,
    code: str,
    level: Level,
    summary: str,
    *,
    cluster_only: bool = False,
) -> Callable[[Callable[[OPDJob], Hits]], Rule]:
    """Make a row of the table out of a function."""

    def build(find: Callable[[OPDJob], Hits]) -> Rule:
        return Rule(number, code, level, summary, find, cluster_only)

    return build
