"""Third step: the teacher servers. They are applied when absent, at a new attempt, or to restart one; never otherwise, so
that an upgrade of the operator touches no running server."""

from __future__ import annotations

from datetime import datetime

from opd_api.v1alpha1 import Teacher
from opd_api.vocabulary import Annotation, ConditionType, FailureClass, Reason
from opd_operator.children import names
from opd_operator.children.network import network_policy
from opd_operator.children.teacher import deployment, keys_secret, served, service
from opd_operator.model import Diagnosis, Kind, TeacherView
from opd_operator.plan.draft import Draft, Truth, moment
from opd_operator.plan.outcome import fail, may_retry, restart_teachers

#: Waiting longer or restarting cannot help against these.
HOPELESS = frozenset({FailureClass.CAPACITY, FailureClass.CONFIG})


def start_teachers(draft: Draft) -> bool:
    """True when every replica of every served teacher is ready."""
    _apply_policy(draft)
    teachers = served(draft.spec)
    if not teachers:
        draft.set(
            ConditionType.TEACHERS_READY, Truth.TRUE, Reason.TEACHERS_READY, "no teacher is served by the operator"
        )
        return True
    _apply(draft, teachers)
    if _all_ready(draft):
        draft.set(ConditionType.TEACHERS_READY, Truth.TRUE, Reason.TEACHERS_READY, "every replica is ready")
        return True
    lost = draft.reason(ConditionType.TEACHERS_READY) in (Reason.TEACHERS_READY, Reason.TEACHERS_LOST)
    reason = Reason.TEACHERS_LOST if lost else Reason.TEACHERS_STARTING
    draft.set(ConditionType.TEACHERS_READY, Truth.FALSE, reason, summary(draft))
    _judge(draft)
    return False


def watch_teachers(draft: Draft) -> None:
    """Say how the teachers are while the student runs or waits, and put back what somebody deleted. No deadline is kept:
    the trainer holds its samples and decides."""
    if draft.reason(ConditionType.TEACHERS_READY) == Reason.TEACHERS_RELEASED:
        return
    if not draft.spec.suspend and draft.refused_edit is None:
        _apply_policy(draft)
        _apply(draft, served(draft.spec))
    if not served(draft.spec):
        return
    if _all_ready(draft):
        draft.set(ConditionType.TEACHERS_READY, Truth.TRUE, Reason.TEACHERS_READY, "every replica is ready")
    elif (
        draft.is_true(ConditionType.TEACHERS_READY)
        or draft.reason(ConditionType.TEACHERS_READY) == Reason.TEACHERS_LOST
    ):
        draft.set(ConditionType.TEACHERS_READY, Truth.FALSE, Reason.TEACHERS_LOST, summary(draft))


def release_teachers(draft: Draft, reason: Reason = Reason.TEACHERS_RELEASED) -> None:
    """Free the accelerators of the teachers."""
    for teacher in served(draft.spec) if draft.job.spec else ():
        name = names.teacher(draft.job.name, teacher.name)
        draft.remove(draft.owned(Kind.DEPLOYMENT, name))
        draft.remove(draft.owned(Kind.SERVICE, name))
    if not draft.is_true(ConditionType.TEACHERS_READY) and draft.truth(ConditionType.TEACHERS_READY) is Truth.UNKNOWN:
        return
    draft.set(ConditionType.TEACHERS_READY, Truth.UNKNOWN, reason, "teachers are not needed now")


def summary(draft: Draft) -> str:
    """Which teachers wait and why."""
    parts = []
    for view in draft.observation.teachers:
        if not view.all_ready:
            why = f": {view.diagnosis}" if view.diagnosis else ""
            parts.append(f"{view.name} {view.ready}/{view.desired} ready{why}")
    return "; ".join(parts) or "teachers start"


def _apply_policy(draft: Draft) -> None:
    if not draft.spec.network_policy.enabled:
        return
    policy = network_policy(draft.context)
    if draft.owned(Kind.NETWORK_POLICY, policy["metadata"]["name"]) is None or draft.refresh:
        draft.apply.append(policy)
        draft.started()


def _apply(draft: Draft, teachers: list[Teacher]) -> None:
    views = {view.name: view for view in draft.observation.teachers}
    absent = [item for item in teachers if views[item.name].deployment is None]
    if absent:
        draft.secrets.append(keys_secret(draft.context))
        draft.started()
    for teacher in teachers:
        name = names.teacher(draft.job.name, teacher.name)
        if draft.owned(Kind.SERVICE, name) is None:
            draft.apply.append(service(draft.context, teacher))
        if teacher in absent:
            draft.apply.append(deployment(draft.context, teacher, restart=0))
        elif draft.refresh:
            _refresh(draft, teacher, views[teacher.name])


def _refresh(draft: Draft, teacher: Teacher, view: TeacherView) -> None:
    """Let changes of placement, args, image or template act, if there are any."""
    wanted = deployment(draft.context, teacher, restart=view.restart)
    known = view.deployment.annotations.get(Annotation.SPEC_HASH) if view.deployment else None
    if wanted["metadata"]["annotations"][Annotation.SPEC_HASH] != known:
        draft.apply.append(wanted)


def _all_ready(draft: Draft) -> bool:
    applied = {item["metadata"]["name"] for item in draft.apply}
    return all(
        view.all_ready and names.teacher(draft.job.name, view.name) not in applied
        for view in draft.observation.teachers
    )


def _judge(draft: Draft) -> None:
    """Fail or restart what will not become ready: at the deadline, or when a container ends again and again."""
    waiting = [view for view in draft.observation.teachers if not view.all_ready]
    diagnosed = next((view for view in waiting if view.diagnosis is not None), None)
    diagnosis = diagnosed.diagnosis if diagnosed else None
    if diagnosis is not None:
        draft.wait_for(diagnosis)
    seconds = draft.spec.lifecycle.teacher_ready_deadline_seconds
    late = draft.passed(_clock(draft), seconds)
    crashing = next(
        (view for view in waiting if view.restarts_of_container >= draft.settings.teacher_crash_restarts), None
    )
    if not late and crashing is None:
        return
    blamed = crashing or diagnosed or waiting[0]
    diagnosis = (
        blamed.diagnosis
        or draft.diagnosis
        or Diagnosis(
            FailureClass.TEACHER,
            Reason.TEACHER_NOT_READY,
            f"teacher {blamed.name} was not ready after {seconds} s",
            "Raise startupTimeoutSeconds of the teacher and lifecycle.teacherReadyDeadlineSeconds if it only needs longer.",
        )
    )
    if diagnosis.failure_class in HOPELESS or not may_retry(draft, FailureClass.TEACHER):
        as_teacher = diagnosis.failure_class not in HOPELESS
        fail(draft, _as_teacher(diagnosis) if as_teacher else diagnosis)
        return
    restart_teachers(draft, blamed.name)


def _as_teacher(diagnosis: Diagnosis) -> Diagnosis:
    return Diagnosis(FailureClass.TEACHER, diagnosis.reason, diagnosis.message, diagnosis.hint)


def _clock(draft: Draft) -> datetime:
    """Start of the deadline: when they were found not ready, but not before the attempt had its turn."""
    start = draft.since(ConditionType.TEACHERS_READY)
    ends = [moment(item.end_time) for item in draft.attempts if item.end_time]
    return max([start, *[end for end in ends if end is not None]])
