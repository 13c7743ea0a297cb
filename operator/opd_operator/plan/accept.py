"""First step: is this a job we can run? And: were the writes of the last pass taken?"""

from __future__ import annotations

from collections.abc import Sequence

from opd_api.cel import may_change
from opd_api.v1alpha1 import FindingStatus
from opd_api.vocabulary import ConditionType, FailureClass, Reason, Severity
from opd_operator.diagnose import QUOTA_HINT
from opd_operator.diagnose_ray import no_kuberay
from opd_operator.model import Diagnosis, WriteProblem, WriteProblemKind
from opd_operator.plan.draft import Draft, Truth
from opd_operator.plan.outcome import fail
from opd_operator.planned import EventType, PlannedEvent

#: While a write is refused it is tried again at this pace.
RETRY_WRITE_SECONDS = 15.0
#: The same while the API server only has to read a type that is new to it.
RETRY_NEW_TYPE_SECONDS = 3.0
CORRECT = "Correct the spec: what runs is not touched, and the job goes on by itself."
NO_COLLISION = "no object of somebody else has the name of a child"
INITIAL = {
    ConditionType.ACCEPTED: (Reason.RECEIVED, "the rules have not been asked yet"),
    ConditionType.SUSPENDED: (Reason.RECEIVED, "the job is not suspended"),
    ConditionType.INPUTS_CHECKED: (Reason.WAITING, "the input check has not begun"),
    ConditionType.TEACHERS_READY: (Reason.WAITING, "teachers start after the input check"),
    ConditionType.TEACHERS_PROBED: (Reason.WAITING, "teachers are probed when all are ready"),
    ConditionType.RAY_JOB_CREATED: (Reason.WAITING, "the RayJob follows the probe"),
    ConditionType.TRAINING_RUNNING: (Reason.WAITING, "training follows the RayJob"),
    ConditionType.PROGRESSING: (Reason.RECEIVED, "the operator saw the job"),
    ConditionType.CHECKPOINT_AVAILABLE: (Reason.WAITING, "no checkpoint is complete yet"),
    ConditionType.SUCCEEDED: (Reason.WAITING, "the job has not ended"),
    ConditionType.FAILED: (Reason.WAITING, "the job has not ended"),
    ConditionType.RESOURCES_RELEASED: (Reason.WAITING, "nothing has been started yet"),
    ConditionType.NAME_COLLISION: (Reason.RECEIVED, NO_COLLISION),
}
#: Conditions that are known from the start: False, not Unknown.
KNOWN = frozenset({ConditionType.SUSPENDED, ConditionType.NAME_COLLISION})


def first_visit(draft: Draft) -> None:
    """Set every condition that is missing, so that `kubectl wait` and people find all of them at once."""
    for kind, (reason, message) in INITIAL.items():
        if kind not in draft.conditions:
            draft.set(kind, Truth.FALSE if kind in KNOWN else Truth.UNKNOWN, reason, message)


def corrected(draft: Draft) -> bool:
    """True when a refused job that never started was edited: it gets a second first visit."""
    return (
        draft.reason(ConditionType.FAILED) == Reason.INVALID_SPEC
        and draft.is_true(ConditionType.FAILED)
        and draft.start_time is None
        and draft.job.status.observed_generation != draft.job.generation
    )


def start_over(draft: Draft) -> None:
    """Forget a refusal."""
    draft.conditions.clear()
    draft.completion_time = None


def accept(draft: Draft) -> bool:
    """Rules decide once about a spec, before anything is created from it: an upgrade of the operator must not stop a running
    job."""
    job = draft.job
    errors = [item for item in job.findings if item.severity == Severity.ERROR]
    if job.spec is None and draft.start_time is not None:
        draft.set(ConditionType.ACCEPTED, Truth.FALSE, Reason.INVALID_SPEC, _first(errors))
        draft.wait(Reason.INVALID_SPEC, "the spec cannot be read by this version of the operator; nothing is touched")
        return False
    if draft.start_time is None:
        if job.refused:
            message = _first(errors)
            draft.set(ConditionType.ACCEPTED, Truth.FALSE, Reason.INVALID_SPEC, message)
            fail(draft, Diagnosis(FailureClass.CONFIG, Reason.INVALID_SPEC, message, ""))
            return False
        if not draft.is_true(ConditionType.ACCEPTED):
            for finding in job.findings:
                draft.events.append(PlannedEvent(EventType.WARNING, finding.code, f"{finding.path}: {finding.message}"))
    elif _edit_is_refused(draft, errors):
        return True
    warnings = sum(finding.severity == Severity.WARNING for finding in job.findings)
    message = f"schema and rules pass; warnings in status.findings: {warnings}" if warnings else "schema and rules pass"
    draft.set(ConditionType.ACCEPTED, Truth.TRUE, Reason.ACCEPTED, message)
    return True


