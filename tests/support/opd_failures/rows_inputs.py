"""Failures before an accelerator is asked for."""

from __future__ import annotations

from opd_api.vocabulary import FailureClass, Reason
from opd_failures import faults
from opd_failures.row import Failure, Step, Then
from opd_operator.model import WriteProblemKind

WRONG = "tests/e2e/jobs/test_wrong_manifests.py"
ONE_JOB = "tests/e2e/jobs/test_one_job.py"
LIFECYCLE = "tests/integration/operator/test_lifecycle.py"
ROBUST = "tests/integration/operator/test_robustness.py"
CHECKS = "tests/unit/trainer/test_preflight_check.py"
PROBES = "tests/unit/trainer/test_preflight_probe.py"
DIAGNOSED = "tests/unit/operator/test_diagnose.py::test_a_pod_is_diagnosed_with_class_reason_words_and_hint"
NEVER_COMES = f"{WRONG}::test_what_never_comes_is_named_and_nothing_is_left"
CHECK_ON_CPU = f"{WRONG}::test_the_input_check_fails_the_job_without_a_gpu"
Class = FailureClass
BEFORE_ANYTHING = (
    Failure(
        "broken-rule",
        "the spec breaks a rule",
        Step.ACCEPT,
        faults.nothing_happens,
        Class.CONFIG,
        Reason.INVALID_SPEC,
        Then.FAILS,
        (
            f"{LIFECYCLE}::test_a_broken_rule_is_a_finding_and_creates_nothing",
            f"{WRONG}::test_the_rules_refuse_before_any_pod",
        ),
        job={"training": {"epochs": 2}},
        no_hint=True,
    ),
    Failure(
        "no-opdjob",
        "the spec cannot be read (the API server refuses it first)",
        Step.ACCEPT,
        faults.nothing_happens,
        Class.CONFIG,
        Reason.INVALID_SPEC,
        Then.FAILS,
        (
            "tests/integration/operator/test_crd.py::test_typos_and_wrong_values_are_refused_by_path",
            f"{WRONG}::test_the_api_server_refuses",
        ),
        job={"training": {"step": 3}},
        no_hint=True,
    ),
    Failure(
        "write-over-quota",
        "a ResourceQuota refuses an object of the job",
        Step.ACCEPT,
        faults.refused("Job", WriteProblemKind.QUOTA, "exceeded quota: jobs"),
        Class.CAPACITY,
        Reason.QUOTA_EXCEEDED,
        Then.WAITS,
        (f"{ROBUST}::test_an_exceeded_quota_is_named_and_waited_for",),
    ),
    Failure(
        "write-forbidden",
        "the operator lacks a right, or admission refuses an object",
        Step.ACCEPT,
        faults.refused("Job", WriteProblemKind.FORBIDDEN, "denied by a policy"),
        Class.CONFIG,
        Reason.WRITE_REFUSED,
        Then.WAITS,
    ),
    Failure(
        "type-not-read",
        "the CRD was installed a moment ago, and admission has not read the type OPDJob yet",
        Step.ACCEPT,
        faults.refused("Job", WriteProblemKind.TYPE_NOT_READ, "cannot find RESTMapping"),
        Class.CAPACITY,
        Reason.TYPE_NOT_READ,
        Then.WAITS,
    ),
    Failure(
        "name-collision",
        "an object with a child's name belongs to somebody else",
        Step.ACCEPT,
        faults.refused("Job", WriteProblemKind.COLLISION, ""),
        Class.CONFIG,
        Reason.NAME_COLLISION,
        Then.WAITS,
        (f"{ROBUST}::test_a_foreign_object_is_told_and_left_alone_until_it_is_gone",),
    ),
    Failure(
        "child-invalid",
        "the API server finds a child invalid",
        Step.ACCEPT,
        faults.refused("Job", WriteProblemKind.INVALID, "image: Required value"),
        Class.CONFIG,
        Reason.INVALID_SPEC,
        Then.FAILS,
    ),
    Failure(
        "no-kuberay",
        "KubeRay is not installed",
        Step.CHECK,
        faults.no_kuberay,
        Class.CAPACITY,
        Reason.KUBERAY_MISSING,
        Then.HOLDS,
        (
            "tests/integration/operator/test_kinds.py::test_without_kuberay_no_teacher_starts_and_with_it_the_job_goes_on",
        ),
    ),
)
EDITS = tuple(
    Failure(
        identity,
        f"a started job is edited into one that {what}",
        Step.TEACHERS,
        cause,
        Class.CONFIG,
        reason,
        Then.HOLDS,
        (f"tests/integration/operator/test_edits.py::test_a_refused_edit_ends_no_attempt_and_starts_none[{proof}]",),
    )
    for identity, what, cause, reason, proof in (
        ("edit-refused", "breaks a rule", faults.edited(args=["--port", "9"]), Reason.INVALID_SPEC, "by a rule"),
        (
            "edit-invalid",
            "the API server refuses",
            faults.edited(WriteProblemKind.INVALID, image="other:1"),
            Reason.WRITE_REFUSED,
            "by the API server",
        ),
    )
)


