"""All decisions of the operator: `plan(observation, now, settings) -> Plan`. Pure, and repeated until nothing is left to do.

accept -> rehearse -> check inputs -> start teachers -> probe teachers -> start student -> train -> finish. Each step either
says that it is done or what it waits for; the status of the last pass is the only state between two passes.
"""

from __future__ import annotations

from datetime import datetime

from opd_api.vocabulary import ConditionType
from opd_operator.model import Kind, Observation
from opd_operator.plan.accept import RETRY_WRITE_SECONDS, accept, corrected, first_visit, refused_writes, start_over
from opd_operator.plan.check import check_inputs
from opd_operator.plan.draft import Draft
from opd_operator.plan.events import changes
from opd_operator.plan.finish import overdue, release
from opd_operator.plan.hold import held
from opd_operator.plan.rehearse import rehearsed
from opd_operator.plan.status import build
from opd_operator.plan.student import begin, between_attempts
from opd_operator.plan.suspend import suspend_or_resume
from opd_operator.plan.train import follow
from opd_operator.planned import Plan
from opd_operator.settings import Settings

#: A look at least this soon after a planned time, so that a clock's rounding does not cost a second look.
WAKE_SLACK_SECONDS = 0.05


def plan(observation: Observation, now: datetime, settings: Settings) -> Plan:
    """What this pass does. Nothing at all for a job whose namespace is being deleted: owner references free its children, and
    every create would be refused."""
    if observation.namespace_terminating:
        return Plan()
    draft = Draft.begin(observation, now, settings)
    if observation.job.deleting:
        return _let_go(draft)
    if corrected(draft):
        start_over(draft)
    first_visit(draft)
    if not _ended(draft):
        _advance(draft)
    if _ended(draft):
        _forget_starts(draft)
        release(draft)
        if draft.observation.problems:  # a delete was refused, and nothing else will happen to the job
            draft.passed(draft.now, RETRY_WRITE_SECONDS)
    return _frozen(draft)


def _let_go(draft: Draft) -> Plan:
    """A job that is deleted and still there waits for somebody's finalizer: owner references act only when it is gone, and
    until then its pods would hold their accelerators."""
    for (kind, _), owned in draft.observation.owned.items():
        if kind in (Kind.DEPLOYMENT, Kind.RAY_JOB, Kind.JOB):
            draft.remove(owned)
    again = RETRY_WRITE_SECONDS if draft.observation.problems else None
    return Plan(delete=draft.deletions, requeue_after=again)


def _advance(draft: Draft) -> None:
    """One pass over the steps of a job that has not ended."""
    if not accept(draft) or not refused_writes(draft) or not rehearsed(draft):
        return
    draft.refresh = _changed_before_the_student(draft)
    if not suspend_or_resume(draft) or overdue(draft) or held(draft) or not check_inputs(draft):
        return
    if draft.entry is None:
        begin(draft)
    elif draft.live:
        follow(draft)
    else:
        between_attempts(draft)


def _changed_before_the_student(draft: Draft) -> bool:
    """True when the spec was edited before the current attempt began: the edit acts at once."""
    known = draft.job.status.observed_generation
    return known is not None and known != draft.job.generation and draft.entry is None


def _ended(draft: Draft) -> bool:
    return draft.is_true(ConditionType.SUCCEEDED) or draft.is_true(ConditionType.FAILED)


def _forget_starts(draft: Draft) -> None:
    """A job that ended in this pass creates nothing, whatever an earlier step of the pass had asked for."""
    draft.secrets.clear()
    draft.create.clear()
    draft.apply.clear()
    draft.annotate.clear()


def _frozen(draft: Draft) -> Plan:
    status = build(draft)
    # The answer to a rehearsal comes at once, and is what there is to tell.
    asked = bool(draft.rehearse) and not draft.observation.problems
    changed = status != draft.job.raw_status and not asked
    if len(draft.deletions) < len(draft.delete):
        draft.wake(draft.now)
    wake = None
    if draft.wake_at is not None:
        wake = max((draft.wake_at - draft.now).total_seconds(), 0.0) + WAKE_SLACK_SECONDS
    return Plan(
        doubt=tuple(draft.doubt),
        delete=draft.deletions,
        rehearse=tuple(draft.rehearse),
        secrets=tuple(draft.secrets),
        create=tuple(draft.create),
        apply=tuple(draft.apply),
        annotate=tuple(draft.annotate),
        status=status if changed else None,
        events=() if asked else (*draft.events, *changes(draft)) if changed else tuple(draft.events),
        requeue_after=wake,
        diagnosis=draft.diagnosis,
    )