def _edit_is_refused(draft: Draft, errors: Sequence[FindingStatus]) -> bool:
    """True when a started job was edited into one that breaks a rule, or that the API server refused: what runs goes on, and
    nothing more starts from it. Of the rules' findings only those about fields that may still change count: nobody could
    correct the others."""
    known = draft.conditions.get(ConditionType.ACCEPTED)
    asked = known is not None and known.observed_generation == draft.job.generation
    if known is not None and asked and known.reason == Reason.WRITE_REFUSED:
        said = known.message.removesuffix(CORRECT).rstrip()
        draft.refused_edit = Diagnosis(FailureClass.CONFIG, Reason.WRITE_REFUSED, said, CORRECT)
        return True
    wrong = [item for item in errors if may_change(item.path)]
    if not wrong or (asked and draft.is_true(ConditionType.ACCEPTED)):
        return False
    _refuse_edit(draft, Reason.INVALID_SPEC, f"the edited spec is refused: {_first(wrong)}")
    return True


def _refuse_edit(draft: Draft, reason: Reason, why: str) -> None:
    draft.refused_edit = Diagnosis(FailureClass.CONFIG, reason, f"{why.rstrip('.')}.", CORRECT)
    if draft.is_true(ConditionType.ACCEPTED):
        draft.event(EventType.WARNING, reason, str(draft.refused_edit))
    draft.set(ConditionType.ACCEPTED, Truth.FALSE, reason, str(draft.refused_edit))


def refused_writes(draft: Draft) -> bool:
    """Act on what the API server refused in the last pass: wait, or fail when waiting cannot help."""
    problems = draft.observation.problems
    collisions = [item for item in problems if item.kind is WriteProblemKind.COLLISION]
    if collisions:
        message = "; ".join(f"{item.ref.kind} {item.ref.name} belongs to somebody else" for item in collisions)
        found = Diagnosis(
            FailureClass.CONFIG, Reason.NAME_COLLISION, f"{message}.", "Rename the job, or delete what is in its way."
        )
        draft.set(ConditionType.NAME_COLLISION, Truth.TRUE, Reason.NAME_COLLISION, str(found))
        draft.wait_for(found)
    else:
        draft.set(ConditionType.NAME_COLLISION, Truth.FALSE, Reason.RECEIVED, NO_COLLISION)
    invalid = next((item for item in problems if item.kind is WriteProblemKind.INVALID), None)
    if invalid is not None:
        return _invalid(draft, invalid)
    for problem in problems:
        _wait_for_write(draft, problem)
    return True


def _invalid(draft: Draft, problem: WriteProblem) -> bool:
    """The API server takes no child like that. The children of a job that was never edited were tried before it started, so
    waiting cannot help it; whoever edited a started one can correct it, and its work is worth waiting for."""
    why = f"the API server refuses {problem.ref.kind} {problem.ref.name}: {problem.message}"
    if draft.start_time is None or draft.job.generation == 1:
        hint = "Correct the role's template or placement; for RayJob: is KubeRay >= 1.6 installed?"
        fail(draft, Diagnosis(FailureClass.CONFIG, Reason.INVALID_SPEC, why, hint))
        return False
    _refuse_edit(draft, Reason.WRITE_REFUSED, why)
    return True


def _wait_for_write(draft: Draft, problem: WriteProblem) -> None:
    new_type = problem.kind is WriteProblemKind.TYPE_NOT_READ
    draft.passed(draft.now, RETRY_NEW_TYPE_SECONDS if new_type else RETRY_WRITE_SECONDS)
    what = f"{problem.ref.kind} {problem.ref.name}"
    if problem.kind is WriteProblemKind.BEING_DELETED:
        draft.wait(Reason.WAITING, f"an older {what} is being deleted")
    elif new_type:
        draft.wait_for(
            Diagnosis(
                FailureClass.CAPACITY,
                Reason.TYPE_NOT_READ,
                f"{what} must wait: the API server has not read the OPDJob type yet.",
                "It does so within half a minute after the CRD was installed; the write is tried again.",
            )
        )
    elif problem.kind is WriteProblemKind.NOT_SERVED:
        draft.wait_for(no_kuberay(problem.message))
    elif problem.kind is WriteProblemKind.QUOTA:
        draft.wait_for(
            Diagnosis(FailureClass.CAPACITY, Reason.QUOTA_EXCEEDED, f"{what}: {problem.message}", QUOTA_HINT)
        )
    elif problem.kind is WriteProblemKind.FORBIDDEN:
        draft.wait_for(
            Diagnosis(
                FailureClass.CONFIG,
                Reason.WRITE_REFUSED,
                f"the operator may not write {what}: {problem.message}",
                "Look at the chart's RBAC and at the namespace's admission policies.",
            )
        )


def _first(errors: Sequence[FindingStatus]) -> str:
    if not errors:
        return "the spec cannot be read"
    first = errors[0]
    more = f" (and {len(errors) - 1} more in status.findings)" if len(errors) > 1 else ""
    return f"{first.path}: {first.message} [{first.code}]{more}"