def _check(identity: str, fault: str, failure: FailureClass, reason: Reason, *proofs: str) -> Failure:
    """The check says so; its message holds the remedy."""
    cause = faults.step_says("check", failure, reason)
    return Failure(identity, fault, Step.CHECK, cause, failure, reason, Then.FAILS, proofs, no_hint=True)


CHECK = (
    _check(
        "model-missing",
        "a model cannot be read",
        Class.CONFIG,
        Reason.MODEL_NOT_FOUND,
        f"{CHECKS}::test_a_missing_model_on_the_claim_is_an_error",
        f"{CHECK_ON_CPU}[missing model]",
    ),
    _check(
        "tokenizers-differ",
        "student and teacher number their tokens differently",
        Class.CONFIG,
        Reason.TOKENIZER_MISMATCH,
        f"{CHECKS}::test_other_token_ids_are_an_error_with_examples",
        f"{CHECK_ON_CPU}[tokenizer mismatch]",
    ),
    _check(
        "claim-not-writable",
        "the claim cannot be written",
        Class.CONFIG,
        Reason.STORAGE_NOT_WRITABLE,
        f"{CHECKS}::test_a_claim_that_cannot_be_written_is_found",
    ),
    _check(
        "claim-full",
        "no room for the checkpoints",
        Class.CONFIG,
        Reason.STORAGE_FULL,
        f"{CHECKS}::test_a_claim_without_room_for_the_checkpoints_is_found",
    ),
    _check(
        "context-short",
        "a model takes no sequence of full length",
        Class.CONFIG,
        Reason.CONTEXT_TOO_SHORT,
        f"{CHECKS}::test_sequences_that_no_model_takes_are_found",
    ),
    _check(
        "check-config",
        "the configuration cannot run (a reward that cannot be imported)",
        Class.CONFIG,
        Reason.CONFIG_ERROR,
        f"{CHECKS}::test_a_reward_that_cannot_be_imported_is_found",
    ),
    _check(
        "data-missing",
        "the data cannot be read",
        Class.DATA,
        Reason.DATA_NOT_FOUND,
        f"{CHECKS}::test_a_missing_data_file_ends_with_the_data_class",
        f"{LIFECYCLE}::test_a_failed_input_check_takes_no_accelerator",
        f"{CHECK_ON_CPU}[missing data file]",
    ),
    _check(
        "field-missing",
        "the data lacks a field",
        Class.DATA,
        Reason.FIELD_NOT_FOUND,
        f"{CHECKS}::test_a_wrong_field_is_named_with_the_fields_that_exist",
        f"{CHECK_ON_CPU}[wrong field of the data]",
    ),
    _check(
        "check-data",
        "no prompt is short enough",
        Class.DATA,
        Reason.DATA_ERROR,
        f"{CHECKS}::test_prompts_that_are_all_too_long_are_an_error_and_some_a_warning",
    ),
    Failure(
        "hub-away",
        "the model hub does not answer",
        Step.CHECK,
        faults.step_says("check", Class.INFRASTRUCTURE, Reason.MODEL_NOT_FOUND),
        Class.INFRASTRUCTURE,
        Reason.MODEL_NOT_FOUND,
        Then.RETRIES_STEP,
        (f"{CHECKS}::test_a_hub_that_cannot_be_reached_is_an_infrastructure_failure",),
        no_hint=True,
    ),
    Failure(
        "check-evicted",
        "the check's pod is evicted twice",
        Step.CHECK,
        faults.step_evicted,
        Class.INFRASTRUCTURE,
        Reason.EVICTED,
        Then.RETRIES_STEP,
    ),
    Failure(
        "check-oom",
        "the check needs more memory than its limit",
        Step.CHECK,
        faults.step_ends("check", None, **faults.OOM),
        Class.INFRASTRUCTURE,
        Reason.OOM_KILLED,
        Then.RETRIES_STEP,
        (DIAGNOSED,),
    ),
    Failure(
        "check-crashes",
        "the check's pod ends with an error and no document",
        Step.CHECK,
        faults.step_ends("check", "ImportError: no module named opd_trainer", exitCode=1),
        Class.INTERNAL,
        Reason.POD_FAILED,
        Then.FAILS,
    ),
    Failure(
        "check-mute",
        "the check ends well without a document",
        Step.CHECK,
        faults.step_ends("check", None, ok=True),
        Class.INTERNAL,
        Reason.NO_FINAL_DOCUMENT,
        Then.FAILS,
    ),
    Failure(
        "check-no-node",
        "no node has room for the check",
        Step.CHECK,
        faults.check_unscheduled("0/1 nodes are available: 1 Insufficient cpu."),
        Class.CAPACITY,
        Reason.UNSCHEDULABLE,
        Then.WAITS,
    ),
    Failure(
        "claim-missing",
        "the claim does not exist",
        Step.CHECK,
        faults.check_unscheduled('persistentvolumeclaim "opd" not found'),
        Class.CAPACITY,
        Reason.UNSCHEDULABLE,
        Then.WAITS,
        (f"{NEVER_COMES}[claim that does not exist]",),
    ),
    Failure(
        "claim-elsewhere",
        "the claim is attached to another node",
        Step.CHECK,
        faults.check_unmounted('Multi-Attach error for volume "pvc-1"'),
        Class.CAPACITY,
        Reason.VOLUME_NOT_ATTACHED,
        Then.WAITS,
        ("tests/unit/operator/test_diagnose.py::test_a_volume_that_cannot_be_mounted_is_known_from_events",),
    ),
    Failure(
        "claim-unmounted",
        "the claim cannot be mounted",
        Step.CHECK,
        faults.check_unmounted('MountVolume.SetUp failed for volume "pv-1" : hostPath type check failed'),
        Class.CAPACITY,
        Reason.VOLUME_NOT_ATTACHED,
        Then.WAITS,
        ("tests/unit/operator/test_diagnose.py::test_a_volume_that_cannot_be_mounted_is_known_from_events",),
    ),
    Failure(
        "check-image-missing",
        "the trainer image does not exist",
        Step.CHECK,
        faults.check_waits("ErrImagePull", "manifest unknown"),
        Class.CONFIG,
        Reason.IMAGE_PULL_FAILED,
        Then.WAITS,
        (f"{NEVER_COMES}[image that does not exist]",),
    ),
    Failure(
        "check-too-long",
        "the check takes longer than `preRunningDeadlineSeconds`",
        Step.CHECK,
        faults.nothing_happens,
        Class.DEADLINE,
        Reason.PRE_RUNNING_DEADLINE_EXCEEDED,
        Then.WAITS,
    ),
)
