"""Sixth step: follow the live attempt."""

from __future__ import annotations

from opd_api.vocabulary import ConditionType, FailureClass, Outcome, Reason, TrainerPhase
from opd_operator.children import names
from opd_operator.model import Diagnosis, Kind
from opd_operator.plan.draft import Draft, Truth
from opd_operator.plan.endings import End, EndKind, find_end
from opd_operator.plan.outcome import attempt_failed, attempt_preempted, attempt_released, succeed
from opd_operator.plan.probe import probe_teachers
from opd_operator.plan.student import between_attempts, create, has_begun, others_gone
from opd_operator.plan.teachers import release_teachers, start_teachers, watch_teachers

#: The trainer scores nothing any more.
DONE_WITH_TEACHERS = frozenset({TrainerPhase.EXPORTING, TrainerPhase.FINISHED})


def follow(draft: Draft) -> None:
    """Say how the attempt goes, and act when it ends.

    The RayJob is asked for again as long as nothing of it was seen, neither a pod nor a word of its trainer: after one that
    somebody deleted at once, a second one of the same number would be a second trainer that the fence in the run directory
    cannot tell apart. It was refused then, perhaps for hours, so its teachers are asked again too.
    """
    begun = has_begun(draft)
    if begun:
        observe_attempt(draft)
    else:
        _training(draft)
    end = find_end(draft)
    if end is not None:
        conclude(draft, end)
    elif not begun and start_teachers(draft) and probe_teachers(draft):
        create(draft)


def observe_attempt(draft: Draft) -> None:
    """Conditions of a live attempt."""
    view = draft.observation.ray_jobs.get(draft.attempt)
    if view is not None:
        draft.set(ConditionType.RAY_JOB_CREATED, Truth.TRUE, Reason.RAY_JOB_CREATED, f"RayJob {view.owned.name}")
        others_gone(draft)
    _training(draft)
    if _done_with_teachers(draft):
        release_teachers(draft)
    else:
        watch_teachers(draft)
    if view is not None and not draft.is_true(ConditionType.TRAINING_RUNNING) and view.waiting is not None:
        draft.wait_for(view.waiting)


def conclude(draft: Draft, end: End) -> None:
    """Act on an end."""
    if end.by_silence:
        draft.make_sure_of(Kind.RAY_JOB, names.ray_job(draft.job.name, draft.attempt))
        draft.make_sure_of(Kind.CONFIG_MAP, names.progress_config_map(draft.job.name))
    if end.kind is EndKind.SUCCEEDED:
        succeed(draft)
        return
    if end.kind is EndKind.PREEMPTED:
        attempt_preempted(draft, end.diagnosis.message)
    elif end.kind is EndKind.RELEASED:
        attempt_released(draft, end.diagnosis)
    else:
        attempt_failed(draft, end.diagnosis, end.teacher)
    if not draft.is_true(ConditionType.FAILED) and draft.refused_edit is None:
        between_attempts(draft)


def _training(draft: Draft) -> None:
    progress = draft.observation.progress
    if progress is None:
        if not draft.is_true(ConditionType.TRAINING_RUNNING):
            draft.set(ConditionType.TRAINING_RUNNING, Truth.FALSE, Reason.RAY_CLUSTER_STARTING, "no heartbeat yet")
        return
    exporting = progress.phase in DONE_WITH_TEACHERS
    reason = Reason.EXPORTING if exporting else Reason.TRAINING_RUNNING
    starting = progress.phase is TrainerPhase.STARTING
    message = "the trainer starts: nothing is trained yet" if starting else f"the trainer is {progress.phase}"
    draft.set(ConditionType.TRAINING_RUNNING, Truth.TRUE, reason, message)
    if progress.phase is TrainerPhase.TEACHER_UNAVAILABLE:
        who = progress.unavailable_teacher or "a teacher"
        why = next(
            (f" ({view.diagnosis})" for view in draft.observation.teachers if view.name == who and view.diagnosis), ""
        )
        draft.wait_for(
            Diagnosis(
                FailureClass.TEACHER,
                Reason.TEACHER_UNAVAILABLE,
                f"no replica of {who} answers{why}; samples are held, none is lost.",
                "Training goes on when one answers; lifecycle.teacherReadyDeadlineSeconds bounds the wait.",
            )
        )


def _done_with_teachers(draft: Draft) -> bool:
    progress, final = draft.observation.progress, draft.observation.final
    exporting = progress is not None and progress.phase in DONE_WITH_TEACHERS
    return exporting or (final is not None and final.outcome is Outcome.SUCCEEDED)
