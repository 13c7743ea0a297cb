"""The status that is written: phase, columns, teachers, training. Everything is derived; nothing here decides."""

from __future__ import annotations

from opd_api.progress import FinalDocument, ProgressDocument
from opd_api.v1alpha1 import (
    CheckpointStatus,
    FindingStatus,
    OPDJobStatus,
    ResultStatus,
    TeacherStatus,
    TrainingStatus,
)
from opd_api.vocabulary import ConditionType, Phase, Reason, TrainerPhase
from opd_operator.children.teacher import url
from opd_operator.model import Manifest
from opd_operator.plan.draft import Draft, Truth, moment, stamp

MAX_FINDINGS = 16
REVERSE_KL = "opd_reverse_kl"


def phase(draft: Draft) -> Phase:
    """Phase from conditions, for people."""
    if draft.is_true(ConditionType.SUCCEEDED):
        return Phase.SUCCEEDED
    if draft.is_true(ConditionType.FAILED):
        return Phase.FAILED
    if draft.is_true(ConditionType.SUSPENDED):
        return Phase.SUSPENDED
    if draft.truth(ConditionType.SUSPENDED) is Truth.UNKNOWN:
        return Phase.SUSPENDING
    if draft.live:
        if not draft.is_true(ConditionType.TRAINING_RUNNING):
            return Phase.STARTING_STUDENT
        exporting = draft.reason(ConditionType.TRAINING_RUNNING) == Reason.EXPORTING
        return Phase.FINISHING if exporting or draft.observation.final is not None else Phase.TRAINING
    if draft.entry is not None:
        held = draft.refused_edit is not None
        released = held or draft.reason(ConditionType.RAY_JOB_CREATED) == Reason.CAPACITY_RELEASED
        return Phase.PENDING if released else Phase.RETRYING
    return _before_the_student(draft)


def _before_the_student(draft: Draft) -> Phase:
    if draft.refused_edit is not None:
        return Phase.PENDING
    if not draft.is_true(ConditionType.INPUTS_CHECKED):
        return Phase.CHECKING if draft.truth(ConditionType.INPUTS_CHECKED) is Truth.FALSE else Phase.PENDING
    if not draft.is_true(ConditionType.TEACHERS_READY):
        return Phase.STARTING_TEACHERS
    return Phase.STARTING_STUDENT if draft.is_true(ConditionType.TEACHERS_PROBED) else Phase.PROBING_TEACHERS


def set_progressing(draft: Draft, now_in: Phase) -> None:
    """Progressing: True with the phase, or False with what it waits for."""
    if now_in in (Phase.SUCCEEDED, Phase.FAILED):
        stored = draft.reason(ConditionType.FAILED)  # of any version of the operator
        failed = Reason(stored) if stored in set(Reason) else Reason.RELEASED
        reason = Reason.SUCCEEDED if now_in is Phase.SUCCEEDED else failed
        message = "the job has ended; nothing is left to do" if now_in is Phase.SUCCEEDED else "the job has ended"
        draft.set(ConditionType.PROGRESSING, Truth.FALSE, reason, message)
    elif draft.waits is not None:
        draft.set(ConditionType.PROGRESSING, Truth.FALSE, *draft.waits)
    else:
        draft.set(
            ConditionType.PROGRESSING, Truth.TRUE, REASON_OF_PHASE.get(now_in, Reason.WAITING), now_in.explanation
        )


REASON_OF_PHASE = {
    Phase.CHECKING: Reason.CHECK_RUNNING,
    Phase.STARTING_TEACHERS: Reason.TEACHERS_STARTING,
    Phase.PROBING_TEACHERS: Reason.PROBE_RUNNING,
    Phase.STARTING_STUDENT: Reason.RAY_CLUSTER_STARTING,
    Phase.TRAINING: Reason.TRAINING_RUNNING,
    Phase.FINISHING: Reason.EXPORTING,
    Phase.RETRYING: Reason.BACK_OFF,
    Phase.SUSPENDING: Reason.SUSPEND_REQUESTED,
    Phase.SUSPENDED: Reason.SUSPENDED,
}


def build(draft: Draft) -> Manifest:
    """The complete status document."""
    old = draft.job.status
    training = _training(draft)
    checkpoint = training.last_checkpoint if training else None
    if checkpoint is not None:
        draft.set(
            ConditionType.CHECKPOINT_AVAILABLE,
            Truth.TRUE,
            Reason.CHECKPOINT_SAVED,
            f"step {checkpoint.step} at {checkpoint.path}",
        )
    _set_released(draft)
    now_in = phase(draft)
    set_progressing(draft, now_in)
    teachers = _teachers(draft)
    steps = f"{training.step}/{training.total_steps}" if training and training.total_steps else None
    status = OPDJobStatus(
        observed_generation=draft.job.generation,
        phase=now_in.value,
        reason=_reason(draft),
        conditions=[draft.conditions[kind] for kind in ConditionType if kind in draft.conditions],
        attempt=draft.attempt,
        start_time=draft.start_time,
        completion_time=draft.completion_time,
        teachers=teachers,
        teachers_ready=_teachers_column(draft, teachers),
        step_progress=steps,
        training=training,
        attempts=draft.attempts,
        findings=_findings(draft),
        result=_result(draft) or old.result,
        retries=draft.retries,
        next_attempt_time=draft.next_attempt_time,
        teacher_restarts=draft.teacher_restarts,
    )
    return status.to_yaml_dict()


