"""What follows from an end: success, failure, or a next attempt by the table of failure classes."""

from __future__ import annotations

import hashlib
from datetime import timedelta

from opd_api.v1alpha1 import AttemptStatus
from opd_api.vocabulary import ConditionType, FailureClass, Reason
from opd_operator.children import names
from opd_operator.children.teacher import deployment, served
from opd_operator.model import Diagnosis, Kind
from opd_operator.plan.draft import Draft, Truth, stamp
from opd_operator.planned import EventType

ONE_RETRY = frozenset({FailureClass.INTERNAL, FailureClass.STALL})
#: Restarts of a teacher before the job fails.
TEACHER_RESTARTS = 1


def fail(draft: Draft, diagnosis: Diagnosis, reason: Reason | None = None) -> None:
    """End the job without success."""
    draft.diagnosis = diagnosis
    _close(draft, diagnosis.failure_class, diagnosis.reason, str(diagnosis))
    draft.set(ConditionType.FAILED, Truth.TRUE, reason or diagnosis.reason, str(diagnosis))
    draft.set(ConditionType.SUCCEEDED, Truth.FALSE, reason or diagnosis.reason, str(diagnosis))
    draft.set(ConditionType.TRAINING_RUNNING, Truth.FALSE, reason or diagnosis.reason)
    draft.completion_time = stamp(draft.now)
    draft.next_attempt_time = None


def succeed(draft: Draft) -> None:
    """End the job with success."""
    _close(draft, None, Reason.SUCCEEDED, draft.observation.final.message if draft.observation.final else "")
    draft.set(ConditionType.SUCCEEDED, Truth.TRUE, Reason.SUCCEEDED, "the distilled student is there")
    draft.set(ConditionType.FAILED, Truth.FALSE, Reason.SUCCEEDED)
    draft.set(ConditionType.TRAINING_RUNNING, Truth.FALSE, Reason.SUCCEEDED)
    draft.completion_time = stamp(draft.now)
    draft.next_attempt_time = None


def attempt_failed(draft: Draft, diagnosis: Diagnosis, teacher: str | None = None) -> None:
    """An attempt ended with a class: fail, or try again as the class says."""
    if not may_retry(draft, diagnosis.failure_class):
        exhausted = diagnosis.failure_class is FailureClass.INFRASTRUCTURE
        fail(draft, diagnosis, Reason.BACKOFF_LIMIT_EXCEEDED if exhausted else None)
        return
    draft.diagnosis = diagnosis
    if diagnosis.failure_class is FailureClass.TEACHER:
        restart_teachers(draft, teacher)
    delay = draft.settings.retry_backoff_seconds
    if diagnosis.failure_class is FailureClass.INFRASTRUCTURE:
        delay = backoff_seconds(draft)
        draft.retries += 1
    _close(draft, diagnosis.failure_class, diagnosis.reason, str(diagnosis))
    _next(draft, delay)
    draft.event(
        EventType.WARNING,
        Reason.ATTEMPT_FAILED,
        f"attempt {draft.attempt} failed ({diagnosis.failure_class}, {diagnosis.reason}): {diagnosis}",
    )


def attempt_preempted(draft: Draft, message: str) -> None:
    """The trainer saved and stopped on request: the next attempt is not counted."""
    _close(draft, None, Reason.PREEMPTED, message)
    _next(draft, draft.settings.retry_backoff_seconds)
    draft.event(EventType.NORMAL, Reason.PREEMPTED, f"attempt {draft.attempt} saved and stopped: {message}")


def attempt_released(draft: Draft, diagnosis: Diagnosis) -> None:
    """The student found no room: let go of everything for a while, so that another job can have it."""
    draft.diagnosis = diagnosis
    _close(draft, FailureClass.CAPACITY, Reason.CAPACITY_RELEASED, str(diagnosis))
    _next(draft, capacity_pause_seconds(draft))
    draft.event(EventType.WARNING, Reason.CAPACITY_RELEASED, f"everything was freed for a while: {diagnosis}")


def attempt_stopped(draft: Draft, message: str) -> None:
    """The attempt was ended because the job is suspended; nothing is counted."""
    _close(draft, None, Reason.SUSPENDED, message)


def may_retry(draft: Draft, failure: FailureClass) -> bool:
    """The retry column of the table of classes."""
    if failure is FailureClass.INFRASTRUCTURE:
        return draft.retries < draft.spec.lifecycle.backoff_limit
    if failure is FailureClass.TEACHER:
        return draft.teacher_restarts < TEACHER_RESTARTS
    if failure in ONE_RETRY:
        return all(item.failure_class != failure for item in draft.attempts)
    return False


def restart_teachers(draft: Draft, teacher: str | None) -> None:
    """Replace the pods of one teacher, or of all when nobody is named. Their readiness starts anew."""
    draft.teacher_restarts += 1
    for item in served(draft.spec):
        exists = draft.owned(Kind.DEPLOYMENT, names.teacher(draft.job.name, item.name)) is not None
        if exists and teacher in (None, item.name) and draft.refused_edit is None:
            draft.apply.append(deployment(draft.context, item, restart=draft.teacher_restarts))
    who = f"teacher {teacher}" if teacher else "the teachers"
    draft.set(ConditionType.TEACHERS_READY, Truth.UNKNOWN, Reason.TEACHER_RESTARTED, f"{who} restarts")
    draft.set(ConditionType.TEACHERS_PROBED, Truth.UNKNOWN, Reason.WAITING, "after the restart")
    draft.event(EventType.WARNING, Reason.TEACHER_RESTARTED, f"{who} is restarted once")


def backoff_seconds(draft: Draft) -> float:
    """Exponential: 10 s, 20 s, 40 s … 10 min by default."""
    settings = draft.settings
    return min(settings.retry_backoff_seconds * 2.0 ** min(draft.retries, 30), settings.retry_backoff_max_seconds)


def capacity_pause_seconds(draft: Draft) -> float:
    """Spread over the settings' range by a hash of job and attempt: two jobs that wait for each other part ways."""
    low, high = draft.settings.capacity_backoff_min_seconds, draft.settings.capacity_backoff_max_seconds
    digest = hashlib.sha256(f"{draft.job.uid}/{draft.attempt}".encode()).digest()
    return low + (high - low) * int.from_bytes(digest[:8], "big") / 2**64


def _close(draft: Draft, failure: FailureClass | None, reason: Reason, message: str) -> None:
    """Write the end into the attempt's record, if the attempt has begun."""
    draft.closing = True
    entry = draft.entry
    if entry is None or entry.end_time is not None:
        return
    draft.record(
        AttemptStatus(
            number=entry.number,
            ray_job_name=entry.ray_job_name,
            start_time=entry.start_time,
            end_time=stamp(draft.now),
            failure_class=failure.value if failure else None,
            reason=reason.value,
            message=message[:1024] or None,
        )
    )


def _next(draft: Draft, seconds: float) -> None:
    draft.next_attempt_time = stamp(draft.now + timedelta(seconds=seconds))
    draft.set(ConditionType.TRAINING_RUNNING, Truth.FALSE, Reason.BACK_OFF)
