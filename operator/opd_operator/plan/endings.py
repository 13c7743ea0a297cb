"""Has the current attempt ended, and how? In order of authority: the final document, KubeRay, pods, clocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from opd_api.progress import FinalDocument
from opd_api.vocabulary import ConditionType, FailureClass, Outcome, Reason, TrainerPhase
from opd_operator import diagnose_ray
from opd_operator.diagnose import RESUME, last_words
from opd_operator.model import Diagnosis, Fact, HeadState, RayJobView
from opd_operator.plan.check import from_document
from opd_operator.plan.draft import Draft, moment

#: How long a success document waits for KubeRay to agree. KubeRay 1.6 never does when the head is gone by then.
AGREEMENT_SECONDS = 60.0


class EndKind(StrEnum):
    """What kind of end."""

    SUCCEEDED = "succeeded"
    PREEMPTED = "preempted"
    FAILED = "failed"
    #: The student found no room.
    RELEASED = "released"


@dataclass(frozen=True)
class End:
    """The end of an attempt."""

    kind: EndKind
    diagnosis: Diagnosis
    teacher: str | None = None
    #: Nothing was heard for too long. That could also be a watch that went dumb, so the sources are asked first.
    by_silence: bool = False


def find_end(draft: Draft) -> End | None:
    """The end of the live attempt, or None while it runs or its last words are awaited."""
    final = draft.observation.final
    if final is not None:
        return _by_document(draft, final)
    end = _by_ray_job(draft) or _by_pods(draft)
    if end is not None:
        return end
    end = _by_clocks(draft)
    return replace(end, by_silence=True) if end is not None else None


def _by_document(draft: Draft, final: FinalDocument) -> End | None:
    if final.outcome is Outcome.PREEMPTED:
        return End(EndKind.PREEMPTED, _note(Reason.PREEMPTED, final.message or "saved and stopped"))
    if final.outcome is Outcome.FAILED:
        diagnosis = from_document(final)
        disruption = draft.observation.memory.disruption
        infrastructure = disruption is not None and disruption.failure_class is FailureClass.INFRASTRUCTURE
        if disruption is not None and infrastructure and diagnosis.failure_class is FailureClass.INTERNAL:
            # The trainer saw only that something vanished; the pods show why.
            diagnosis = Diagnosis(
                disruption.failure_class,
                disruption.reason,
                f"{disruption.message}; {diagnosis.message}",
                disruption.hint,
            )
        return End(EndKind.FAILED, diagnosis, final.teacher)
    if final.checkpoint is None:
        return _failed(
            FailureClass.INTERNAL,
            Reason.NO_FINAL_DOCUMENT,
            "the trainer says Succeeded but names no checkpoint",
            diagnose_ray.LOOK,
        )
    view = draft.observation.ray_jobs.get(draft.attempt)
    if view is None or view.owned.deleting or diagnose_ray.succeeded(view):
        return End(EndKind.SUCCEEDED, _note(Reason.SUCCEEDED, final.message))
    if diagnose_ray.ended(view):
        return _failed(
            FailureClass.INTERNAL,
            Reason.RAY_JOB_FAILED,
            f"the trainer says Succeeded but the RayJob says {view.deployment_status}/{view.job_status}: "
            f"{last_words(view.message)}",
            diagnose_ray.LOOK,
        )
    if draft.lasts(Fact.FINAL_DOCUMENT, AGREEMENT_SECONDS):
        return End(EndKind.SUCCEEDED, _note(Reason.SUCCEEDED, final.message))
    return None


def _by_ray_job(draft: Draft) -> End | None:
    view = draft.observation.ray_jobs.get(draft.attempt)
    if draft.lasts(Fact.RAY_JOB_MISSING, draft.settings.settle_seconds):
        return _failed(
            FailureClass.INFRASTRUCTURE, Reason.RAY_JOB_STOPPED, "the RayJob was deleted from outside", RESUME
        )
    if view is None:
        return None
    refusal = diagnose_ray.refused(view)
    if refusal is not None:
        return End(EndKind.FAILED, refusal)
    if draft.lasts(Fact.RAY_JOB_ENDED, draft.settings.settle_seconds):
        return End(EndKind.FAILED, diagnose_ray.without_document(view, draft.observation.unreadable))
    return None


def _by_pods(draft: Draft) -> End | None:
    """A lost head ends the attempt at once; pods that are going may still leave a final document, within the grace."""
    view, memory = draft.observation.ray_jobs.get(draft.attempt), draft.observation.memory
    if view is None:
        return None
    disruption = memory.disruption or Diagnosis(
        FailureClass.INFRASTRUCTURE, Reason.HEAD_LOST, "the Ray head's pod is gone", RESUME
    )
    settle = draft.settings.settle_seconds
    if draft.lasts(Fact.HEAD_GONE, settle):
        return End(EndKind.FAILED, _lost(disruption))
    if view.head is HeadState.FAILED and draft.lasts(Fact.DISRUPTED, settle):
        return End(EndKind.FAILED, _lost(disruption))
    if draft.lasts(Fact.DISRUPTED, draft.spec.lifecycle.preemption_grace_seconds):
        return End(EndKind.FAILED, _lost(disruption))
    if draft.lasts(Fact.HEAD_NOT_READY, draft.settings.head_not_ready_seconds):
        return _failed(
            FailureClass.INFRASTRUCTURE,
            Reason.RAY_CLUSTER_NOT_READY,
            f"the Ray head was not ready for {draft.settings.head_not_ready_seconds:.0f} s",
            RESUME,
        )
    return None


def _by_clocks(draft: Draft) -> End | None:
    memory, lifecycle = draft.observation.memory, draft.spec.lifecycle
    view, progress = draft.observation.ray_jobs.get(draft.attempt), draft.observation.progress
    running_since = memory.since.get(Fact.RAY_JOB_RUNNING)
    heard = memory.sequence.at if memory.sequence else running_since
    if heard is None:
        return _starting(draft, view)
    if draft.passed(heard, lifecycle.heartbeat_timeout_seconds):
        return _failed(
            FailureClass.INFRASTRUCTURE,
            Reason.HEARTBEAT_TIMEOUT,
            f"no heartbeat for {lifecycle.heartbeat_timeout_seconds} s {draft.observation.unreadable}".strip(),
            f"{RESUME} See the head's log if it happens again.",
        )
    held = progress is not None and progress.phase is TrainerPhase.TEACHER_UNAVAILABLE
    if memory.activity and not held and draft.passed(memory.activity.at, lifecycle.stall_timeout_seconds):
        return _failed(
            FailureClass.STALL,
            Reason.STALLED,
            f"no activity for {lifecycle.stall_timeout_seconds} s",
            "The trainer's log holds a dump of its state; raise lifecycle.stallTimeoutSeconds if single steps take longer.",
        )
    return None


def _starting(draft: Draft, view: RayJobView | None) -> End | None:
    """Before the job runs: a wait for room is bounded by the idle timeout of the teachers, everything else by a deadline."""
    lifecycle = draft.spec.lifecycle
    waiting = view.waiting if view else None
    if Fact.CAPACITY_WAIT in draft.observation.memory.since and waiting is not None:
        if draft.lasts(Fact.CAPACITY_WAIT, lifecycle.teacher_idle_timeout_seconds):
            return End(EndKind.RELEASED, waiting)
        return None
    if not draft.passed(_start_of_clock(draft, view), lifecycle.pre_running_deadline_seconds):
        return None
    late = Diagnosis(
        FailureClass.DEADLINE,
        Reason.PRE_RUNNING_DEADLINE_EXCEEDED,
        f"the student did not run {lifecycle.pre_running_deadline_seconds} s after it had its nodes",
        "See the events of the RayJob and its pods; raise lifecycle.preRunningDeadlineSeconds if images are large.",
    )
    return End(EndKind.FAILED, waiting or draft.diagnosis or late)


def _start_of_clock(draft: Draft, view: RayJobView | None) -> datetime:
    """The clock stands still while pods wait for room: it starts when the last one got its node."""
    entry = draft.entry
    asked = (moment(entry.start_time) if entry else None) or draft.since(ConditionType.RAY_JOB_CREATED)
    placed = view.scheduled_at if view else None
    return max(asked, placed) if placed else asked


def _lost(disruption: Diagnosis) -> Diagnosis:
    """A pod that vanished is the cluster's fault, unless it says itself that the spec is to blame."""
    if disruption.failure_class in (FailureClass.INFRASTRUCTURE, FailureClass.CONFIG):
        return disruption
    return Diagnosis(FailureClass.INFRASTRUCTURE, disruption.reason, disruption.message, disruption.hint)


def _failed(failure: FailureClass, reason: Reason, message: str, hint: str) -> End:
    return End(EndKind.FAILED, Diagnosis(failure, reason, message, hint))


def _note(reason: Reason, message: str) -> Diagnosis:
    """Words for an end that is no failure; its class is not looked at."""
    return Diagnosis(FailureClass.INFRASTRUCTURE, reason, message, "")
