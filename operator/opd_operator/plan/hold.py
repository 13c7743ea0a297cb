"""A started job whose spec was edited into one that is refused: what runs is followed to its end, nothing more is made from the
spec, and no accelerator waits for the correction."""

from __future__ import annotations

from opd_api.vocabulary import ConditionType, Reason
from opd_operator.children import names
from opd_operator.model import Kind, StepState
from opd_operator.plan.draft import Draft, Truth
from opd_operator.plan.student import adopt, has_begun
from opd_operator.plan.teachers import release_teachers


def held(draft: Draft) -> bool:
    """True when there is nothing to do in this pass but to wait for a correction of the spec."""
    if draft.refused_edit is None:
        return False
    if adopt(draft):  # what was observed is about the attempt before: the next look is about this one
        return True
    if draft.live and has_begun(draft):
        return False
    if draft.live:  # written down, and then its RayJob was refused
        draft.make_sure_of(Kind.RAY_JOB, names.ray_job(draft.job.name, draft.attempt))
        draft.attempts = [item for item in draft.attempts if item.number != draft.attempt]
    free(draft, draft.refused_edit.reason)
    draft.wait_for(draft.refused_edit)
    return True


def free(draft: Draft, reason: Reason) -> None:
    """Let go of all that a job holds which has no living attempt; it goes on from the steps that it then needs again."""
    observation = draft.observation
    release_teachers(draft)
    draft.set(ConditionType.TEACHERS_PROBED, Truth.UNKNOWN, reason)
    draft.remove_all(owned for (kind, _), owned in observation.owned.items() if kind is Kind.RAY_JOB)
    running = [step for step in (observation.check, *observation.probes.values()) if step is not None]
    draft.remove_all(step.owned for step in running if step.state is StepState.RUNNING)
    if draft.truth(ConditionType.INPUTS_CHECKED) is Truth.FALSE:
        draft.set(ConditionType.INPUTS_CHECKED, Truth.UNKNOWN, reason)
    draft.set(ConditionType.RAY_JOB_CREATED, Truth.FALSE, reason)
    draft.set(ConditionType.TRAINING_RUNNING, Truth.FALSE, reason)
    draft.next_attempt_time = None
