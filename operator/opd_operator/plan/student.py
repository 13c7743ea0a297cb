"""Fifth step: the RayJob of an attempt, and the pause between two attempts.

The gate is here: `begin` reaches `_create` only when every teacher is ready and probed in this very observation.
"""

from __future__ import annotations

from opd_api.v1alpha1 import AttemptStatus
from opd_api.vocabulary import ConditionType, Reason
from opd_operator.children import names
from opd_operator.children.access import head_access
from opd_operator.children.config import progress_config_map
from opd_operator.children.rayjob import ray_job
from opd_operator.diagnose_ray import no_kuberay
from opd_operator.model import Kind
from opd_operator.plan.draft import Draft, Truth, moment, stamp
from opd_operator.plan.probe import probe_teachers
from opd_operator.plan.teachers import release_teachers, start_teachers, watch_teachers
from opd_operator.planned import EventType


def begin(draft: Draft) -> None:
    """Bring the current attempt to its RayJob."""
    if _kuberay_is_missing(draft):
        return
    if not start_teachers(draft) or not probe_teachers(draft) or not others_gone(draft):
        return
    record_start(draft)
    create(draft)
    draft.event(EventType.NORMAL, Reason.ATTEMPT_STARTED, f"attempt {draft.attempt} starts")


def _kuberay_is_missing(draft: Draft) -> bool:
    """Without KubeRay there will be no student, so no teacher holds an accelerator. It may be installed at any time."""
    if draft.observation.kuberay_missing:
        release_teachers(draft)
        draft.wait_for(no_kuberay("this cluster does not serve RayJobs (ray.io/v1)."))
    return draft.observation.kuberay_missing


def adopt(draft: Draft) -> bool:
    """Make an attempt of a RayJob that lives and of which the status does not tell yet. It must be written down before the
    RayJob goes: its number marks what it wrote, and must not be given to another attempt."""
    told = {item.number for item in draft.attempts}
    untold = [number for number in draft.observation.ray_jobs if number >= draft.attempt and number not in told]
    if untold:
        draft.attempt = max(untold)
        record_start(draft)
    return bool(untold)


def has_begun(draft: Draft) -> bool:
    """Whether something of the current attempt was seen: its RayJob, a pod of it, or a word of its trainer."""
    observation = draft.observation
    told = observation.progress is not None or observation.final is not None
    seen = draft.is_true(ConditionType.RAY_JOB_CREATED) or draft.attempt in observation.ray_jobs
    return seen or told or bool(observation.student_pods.get(draft.attempt))


def record_start(draft: Draft) -> None:
    """The current attempt begins now."""
    draft.record(
        AttemptStatus(
            number=draft.attempt,
            ray_job_name=names.ray_job(draft.job.name, draft.attempt),
            start_time=stamp(draft.now),
            end_time=None,
            failure_class=None,
            reason=None,
            message=None,
        )
    )


def others_gone(draft: Draft) -> bool:
    """Remove every RayJob of ours that is not the current attempt's, whatever the status says of it. True when none lives:
    two students would write one run directory and hold accelerators for each other."""
    own = names.ray_job(draft.job.name, draft.attempt)
    others = [
        owned
        for (kind, name), owned in draft.observation.owned.items()
        if kind is Kind.RAY_JOB and name != own and not owned.deleting
    ]
    draft.remove_all(others)
    if others:
        draft.wait(Reason.WAITING, f"RayJob {others[0].name} has to go first: a job has one student at a time")
    return not others


def create(draft: Draft) -> None:
    """Ask for the RayJob and what it needs. Repeated until the RayJob is seen."""
    if not others_gone(draft):
        return
    context = draft.context
    name, content_hash = draft.create_config()
    draft.create_once(Kind.CONFIG_MAP, progress_config_map(context))
    # The cache holds none of these kinds; a second POST is answered with AlreadyExists.
    draft.create.extend(head_access(context))
    draft.create_once(Kind.RAY_JOB, ray_job(context, draft.attempt, name, content_hash))
    draft.set(ConditionType.RAY_JOB_CREATED, Truth.FALSE, Reason.RAY_CLUSTER_STARTING, "the RayJob is being created")


def between_attempts(draft: Draft) -> None:
    """Remove the old RayJob, wait for its pods and the back-off, then begin the next attempt."""
    entry = draft.entry
    old = draft.observation.ray_jobs.get(draft.attempt)
    draft.remove(old.owned if old else None)
    released = entry is not None and entry.reason == Reason.CAPACITY_RELEASED
    if released:
        release_teachers(draft)
    else:
        watch_teachers(draft)
    pause = moment(draft.next_attempt_time) or draft.now
    reason = Reason.CAPACITY_RELEASED if released else Reason.BACK_OFF
    draft.set(ConditionType.TRAINING_RUNNING, Truth.FALSE, reason)
    draft.set(ConditionType.RAY_JOB_CREATED, Truth.FALSE, reason, f"attempt {draft.attempt + 1} follows")
    rested = draft.passed(pause, 0)
    lives = old is not None and not old.owned.deleting
    if not rested or lives or not _old_pods_gone(draft):
        waits_for = "the back-off" if not rested else "the old attempt's pods to go"
        draft.wait(
            reason, f"attempt {draft.attempt + 1} waits for {waits_for}; attempt {draft.attempt} ended: {_why(draft)}"
        )
        return
    draft.attempt += 1
    draft.next_attempt_time = None
    draft.refresh = True
    begin(draft)


def _old_pods_gone(draft: Draft) -> bool:
    """Pods of older attempts are gone, or have had their time: one on a dead node stays Terminating for ever, and the fence
    in the run directory makes a second trainer harmless."""
    if sum(count for attempt, count in draft.observation.student_pods.items() if attempt <= draft.attempt) == 0:
        return True
    entry = draft.entry
    end = (moment(entry.end_time) if entry else None) or draft.now
    patience = draft.spec.lifecycle.preemption_grace_seconds + draft.settings.old_pods_extra_seconds
    return draft.passed(end, patience)


def _why(draft: Draft) -> str:
    entry = draft.entry
    return f"{entry.reason}: {entry.message or ''}"[:400] if entry else ""
