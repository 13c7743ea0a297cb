"""Findings of a check -> the final document, for the operator and for people."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opd_api.progress import FinalDocument
from opd_api.trainer_config import TrainerConfig
from opd_api.v1alpha1.status import FindingStatus
from opd_api.vocabulary import EXIT_CODE_OF_CLASS, ExitCode, FailureClass, Outcome, Reason, Severity
from opd_trainer.errors import TrainerError
from opd_trainer.hiding import hide

log = logging.getLogger(__name__)

#: Kubernetes cuts termination messages here.
TERMINATION_BYTES = 4096
TERMINATION_LOG = "/dev/termination-log"
MAX_FINDINGS = 16
#: Errors of these reasons are the data's, all others the configuration's unless said otherwise.
DATA_REASONS = frozenset({Reason.DATA_ERROR, Reason.DATA_NOT_FOUND, Reason.FIELD_NOT_FOUND})

#: Classes of errors that may be gone at the next attempt.
WORTH_A_RETRY = frozenset({FailureClass.INFRASTRUCTURE, FailureClass.TEACHER})


@dataclass(frozen=True, slots=True)
class Found:
    """One finding of a check."""

    reason: Reason
    severity: Severity
    path: str
    message: str
    #: Class of an error; None derives it from the reason.
    failure_class: FailureClass | None = None
    teacher: str | None = None

    @property
    def error_class(self) -> FailureClass:
        """Failure class when this finding ends the run."""
        if self.failure_class is not None:
            return self.failure_class
        return FailureClass.DATA if self.reason in DATA_REASONS else FailureClass.CONFIG

    @property
    def status(self) -> FindingStatus:
        """As it appears in the OPDJob's status."""
        return FindingStatus(
            code=str(self.reason), severity=str(self.severity), path=self.path[:1024], message=self.message[:1024]
        )


def error(reason: Reason, path: str, message: str, **more: object) -> Found:
    """An error finding."""
    return Found(reason, Severity.ERROR, path, message, **more)  # type: ignore[arg-type]


def warning(reason: Reason, path: str, message: str) -> Found:
    """A warning finding."""
    return Found(reason, Severity.WARNING, path, message)


def not_checked(reason: Reason, path: str, message: str) -> Found:
    """What could not be read here."""
    return Found(reason, Severity.NOT_CHECKED, path, message)


def of_exception(failure: TrainerError, path: str) -> Found:
    """An error finding from a trainer's error."""
    return error(failure.failure.reason, path, failure.failure.message, failure_class=failure.failure.failure_class)


@dataclass(slots=True)
class Report:
    """What the checks said, in order."""

    title: str
    lines: list[str] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)

    def say(self, line: str) -> None:
        """A line for people; printed at once, because checks may take minutes."""
        line = hide(line)
        self.lines.append(line)
        print(line, flush=True)

    def add(self, findings: Sequence[Found]) -> None:
        """Take findings and print them."""
        for item in findings:
            self.found.append(item)
            self.say(f"{item.severity.upper():>10}  {item.path}: {item.message} [{item.reason}]")

    @property
    def errors(self) -> list[Found]:
        """The findings that end the job."""
        return [item for item in self.found if item.severity is Severity.ERROR]

    def final(self, attempt: int) -> FinalDocument:
        """The document; errors first, so that they survive every cut."""
        order = [Severity.ERROR, Severity.WARNING, Severity.NOT_CHECKED]
        findings = sorted(self.found, key=lambda item: order.index(item.severity))[:MAX_FINDINGS]
        # What a retry cannot help decides for all: a hub out of reach beside a wrong path is a wrong spec.
        first = min(self.errors, key=lambda item: item.error_class in WORTH_A_RETRY, default=None)
        more = f" (and {len(self.errors) - 1} more)" if len(self.errors) > 1 else ""
        return FinalDocument(
            attempt=attempt,
            outcome=Outcome.FAILED if first else Outcome.SUCCEEDED,
            failure_class=first.error_class if first else None,
            reason=str(first.reason) if first else None,
            message=f"{first.path}: {first.message}"[:1000] + more if first else f"{self.title} passed",
            teacher=first.teacher if first else None,
            findings=[item.status for item in findings],
        )


def fitting_json(document: FinalDocument, limit: int = TERMINATION_BYTES) -> str:
    """JSON of at most `limit` bytes: long findings are cut, then the last ones are left out."""
    text = document.model_dump_json(by_alias=True, exclude_none=True)
    findings = list(document.findings)
    for longest in (400, 200, 100):
        if len(text.encode()) <= limit:
            return text
        findings = [item.model_copy(update={"message": item.message[:longest]}) for item in findings]
        text = _with(document, findings)
    while findings and len(text.encode()) > limit:
        findings.pop()
        text = _with(document, findings)
    return text


def _with(document: FinalDocument, findings: list[FindingStatus]) -> str:
    return document.model_copy(update={"findings": findings}).model_dump_json(by_alias=True, exclude_none=True)


def finish(report: Report, attempt: int, termination_log: str | None) -> int:
    """Write the termination message, print the verdict, return the exit code."""
    document = report.final(attempt)
    target = Path(termination_log or TERMINATION_LOG)
    if termination_log or target.exists():
        target.write_text(hide(fitting_json(document)), encoding="utf-8")
    report.say(f"{report.title}: {document.outcome}" + (f" - {document.message}" if report.errors else ""))
    if document.failure_class is None:
        return ExitCode.OK
    return EXIT_CODE_OF_CLASS.get(document.failure_class, ExitCode.INTERNAL)


def read_config(path: str) -> TrainerConfig:
    """The trainer configuration. Raises TrainerError(Config)."""
    try:
        return TrainerConfig.model_validate_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise TrainerError(FailureClass.CONFIG, Reason.CONFIG_ERROR, f"{path} cannot be read: {problem}") from problem
