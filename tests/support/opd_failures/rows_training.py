"""Failures while the student trains."""

from __future__ import annotations

from opd_api.vocabulary import FailureClass, Reason
from opd_failures import faults
from opd_failures.row import Failure, Step, Then

INTERRUPTIONS = "tests/e2e/jobs/test_interruptions.py"
LIFECYCLE = "tests/integration/operator/test_lifecycle.py"
CONTROLLER = "tests/unit/trainer/test_controller_failures.py"
FLEET = "tests/unit/trainer/test_engine_fleet.py"
GROUP = "tests/integration/trainer/test_learner_group.py"
POOL = "tests/unit/trainer/test_teacher_pool_unreachable.py"
RUN = "tests/integration/trainer/test_run.py"
EXIT_CODES = "tests/unit/trainer/test_exit_codes.py::test_exit_codes_say_the_same_as_the_document"

Class = FailureClass


def _row(identity: str, fault: str, cause: faults.Fault, failure: FailureClass, reason: Reason, then: Then, *proofs: str, no_hint: bool = False) -> Failure:  # fmt: skip
    return Failure(identity, fault, Step.TRAINING, cause, failure, reason, then, proofs, no_hint=no_hint)


def _lost(identity: str, fault: str, cause: faults.Fault, reason: Reason, *proofs: str) -> Failure:
    """The cluster's fault: retried from the checkpoint."""
    return _row(identity, fault, cause, Class.INFRASTRUCTURE, reason, Then.RETRIES, *proofs)


def _said(identity: str, fault: str, failure: FailureClass, reason: Reason, then: Then, *proofs: str) -> Failure:
    """The trainer's own document; its message holds the remedy."""
    return _row(identity, fault, faults.says(failure, reason=reason), failure, reason, then, *proofs, no_hint=True)


CLUSTER = (
    _lost(
        "head-gone",
        "the Ray head's pod is gone",
        faults.head_gone,
        Reason.HEAD_LOST,
        f"{LIFECYCLE}::test_a_lost_head_is_a_new_attempt_from_the_last_checkpoint",
        f"{INTERRUPTIONS}::test_a_lost_head_is_replaced_by_an_attempt_from_the_checkpoint",
    ),
    _lost("head-ended", "the Ray head ends by itself", faults.pod_succeeded("head"), Reason.HEAD_LOST),
    _lost("worker-ended", "a Ray worker ends by itself", faults.pod_succeeded("worker"), Reason.WORKER_LOST),
    _lost("head-crashes", "the Ray head ends with an error", faults.pod_failed("head", "", {"exitCode": 1}), Reason.POD_FAILED),
    _lost("worker-crashes", "a Ray worker ends with an error", faults.pod_failed("worker", "", {"exitCode": 1}), Reason.POD_FAILED),
    _lost("head-oom", "the head needs more memory than its limit", faults.pod_failed("head", "", faults.OOM), Reason.OOM_KILLED),
    _lost("worker-oom", "a worker needs more memory than its limit", faults.pod_failed("worker", "", faults.OOM), Reason.OOM_KILLED),
    _lost("head-evicted", "the node evicts the head", faults.pod_failed("head", "Evicted"), Reason.EVICTED),
    _lost("head-node-lost", "the head's node stops answering", faults.pod_failed("head", "NodeLost"), Reason.NODE_LOST),
    _lost("head-node-tainted", "pods are removed from a node that does not answer", faults.going("head", reason="DeletionByTaintManager"), Reason.NODE_LOST),
    _lost("head-not-admitted", "the kubelet refuses the head (devices)", faults.pod_failed("head", "UnexpectedAdmissionError"), Reason.UNEXPECTED_ADMISSION),
    _lost("head-no-device", "the kubelet finds no device for the head", faults.pod_failed("head", "OutOfnvidia.com/gpu"), Reason.UNEXPECTED_ADMISSION),
    _lost("head-deleted", "somebody deletes the head, and no document comes within the grace", faults.going("head"), Reason.POD_DELETED),
    _lost("worker-deleted", "somebody deletes a worker, and no document comes within the grace", faults.going("worker"), Reason.POD_DELETED),
    _lost("drained", "a drain evicts a worker, and no document comes within the grace", faults.going("worker", reason="EvictionByEvictionAPI"), Reason.EVICTED),
    _lost("scheduler-preempts", "a pod of higher priority takes a worker's place", faults.going("worker", reason="PreemptionByScheduler"), Reason.PREEMPTED_BY_SCHEDULER),
    _lost(
        "queue-evicts",
        "a queue (Kueue) suspends the running RayJob, and no document comes within the grace",
        faults.queue_evicts,
        Reason.PREEMPTED_BY_SCHEDULER,
    ),
    _lost("head-not-ready", "the Ray head is not ready for a minute", faults.head_not_ready, Reason.RAY_CLUSTER_NOT_READY),
    _lost("heartbeats-stop", "no heartbeat for `heartbeatTimeoutSeconds`", faults.silent, Reason.HEARTBEAT_TIMEOUT),
    _lost("ray-job-deleted", "somebody deletes the RayJob", faults.ray_job_deleted, Reason.RAY_JOB_STOPPED),
    Failure(
        "preempted",
        "the pod is asked to go, and the trainer saves in time",
        Step.TRAINING,
        faults.preempted,
        None,
        Reason.PREEMPTED,
        Then.NOT_COUNTED,
        (
            "tests/unit/trainer/test_controller_endings.py::test_a_stop_saves_the_running_step_and_ends_preempted",
            f"{RUN}::test_drain_ends_a_run_from_outside_and_hears_that_it_is_saved",
            f"{INTERRUPTIONS}::test_a_drain_of_the_gpu_node_loses_at_most_one_step",
        ),
        no_hint=True,
    ),
    _row("too-long", "`activeDeadlineSeconds` passes", faults.deadline, Class.DEADLINE, Reason.DEADLINE_EXCEEDED, Then.FAILS),
)  # fmt: skip

