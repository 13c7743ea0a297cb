"""`spec.suspend`: ask for a checkpoint, then free every accelerator; false goes on with the next attempt."""

from __future__ import annotations

from opd_api.vocabulary import Annotation, ConditionType, FailureClass, Outcome, Reason
from opd_operator.children import names
from opd_operator.model import Diagnosis, Kind, ObjectRef
from opd_operator.plan.check import from_document
from opd_operator.plan.draft import Draft, Truth
from opd_operator.plan.endings import End, EndKind, find_end
from opd_operator.plan.hold import free
from opd_operator.plan.outcome import attempt_stopped, fail, succeed
from opd_operator.plan.student import adopt
from opd_operator.plan.train import observe_attempt
from opd_operator.planned import EventType, StopRequest

#: A failure of these classes would only come back after the resume.
FINAL = frozenset({FailureClass.CONFIG, FailureClass.DATA})


def suspend_or_resume(draft: Draft) -> bool:
    """True when the job may go on."""
    truth = draft.truth(ConditionType.SUSPENDED)
    if not draft.spec.suspend:
        if truth is not Truth.FALSE:
            draft.set(ConditionType.SUSPENDED, Truth.FALSE, Reason.RESUMED, "spec.suspend is false")
            draft.event(EventType.NORMAL, Reason.RESUMED, "the job goes on")
            draft.refresh = True
        return True
    if truth is Truth.FALSE:
        draft.set(ConditionType.SUSPENDED, Truth.UNKNOWN, Reason.SUSPEND_REQUESTED, "spec.suspend is true")
        draft.event(EventType.NORMAL, Reason.SUSPEND_REQUESTED, "a checkpoint is asked for, then everything is freed")
    if adopt(draft):
        attempt_stopped(draft, "suspended before the trainer reported")
    if draft.live and not _stopped(draft):
        draft.wait(Reason.SUSPEND_REQUESTED, "the trainer saves before everything is freed")
        return False
    if not draft.is_true(ConditionType.SUCCEEDED) and not draft.is_true(ConditionType.FAILED):
        _free(draft)
    return False


def _stopped(draft: Draft) -> bool:
    """True when the live attempt has ended or has had its time to save."""
    observe_attempt(draft)
    draft.waits = None
    end = find_end(draft)
    if end is not None:
        _conclude(draft, end)
        return True
    if draft.observation.progress is None:
        attempt_stopped(draft, "suspended before the trainer reported")
        return True
    _ask(draft)
    grace = draft.spec.lifecycle.preemption_grace_seconds
    if draft.passed(draft.since(ConditionType.SUSPENDED), grace):
        attempt_stopped(draft, f"suspended; the trainer did not say within {grace} s that it saved")
        return True
    return False


def _conclude(draft: Draft, end: End) -> None:
    """An end while a stop is under way is no failure to be counted, unless it would come back."""
    if end.kind is EndKind.SUCCEEDED:
        succeed(draft)
        return
    final = draft.observation.final
    failed = final is not None and final.outcome is Outcome.FAILED
    diagnosis: Diagnosis = from_document(final) if final is not None and failed else end.diagnosis
    if end.kind is EndKind.FAILED and diagnosis.failure_class in FINAL:
        fail(draft, diagnosis)
        return
    attempt_stopped(draft, end.diagnosis.message)


def _ask(draft: Draft) -> None:
    """Annotate the progress ConfigMap once; the trainer reads it in the answer to its next heartbeat."""
    name = names.progress_config_map(draft.job.name)
    owned = draft.owned(Kind.CONFIG_MAP, name)
    if owned is not None and owned.annotations.get(Annotation.STOP) != str(draft.attempt):
        draft.annotate.append(
            StopRequest(ObjectRef("v1", Kind.CONFIG_MAP.value, draft.job.namespace, name), draft.attempt)
        )


def _free(draft: Draft) -> None:
    free(draft, Reason.SUSPENDED)
    if draft.delete or draft.observation.holding_pods:
        draft.wait(Reason.RELEASING, draft.going_away())
        return
    if not draft.is_true(ConditionType.SUSPENDED):
        draft.set(ConditionType.SUSPENDED, Truth.TRUE, Reason.SUSPENDED, "no accelerator is held")
        draft.event(EventType.NORMAL, Reason.SUSPENDED, "everything is freed")
    draft.wait(Reason.SUSPENDED, "spec.suspend is true")
