"""One failure, and what a run of it shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from opd_api.vocabulary import FailureClass, Reason
from opd_failures.faults import Fault


class Step(StrEnum):
    """Where the job stands when it happens; the value is a heading of the page."""

    ACCEPT = "Before anything is created"
    CHECK = "Input check"
    TEACHERS = "Teachers start"
    PROBE = "Teachers are probed"
    STUDENT = "The student starts"
    TRAINING = "Training"


class Then(StrEnum):
    """What the operator does when the failure comes back every time; the value is for the page."""

    FAILS = "ends the job at once"
    RETRIES = "new attempt from the last checkpoint after a back-off, up to `backoffLimit`"
    RETRIES_STEP = "the step is made again after a back-off, up to `backoffLimit`"
    ONCE = "one new attempt from the last checkpoint"
    RESTARTS = "restarts the teacher once, probes it again"
    WAITS = "waits and says for what, until the deadline of the step"
    RELEASES = "frees everything after `teacherIdleTimeoutSeconds`, tries again after a pause; not counted"
    NOT_COUNTED = "new attempt from the last checkpoint; not counted"
    HOLDS = "waits and says for what; only `activeDeadlineSeconds` bounds it"


@dataclass(frozen=True)
class Failure:
    """A row of the table. `proofs` are tests beside the one that runs every row: `path::test`."""

    id: str
    fault: str
    step: Step
    cause: Fault
    failure_class: FailureClass | None
    reason: Reason
    then: Then
    proofs: tuple[str, ...] = ()
    #: Sections of the job, merged over the small one.
    job: Mapping[str, Any] = field(default_factory=dict)
    #: True when nothing was done wrong by the spec's author, so there is nothing to advise.
    no_hint: bool = False


@dataclass(frozen=True)
class Shown:
    """What the operator did."""

    failure_class: FailureClass | None
    reason: str
    hint: str
    #: Conditions that told of it at first, `type=status (reason)`.
    conditions: tuple[str, ...]
    #: Reasons that conditions and attempts had, from the fault to the end.
    reasons: frozenset[str]
    #: Attempts that were made, 0 when the student never began.
    attempts: int
    #: How often the step was made again without a new attempt.
    repeats: int
    teacher_restarts: int
    #: True when the job ended Failed; False when it would go on for ever.
    failed: bool
    #: Reason of the end.
    end: str
    #: Seconds from the fault to the end.
    seconds: float
    #: What still holds or may take an accelerator, at the end or while the job waits.
    left: tuple[str, ...]