KUBERAY = (
    _lost("ray-head-not-found", "KubeRay: the head's pod was not found", faults.kuberay_failed("AppFailed", "Ray head pod not found."), Reason.HEAD_LOST),
    _lost("ray-job-not-found", "KubeRay: the head does not know the job any more", faults.kuberay_failed("AppFailed", "Submitter completed but Ray job not found in RayCluster."), Reason.HEAD_LOST),
    _lost("dashboard-silent", "KubeRay 1.7: the dashboard does not answer", faults.kuberay_failed("JobStatusCheckTimeoutExceeded"), Reason.HEAD_LOST),
    _lost("submission-failed", "KubeRay: the job could not be submitted", faults.kuberay_failed("SubmissionFailed"), Reason.HEAD_LOST),
    _lost("ray-failed-running", "KubeRay: submission failed, though the job still runs", faults.kuberay(jobDeploymentStatus="Failed", jobStatus="RUNNING", reason="SubmissionFailed"), Reason.HEAD_LOST),
    _lost("ray-never-ends", "Ray says FAILED, KubeRay never ends the RayJob, no document", faults.failed_and_never_ended, Reason.HEARTBEAT_TIMEOUT),
    _lost("ray-stopped", "the Ray job is stopped from outside", faults.kuberay(jobDeploymentStatus="Complete", jobStatus="STOPPED"), Reason.RAY_JOB_STOPPED),
    _lost("exit-75", "exit code 75 without a document", faults.exit_code(75), Reason.RAY_JOB_FAILED, EXIT_CODES),
    _lost("killed", "the trainer is killed by a signal", faults.exit_code(-9), Reason.RAY_JOB_FAILED, f"{RUN}::test_kill_9_costs_the_steps_since_the_checkpoint_and_no_sample_is_counted_twice"),
    _row("exit-64", "exit code 64 without a document", faults.exit_code(64), Class.CONFIG, Reason.CONFIG_ERROR, Then.FAILS, EXIT_CODES),
    _row("exit-65", "exit code 65 without a document", faults.exit_code(65), Class.DATA, Reason.DATA_ERROR, Then.FAILS, EXIT_CODES),
    _row("exit-69", "exit code 69 without a document", faults.exit_code(69), Class.TEACHER, Reason.TEACHER_ERROR, Then.RESTARTS, EXIT_CODES),
    _row("exit-70", "exit code 70 without a document", faults.exit_code(70), Class.INTERNAL, Reason.RAY_JOB_FAILED, Then.ONCE, EXIT_CODES),
    _row("exit-1", "any other exit code without a document", faults.exit_code(1), Class.INTERNAL, Reason.RAY_JOB_FAILED, Then.ONCE),
    _row("success-mute", "KubeRay says success, the trainer said nothing", faults.kuberay(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED"), Class.INTERNAL, Reason.NO_FINAL_DOCUMENT, Then.ONCE),
    _row("success-empty", "the trainer says success and names no checkpoint", faults.success_without_checkpoint, Class.INTERNAL, Reason.NO_FINAL_DOCUMENT, Then.ONCE),
    _row("success-denied", "the trainer says success, KubeRay says failure", faults.success_contradicted, Class.INTERNAL, Reason.RAY_JOB_FAILED, Then.ONCE),
)  # fmt: skip

TRAINER = (
    _said("engine", "a rollout engine cannot be kept running", Class.INFRASTRUCTURE, Reason.ENGINE_FAILED, Then.RETRIES, f"{FLEET}::test_an_engine_that_dies_again_and_again_ends_the_run", f"{CONTROLLER}::test_an_engine_that_cannot_be_kept_ends_the_run_after_saving"),
    _said("weights-did-not-arrive", "engine and learner disagree after an update", Class.INTERNAL, Reason.ENGINE_FAILED, Then.ONCE, f"{CONTROLLER}::test_engines_that_serve_other_weights_than_the_learner_s_end_the_run"),
    _said("learner", "a learner process dies", Class.INFRASTRUCTURE, Reason.LEARNER_FAILED, Then.RETRIES, f"{GROUP}::test_two_ranks_step_publish_and_save_and_a_killed_one_ends_the_next_step_quickly"),
    _said("placement", "Ray cannot place the actors", Class.INFRASTRUCTURE, Reason.PLACEMENT_FAILED, Then.RETRIES, "tests/unit/trainer/test_ray_runtime.py::test_what_is_missing_is_named_at_the_deadline", f"{GROUP}::test_a_place_that_cannot_be_had_names_what_is_missing"),
    _said("superseded", "a newer attempt owns the run directory", Class.INFRASTRUCTURE, Reason.SUPERSEDED, Then.RETRIES, f"{CONTROLLER}::test_a_higher_attempt_stops_this_one_before_it_writes"),
    _said("memory", "parameters, gradients and optimizer state do not fit", Class.CONFIG, Reason.NOT_ENOUGH_MEMORY, Then.FAILS, "tests/unit/trainer/test_learner_rank.py::test_too_little_memory_is_told_with_the_arithmetic"),
    _said("config", "the configuration cannot run", Class.CONFIG, Reason.CONFIG_ERROR, Then.FAILS, f"{RUN}::test_a_configuration_that_does_not_fit_is_exit_code_64"),
    _said("data", "the data cannot be used", Class.DATA, Reason.DATA_ERROR, Then.FAILS, f"{CONTROLLER}::test_a_filter_that_refuses_everything_is_an_error"),
    _said("samples", "more samples fail than `maxFailedFraction`", Class.DATA, Reason.FAILED_FRACTION_EXCEEDED, Then.FAILS, f"{CONTROLLER}::test_too_many_failed_samples_end_the_run_with_their_class"),
    _said("internal", "a fault of ours", Class.INTERNAL, Reason.INTERNAL_ERROR, Then.ONCE, f"{CONTROLLER}::test_an_unknown_exception_is_internal"),
    _said("stall-said", "no activity for `stallTimeoutSeconds`, noticed by the trainer", Class.STALL, Reason.STALLED, Then.ONCE, "tests/unit/trainer/test_watchdog.py::test_no_activity_ends_the_run_with_a_state_dump"),
    _row("stall-seen", "no activity for `stallTimeoutSeconds`, noticed by the operator", faults.stalled, Class.STALL, Reason.STALLED, Then.ONCE),
    _row("teacher-away", "a teacher stays away longer than `teacherReadyDeadlineSeconds`", faults.says(Class.TEACHER, reason="TeacherUnreachable", teacher="big"), Class.TEACHER, Reason.TEACHER_UNREACHABLE, Then.RESTARTS, f"{POOL}::test_a_teacher_that_stays_away_ends_the_run_after_the_deadline", no_hint=True),
    Failure("samples-held", "no replica of a teacher answers: samples are held, the stall clocks stand", Step.TRAINING, faults.samples_held, Class.TEACHER, Reason.TEACHER_UNAVAILABLE, Then.HOLDS, (f"{POOL}::test_samples_are_held_while_no_replica_can_be_reached_and_go_on_when_one_is_back",)),
)  # fmt: skip
