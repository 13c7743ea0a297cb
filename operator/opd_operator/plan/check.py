"""Second step: a CPU pod looks at models, data, tokenizers and storage before an accelerator is taken."""

from __future__ import annotations

from opd_api.progress import FinalDocument
from opd_api.vocabulary import ConditionType, FailureClass, Outcome, Reason
from opd_operator.children.preflight import check_job
from opd_operator.model import Diagnosis, Kind, StepJob, StepState
from opd_operator.plan.draft import Draft, Truth, moment
from opd_operator.plan.outcome import fail, may_retry
from opd_operator.plan.steps import outdated, reason_of, retry_step


def check_inputs(draft: Draft) -> bool:
    """True when the inputs were checked (or checking is off)."""
    if draft.is_true(ConditionType.INPUTS_CHECKED):
        return True
    if not draft.spec.preflight.enabled:
        draft.set(ConditionType.INPUTS_CHECKED, Truth.TRUE, Reason.CHECK_DISABLED, "preflight.enabled is false")
        return True
    step = draft.observation.check
    if step is None or step.owned.deleting:
        return _start(draft)
    if step.state is StepState.SUCCEEDED and not step.undecided:
        return _passed(draft, step)
    if step.state is StepState.FAILED and not step.undecided:
        _failed(draft, failure_of(step, "the input check"))
        return False
    if draft.refresh and outdated(draft, step, check_job(draft.context, draft.create_config()[0])):
        draft.set(ConditionType.INPUTS_CHECKED, Truth.UNKNOWN, Reason.WAITING, "the spec was edited")
        return False
    _running(draft, step)
    return False


def failure_of(step: StepJob, what: str) -> Diagnosis:
    """Why a check or probe Job failed: its document, else its pod."""
    document = step.document
    if document is not None and document.outcome is not Outcome.SUCCEEDED:
        return from_document(document)
    if step.diagnosis is not None:
        return step.diagnosis
    return Diagnosis(
        FailureClass.INTERNAL,
        Reason.NO_FINAL_DOCUMENT,
        f"{what} ended without saying how",
        f"See the log of Job {step.owned.name}.",
    )


def from_document(document: FinalDocument) -> Diagnosis:
    """What the trainer itself says."""
    failure = document.failure_class or FailureClass.INTERNAL
    return Diagnosis(failure, reason_of(document.reason, failure), document.message or "no message", "")


def _start(draft: Draft) -> bool:
    if draft.truth(ConditionType.INPUTS_CHECKED) is not Truth.FALSE:
        draft.set(ConditionType.INPUTS_CHECKED, Truth.FALSE, Reason.CHECK_RUNNING, "the input check runs")
    pause = moment(draft.next_attempt_time)
    if pause is not None and not draft.passed(pause, 0):
        draft.wait(Reason.BACK_OFF, "the input check is tried again")
        return False
    draft.next_attempt_time = None
    name, _ = draft.create_config()
    draft.create_once(Kind.JOB, check_job(draft.context, name))
    _deadline(draft, draft.diagnosis)
    return False


def _passed(draft: Draft, step: StepJob) -> bool:
    if step.document is not None and step.document.outcome is not Outcome.SUCCEEDED:
        _failed(draft, from_document(step.document))
        return False
    if step.document is None and step.pod_ended:
        _failed(draft, failure_of(step, "the input check"))
        return False
    message = step.document.message if step.document else ""
    draft.set(ConditionType.INPUTS_CHECKED, Truth.TRUE, Reason.CHECK_PASSED, message or "inputs and storage are there")
    return True


def _failed(draft: Draft, diagnosis: Diagnosis) -> None:
    """The Job has had its second pod; only faults of the cluster are worth another Job."""
    infrastructure = diagnosis.failure_class is FailureClass.INFRASTRUCTURE
    if infrastructure and may_retry(draft, FailureClass.INFRASTRUCTURE):
        retry_step(draft, draft.observation.check, diagnosis)
        return
    draft.set(ConditionType.INPUTS_CHECKED, Truth.FALSE, Reason.CHECK_FAILED, str(diagnosis))
    fail(draft, diagnosis)


def _running(draft: Draft, step: StepJob) -> None:
    message = str(step.diagnosis) if step.diagnosis else "the input check runs"
    draft.set(ConditionType.INPUTS_CHECKED, Truth.FALSE, Reason.CHECK_RUNNING, message)
    if step.diagnosis is not None:
        draft.wait_for(step.diagnosis)
    _deadline(draft, step.diagnosis)


def _deadline(draft: Draft, diagnosis: Diagnosis | None) -> None:
    seconds = draft.spec.lifecycle.pre_running_deadline_seconds
    if draft.passed(draft.since(ConditionType.INPUTS_CHECKED), seconds):
        late = Diagnosis(
            FailureClass.DEADLINE,
            Reason.PRE_RUNNING_DEADLINE_EXCEEDED,
            f"the input check was not done after {seconds} s",
            "Raise lifecycle.preRunningDeadlineSeconds, or download the models beforehand.",
        )
        draft.set(ConditionType.INPUTS_CHECKED, Truth.FALSE, Reason.CHECK_FAILED, str(diagnosis or late))
        fail(draft, diagnosis or late)
