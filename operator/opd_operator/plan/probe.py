"""Fourth step: teachers are asked for real scores. A probe holds for exactly the pods that it asked."""

from __future__ import annotations

from opd_api.vocabulary import ConditionType, FailureClass, Outcome, Reason
from opd_operator.children import names
from opd_operator.children.preflight import probe_job
from opd_operator.children.teacher import probed
from opd_operator.model import Diagnosis, Kind, StepJob, StepState
from opd_operator.plan.check import failure_of
from opd_operator.plan.draft import Draft, Truth, moment
from opd_operator.plan.outcome import fail, may_retry, restart_teachers
from opd_operator.plan.steps import outdated, retry_step


def probe_teachers(draft: Draft) -> bool:
    """True when every teacher gave real scores (or probing is off, or no teacher answers over HTTP)."""
    if not draft.spec.preflight.enabled:
        draft.set(ConditionType.TEACHERS_PROBED, Truth.TRUE, Reason.CHECK_DISABLED, "preflight.enabled is false")
        return True
    if not probed(draft.spec):
        draft.set(ConditionType.TEACHERS_PROBED, Truth.TRUE, Reason.PROBE_PASSED, "teachers run inside the learner")
        return True
    subjects = _subjects(draft)
    step = draft.observation.probes.get(names.probe_job(draft.job.name, subjects))
    if step is None or step.owned.deleting:
        _start(draft, subjects)
        return False
    if step.state is StepState.SUCCEEDED and not step.undecided:
        ok = step.document.outcome is Outcome.SUCCEEDED if step.document else not step.pod_ended
        if ok:
            message = step.document.message if step.document else ""
            draft.set(ConditionType.TEACHERS_PROBED, Truth.TRUE, Reason.PROBE_PASSED, message or "scores are real")
            return True
        _failed(draft, step)
        return False
    if step.state is StepState.FAILED and not step.undecided:
        _failed(draft, step)
        return False
    if draft.refresh and outdated(draft, step, probe_job(draft.context, draft.create_config()[0], subjects)):
        draft.set(ConditionType.TEACHERS_PROBED, Truth.UNKNOWN, Reason.WAITING, "the spec was edited")
        return False
    draft.set(
        ConditionType.TEACHERS_PROBED,
        Truth.FALSE,
        Reason.PROBE_RUNNING,
        str(step.diagnosis) if step.diagnosis else "the teacher probe runs",
    )
    if step.diagnosis is not None:
        draft.wait_for(step.diagnosis)
    _deadline(draft, step.diagnosis)
    return False


def _subjects(draft: Draft) -> list[str]:
    """What identifies a probe: ready pods, endpoints of others, and how often teachers were restarted."""
    found = [uid for view in draft.observation.teachers for uid in view.ready_pods]
    found += [url for teacher in draft.spec.teachers for url in teacher.endpoints]
    return [*found, f"restarts={draft.teacher_restarts}"]


def _start(draft: Draft, subjects: list[str]) -> None:
    if draft.truth(ConditionType.TEACHERS_PROBED) is Truth.TRUE:
        # Other pods answer than those that were probed: the clock starts anew.
        draft.set(ConditionType.TEACHERS_PROBED, Truth.UNKNOWN, Reason.WAITING, "other pods answer now")
    draft.set(ConditionType.TEACHERS_PROBED, Truth.FALSE, Reason.PROBE_RUNNING, "the teacher probe runs")
    pause = moment(draft.next_attempt_time)
    if pause is not None and not draft.passed(pause, 0):
        draft.wait(Reason.BACK_OFF, "the teacher probe is tried again")
        return
    draft.next_attempt_time = None
    draft.remove_all(step.owned for step in draft.observation.probes.values())
    name, _ = draft.create_config()
    draft.create_once(Kind.JOB, probe_job(draft.context, name, subjects))
    _deadline(draft, draft.diagnosis)


def _failed(draft: Draft, step: StepJob) -> None:
    diagnosis = failure_of(step, "the teacher probe")
    if diagnosis.failure_class is FailureClass.INFRASTRUCTURE and may_retry(draft, FailureClass.INFRASTRUCTURE):
        retry_step(draft, step, diagnosis)
        return
    if diagnosis.failure_class is FailureClass.TEACHER and may_retry(draft, FailureClass.TEACHER):
        restart_teachers(draft, step.document.teacher if step.document else None)
        draft.wait_for(diagnosis)
        return
    draft.set(ConditionType.TEACHERS_PROBED, Truth.FALSE, Reason.PROBE_FAILED, str(diagnosis))
    fail(draft, diagnosis)


def _deadline(draft: Draft, diagnosis: Diagnosis | None) -> None:
    seconds = draft.spec.lifecycle.teacher_ready_deadline_seconds
    if draft.passed(draft.since(ConditionType.TEACHERS_PROBED), seconds):
        late = Diagnosis(
            FailureClass.TEACHER,
            Reason.TEACHER_NOT_READY,
            f"the teacher probe was not done after {seconds} s",
            "See the log of the probe's pod; raise lifecycle.teacherReadyDeadlineSeconds if it only needs longer.",
        )
        draft.set(ConditionType.TEACHERS_PROBED, Truth.FALSE, Reason.PROBE_FAILED, str(diagnosis or late))
        fail(draft, diagnosis or late)
