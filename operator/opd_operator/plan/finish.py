"""Last step: free what is not needed any more, keep what the policy keeps, and delete the job at its TTL."""

from __future__ import annotations

from opd_api import API_VERSION, KIND
from opd_api.v1alpha1 import CleanupOnFailure
from opd_api.vocabulary import ConditionType, FailureClass, Reason
from opd_operator.model import Diagnosis, Kind, ObjectRef, StepState
from opd_operator.plan.draft import Draft, Truth, moment
from opd_operator.plan.outcome import fail
from opd_operator.planned import Deletion, EventType


def overdue(draft: Draft) -> bool:
    """Fail the job when activeDeadlineSeconds passed. True when it did."""
    seconds = draft.spec.lifecycle.active_deadline_seconds
    start = moment(draft.start_time)
    if seconds is None or start is None or not draft.passed(start, seconds):
        return False
    fail(
        draft,
        Diagnosis(
            FailureClass.DEADLINE,
            Reason.DEADLINE_EXCEEDED,
            f"the job was not done {seconds} s after its start",
            "Raise lifecycle.activeDeadlineSeconds; a new job can resume from the checkpoint (training.checkpoint.resume).",
        ),
    )
    return True


def release(draft: Draft) -> None:
    """Free everything of an ended job."""
    observation = draft.observation
    for (kind, _), owned in observation.owned.items():
        if kind in (Kind.DEPLOYMENT, Kind.SERVICE):
            draft.remove(owned)
    steps = [step for step in (observation.check, *observation.probes.values()) if step is not None]
    draft.remove_all(step.owned for step in steps if step.state is StepState.RUNNING)
    kept = _keeps_ray(draft)
    if not kept:
        draft.remove_all(owned for (kind, _), owned in observation.owned.items() if kind is Kind.RAY_JOB)
    _say(draft, kept)
    _expire(draft)


def _keeps_ray(draft: Draft) -> bool:
    """True while a failed job's Ray cluster is kept for inspection."""
    if draft.job.spec is None or not draft.is_true(ConditionType.FAILED):
        return False
    cleanup = draft.job.spec.lifecycle.cleanup
    end = moment(draft.completion_time)
    if cleanup.on_failure is not CleanupOnFailure.KEEP_RAY or end is None:
        return False
    return bool(draft.observation.ray_jobs) and not draft.passed(end, cleanup.keep_seconds)


def _say(draft: Draft, kept: bool) -> None:
    pods = draft.observation.holding_pods
    if draft.is_true(ConditionType.TEACHERS_READY) or draft.truth(ConditionType.TEACHERS_READY) is Truth.FALSE:
        draft.set(ConditionType.TEACHERS_READY, Truth.UNKNOWN, Reason.TEACHERS_RELEASED, "the job has ended")
    if kept:
        draft.set(
            ConditionType.RESOURCES_RELEASED,
            Truth.FALSE,
            Reason.KEPT_FOR_INSPECTION,
            "the Ray cluster is kept for lifecycle.cleanup.keepSeconds; delete the OPDJob to free it at once",
        )
    elif pods or draft.delete:
        draft.set(ConditionType.RESOURCES_RELEASED, Truth.FALSE, Reason.RELEASING, draft.going_away())
    else:
        draft.set(
            ConditionType.RESOURCES_RELEASED, Truth.TRUE, Reason.RELEASED, "no pod of the job holds an accelerator"
        )


def _expire(draft: Draft) -> None:
    seconds = draft.job.spec.lifecycle.ttl_seconds_after_finished if draft.job.spec else None
    end = moment(draft.completion_time)
    if seconds is None or end is None:
        return
    if draft.passed(end, seconds):
        ref = ObjectRef(API_VERSION, KIND, draft.job.namespace, draft.job.name)
        draft.delete.append(Deletion(ref, draft.job.uid))
        draft.event(EventType.NORMAL, Reason.RELEASED, "deleted because ttlSecondsAfterFinished passed")
