"""What the check and the probe share."""

from __future__ import annotations

from datetime import timedelta

from opd_api.vocabulary import Annotation, FailureClass, Reason
from opd_operator.model import Diagnosis, Manifest, StepJob
from opd_operator.plan.draft import Draft, stamp
from opd_operator.plan.outcome import backoff_seconds
from opd_operator.planned import EventType

#: Reason of a class when a document names none that we know.
REASON_OF_CLASS = {
    FailureClass.CONFIG: Reason.CONFIG_ERROR,
    FailureClass.DATA: Reason.DATA_ERROR,
    FailureClass.TEACHER: Reason.TEACHER_ERROR,
    FailureClass.INFRASTRUCTURE: Reason.RAY_JOB_FAILED,
    FailureClass.CAPACITY: Reason.PLACEMENT_FAILED,
    FailureClass.INTERNAL: Reason.INTERNAL_ERROR,
    FailureClass.DEADLINE: Reason.DEADLINE_EXCEEDED,
    FailureClass.STALL: Reason.STALLED,
}


def reason_of(text: str | None, failure: FailureClass) -> Reason:
    """The reason that a document names, or its class's. A trainer image of another version may know other words."""
    return Reason(text) if text and text in set(Reason) else REASON_OF_CLASS[failure]


def outdated(draft: Draft, step: StepJob, wanted: Manifest) -> bool:
    """True when an edit changes the Job of a step that has not ended: it is deleted, and made anew from the new spec. What it
    waits for may be the very thing that was corrected."""
    hashed = wanted["metadata"]["annotations"][Annotation.SPEC_HASH]
    if step.owned.annotations.get(Annotation.SPEC_HASH) == hashed:
        return False
    draft.remove(step.owned)
    draft.wait(Reason.WAITING, f"the spec was edited: Job {step.owned.name} is made anew")
    return True


def retry_step(draft: Draft, step: StepJob | None, diagnosis: Diagnosis) -> None:
    """Delete a Job that failed for the cluster's sake; it is created again after the back-off, which is counted."""
    draft.remove(step.owned if step else None)
    draft.next_attempt_time = stamp(draft.now + timedelta(seconds=backoff_seconds(draft)))
    draft.retries += 1
    draft.wait(Reason.BACK_OFF, str(diagnosis))
    draft.diagnosis = diagnosis
    draft.passed(draft.now, draft.settings.retry_backoff_seconds)
    draft.event(EventType.WARNING, diagnosis.reason, f"{diagnosis} It is tried again.")
