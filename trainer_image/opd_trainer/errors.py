"""Failures with a class, a reason and a hint, decided where they happen.

Exceptions lose their attributes when they cross a Ray boundary, so actors return `Failure` values instead of raising.
"""

from __future__ import annotations

from dataclasses import dataclass

from opd_api.vocabulary import FailureClass, Reason


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure as a value."""

    failure_class: FailureClass
    reason: Reason
    message: str
    #: Teacher that is to blame, if one is.
    teacher: str | None = None


class TrainerError(Exception):
    """Ends the run with a failure class. The message says what happened and what to do next."""

    def __init__(
        self, failure_class: FailureClass, reason: Reason, message: str, *, teacher: str | None = None
    ) -> None:
        super().__init__(message)
        self.failure = Failure(failure_class, reason, message, teacher)


class SampleError(Exception):
    """Fails one sample (never retried: the same input fails again). Counted against data.maxFailedFraction."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