def _reason(draft: Draft) -> str:
    """Reason behind the phase: of the end, else of what it waits for or does."""
    for kind in (ConditionType.FAILED, ConditionType.SUCCEEDED):
        if draft.is_true(kind):
            return draft.reason(kind)
    return draft.reason(ConditionType.PROGRESSING)


def _set_released(draft: Draft) -> None:
    """Whether accelerators are held, for jobs that have not ended."""
    if draft.is_true(ConditionType.SUCCEEDED) or draft.is_true(ConditionType.FAILED):
        return
    if draft.observation.holding_pods:
        draft.set(ConditionType.RESOURCES_RELEASED, Truth.FALSE, Reason.HOLDING, "pods of the job hold accelerators")
    elif draft.is_true(ConditionType.SUSPENDED):
        draft.set(
            ConditionType.RESOURCES_RELEASED, Truth.TRUE, Reason.RELEASED, "no pod of the job holds an accelerator"
        )


def _teachers(draft: Draft) -> list[TeacherStatus]:
    if draft.job.spec is None:
        return list(draft.job.status.teachers)
    views = {view.name: view for view in draft.observation.teachers}
    found = []
    for teacher in draft.job.spec.teachers:
        view = views.get(teacher.name)
        if view is not None:
            message = str(view.diagnosis) if view.diagnosis else None
            found.append(
                TeacherStatus(
                    name=teacher.name,
                    ready=view.ready,
                    desired=view.desired,
                    endpoint=url(draft.context, teacher),
                    message=message,
                )
            )
        else:
            # Somebody else's server, or inside the learner: the operator has no replica of it to wait for.
            count = len(teacher.endpoints) or 1
            endpoint = teacher.endpoints[0] if teacher.endpoints else None
            found.append(TeacherStatus(name=teacher.name, ready=count, desired=count, endpoint=endpoint, message=None))
    return found


def _teachers_column(draft: Draft, teachers: list[TeacherStatus]) -> str | None:
    """1/2, but no 0/2 of teachers that nobody needs any more: it would read like a fault."""
    if draft.reason(ConditionType.TEACHERS_READY) == Reason.TEACHERS_RELEASED:
        return "released"
    if not teachers:
        return None
    if draft.is_true(ConditionType.SUCCEEDED) or draft.is_true(ConditionType.FAILED):
        return "-"
    return f"{sum(item.ready >= item.desired for item in teachers)}/{len(teachers)}"


def _training(draft: Draft) -> TrainingStatus | None:
    """Progress, refreshed at most every `training_status_seconds` unless something else than numbers changed."""
    old, progress, final = draft.job.status.training, draft.observation.progress, draft.observation.final
    if progress is None:
        return _closed(old, final)
    seen = draft.observation.memory.sequence
    written = moment(old.last_heartbeat_time) if old else None
    calm = (
        old is not None
        and written is not None
        and final is None
        and draft.attempt == (draft.job.status.attempt or 1)
        and old.activity == progress.phase
    )
    if calm and written is not None and not draft.passed(written, draft.settings.training_status_seconds):
        return old
    if old is not None and seen is not None and old.last_heartbeat_time == stamp(seen.at) and final is None and calm:
        return old
    return _closed(_from_progress(progress, old, stamp(seen.at if seen else draft.now)), final)


def _from_progress(progress: ProgressDocument, old: TrainingStatus | None, seen: str) -> TrainingStatus:
    total = progress.total_steps
    kl = progress.metrics.get(REVERSE_KL)
    checkpoint: CheckpointStatus | None = progress.last_checkpoint or (old.last_checkpoint if old else None)
    return TrainingStatus(
        step=progress.step,
        total_steps=total,
        percent=min(100, 100 * progress.step // total) if total else 0,
        estimated_remaining_seconds=progress.estimated_remaining_seconds,
        metrics=progress.metrics,
        reverse_kl=f"{kl:.4g}" if kl is not None else (old.reverse_kl if old else None),
        last_heartbeat_time=seen,
        last_checkpoint=checkpoint,
        weight_version=progress.weight_version,
        activity=progress.phase.value,
    )


def _closed(training: TrainingStatus | None, final: FinalDocument | None) -> TrainingStatus | None:
    """The last word of an attempt over its last heartbeat."""
    if training is None or final is None:
        return training
    total = training.total_steps
    return training.model_copy(
        update={
            "step": final.step,
            "percent": min(100, 100 * final.step // total) if total else training.percent,
            "last_checkpoint": final.checkpoint or training.last_checkpoint,
            "activity": TrainerPhase.FINISHED.value,
        }
    )


def _findings(draft: Draft) -> list[FindingStatus]:
    """Of the rules and of the check; those of a check whose Job is gone are kept."""
    rules = list(draft.job.findings)
    check = draft.observation.check
    if check is not None and check.document is not None:
        seen = check.document.findings
    else:
        known = {(item.code, item.path) for item in rules}
        seen = [item for item in draft.job.status.findings if (item.code, item.path) not in known and draft.start_time]
    return [*rules, *seen][:MAX_FINDINGS]


def _result(draft: Draft) -> ResultStatus | None:
    final = draft.observation.final
    if final is None:
        return None
    checkpoint = final.checkpoint.path if final.checkpoint else None
    return final.result or (
        ResultStatus(checkpoint=checkpoint, exported_model=None, report=None) if checkpoint else None
    )
