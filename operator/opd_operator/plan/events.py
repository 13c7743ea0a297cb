"""Events that follow from a change of the conditions. Those that belong to one decision are added where it is made."""

from __future__ import annotations

from opd_api.vocabulary import Annotation, ConditionType, Reason
from opd_operator.children.config import config_map_name, trainer_config
from opd_operator.children.rayjob import ray_job
from opd_operator.children.teacher import deployment, served
from opd_operator.plan.draft import Draft, Truth
from opd_operator.planned import EventType, PlannedEvent

#: Conditions whose change to True is told.
ACHIEVEMENTS = (
    ConditionType.ACCEPTED,
    ConditionType.INPUTS_CHECKED,
    ConditionType.TEACHERS_READY,
    ConditionType.TEACHERS_PROBED,
    ConditionType.TRAINING_RUNNING,
    ConditionType.SUCCEEDED,
    ConditionType.RESOURCES_RELEASED,
)
#: Reasons of waiting that are told by other events or are no news.
QUIET = frozenset({Reason.SUSPENDED, Reason.SUSPEND_REQUESTED, Reason.BACK_OFF, Reason.RELEASING, Reason.WAITING})


def changes(draft: Draft) -> list[PlannedEvent]:
    """Events for what this pass changed."""
    old = {condition.type: condition for condition in draft.job.status.conditions}
    found: list[PlannedEvent] = []
    for kind in ACHIEVEMENTS:
        condition = draft.conditions[kind]
        if draft.is_true(kind) and not (kind in old and Truth(old[kind].status) is Truth.TRUE):
            found.append(PlannedEvent(EventType.NORMAL, condition.reason, condition.message or kind.explanation))
    for kind in (ConditionType.FAILED, ConditionType.NAME_COLLISION):
        condition = draft.conditions[kind]
        if draft.is_true(kind) and not (kind in old and Truth(old[kind].status) is Truth.TRUE):
            found.append(PlannedEvent(EventType.WARNING, condition.reason, condition.message))
    lost = draft.conditions[ConditionType.TEACHERS_READY]
    before = old.get(ConditionType.TEACHERS_READY)
    if lost.reason == Reason.TEACHERS_LOST and before is not None and before.reason != Reason.TEACHERS_LOST:
        found.append(PlannedEvent(EventType.WARNING, lost.reason, lost.message))
    waits, before = draft.conditions[ConditionType.PROGRESSING], old.get(ConditionType.PROGRESSING)
    if draft.waits is not None and waits.reason not in QUIET and (before is None or before.reason != waits.reason):
        found.append(PlannedEvent(EventType.WARNING, waits.reason, waits.message))
    return [*found, *_deferred(draft)]


def _deferred(draft: Draft) -> list[PlannedEvent]:
    """A change of the spec that the live attempt does not see."""
    known = draft.job.status.observed_generation
    unread = draft.job.spec is None or draft.refused_edit is not None
    if not draft.live or unread or known in (None, draft.job.generation):
        return []
    waiting = []
    view = draft.observation.ray_jobs.get(draft.attempt)
    if view is not None:
        config = trainer_config(draft.context, draft.attempt)
        wanted = ray_job(draft.context, draft.attempt, config_map_name(draft.context, config), config.content_hash)
        if view.owned.annotations.get(Annotation.SPEC_HASH) != wanted["metadata"]["annotations"][Annotation.SPEC_HASH]:
            waiting.append("student")
    for teacher in served(draft.spec):
        seen = next((item for item in draft.observation.teachers if item.name == teacher.name), None)
        if seen is None or seen.deployment is None:
            continue
        wanted = deployment(draft.context, teacher, restart=seen.restart)
        known_hash = seen.deployment.annotations.get(Annotation.SPEC_HASH)
        if known_hash != wanted["metadata"]["annotations"][Annotation.SPEC_HASH]:
            waiting.append(f"teacher {teacher.name}")
    if not waiting:
        return []
    message = f"the change acts on {', '.join(waiting)} at the next attempt"
    return [PlannedEvent(EventType.NORMAL, Reason.CHANGE_DEFERRED.value, message)]
