"""Failures of teachers and of the student's start."""

from __future__ import annotations

from opd_api.vocabulary import FailureClass, Reason
from opd_failures import faults
from opd_failures.row import Failure, Step, Then

WRONG = "tests/e2e/jobs/test_wrong_manifests.py"
ONE_JOB = "tests/e2e/jobs/test_one_job.py"
LIFECYCLE = "tests/integration/operator/test_lifecycle.py"
PROBES = "tests/unit/trainer/test_preflight_probe.py"
DIAGNOSED = "tests/unit/operator/test_diagnose.py::test_a_pod_is_diagnosed_with_class_reason_words_and_hint"
NEVER_COMES = f"{WRONG}::test_what_never_comes_is_named_and_nothing_is_left"


#: A teacher that somebody else serves.
FAR = {"teachers": [{"name": "far", "endpoints": ["http://teacher.example:30000"], "maxContextTokens": 8192}]}


Class = FailureClass


def _teacher(identity: str, fault: str, cause: faults.Fault, failure: FailureClass, reason: Reason, then: Then, *proofs: str) -> Failure:  # fmt: skip
    return Failure(identity, fault, Step.TEACHERS, cause, failure, reason, then, proofs)


TEACHERS = (
    _teacher(
        "teacher-no-node",
        "no node has room for a teacher",
        faults.teacher_unscheduled,
        Class.CAPACITY,
        Reason.UNSCHEDULABLE,
        Then.WAITS,
        f"{NEVER_COMES}[more GPUs than any node has]",
    ),
    _teacher(
        "teacher-over-quota",
        "a ResourceQuota refuses a teacher's pod",
        faults.teacher_over_quota,
        Class.CAPACITY,
        Reason.QUOTA_EXCEEDED,
        Then.WAITS,
        "tests/unit/operator/test_diagnose.py::test_a_quota_is_capacity_and_names_what_is_used_up",
    ),
    _teacher(
        "teacher-image-missing",
        "a teacher's image does not exist",
        faults.teacher_waits("ImagePullBackOff", 'Back-off pulling image "x": not found'),
        Class.CONFIG,
        Reason.IMAGE_PULL_FAILED,
        Then.WAITS,
        f"{LIFECYCLE}::test_a_teacher_that_never_gets_ready_means_no_rayjob_ever",
    ),
    _teacher(
        "teacher-image-slow",
        "the registry refuses for now",
        faults.teacher_waits("ImagePullBackOff", "429 Too Many Requests"),
        Class.CAPACITY,
        Reason.IMAGE_PULL_FAILED,
        Then.WAITS,
        DIAGNOSED,
    ),
    _teacher(
        "teacher-secret-missing",
        "a Secret that a teacher reads is missing",
        faults.teacher_waits("CreateContainerConfigError", 'secret "nope" not found'),
        Class.CONFIG,
        Reason.CONTAINER_CONFIG_ERROR,
        Then.WAITS,
        DIAGNOSED,
    ),
    _teacher(
        "teacher-config-map-missing",
        "a ConfigMap that a teacher reads is missing",
        faults.teacher_waits("CreateContainerConfigError", 'configmap "nope" not found'),
        Class.CONFIG,
        Reason.CONTAINER_CONFIG_ERROR,
        Then.WAITS,
    ),
    _teacher(
        "teacher-volume-missing",
        "a Secret that a teacher mounts is missing",
        faults.teacher_unmounted('MountVolume.SetUp failed for volume "keys" : secret "nope" not found'),
        Class.CONFIG,
        Reason.VOLUME_NOT_ATTACHED,
        Then.WAITS,
        "tests/unit/operator/test_diagnose.py::test_a_volume_that_cannot_be_mounted_is_known_from_events",
    ),
    _teacher(
        "teacher-crashes",
        "a teacher's container ends again and again",
        faults.teacher_waits(
            "CrashLoopBackOff", restarts=5, last={"exitCode": 1, "message": "unrecognized arguments: --speed"}
        ),
        Class.TEACHER,
        Reason.CRASH_LOOP,
        Then.RESTARTS,
        f"{ONE_JOB}::test_no_ray_job_exists_while_a_teacher_never_gets_ready",
    ),
    _teacher(
        "teacher-oom",
        "a teacher needs more memory than its limit",
        faults.teacher_waits("CrashLoopBackOff", restarts=5, last=faults.OOM),
        Class.TEACHER,
        Reason.OOM_KILLED,
        Then.RESTARTS,
        DIAGNOSED,
    ),
    _teacher(
        "teacher-may-not-write",
        "a teacher may not write its cache",
        faults.teacher_waits(
            "CrashLoopBackOff", restarts=5, last={"exitCode": 1, "message": "Permission denied: '/data/hf'"}
        ),
        Class.CONFIG,
        Reason.STORAGE_NOT_WRITABLE,
        Then.FAILS,
        DIAGNOSED,
    ),
    _teacher(
        "teacher-late",
        "a teacher is not ready within `teacherReadyDeadlineSeconds`",
        faults.teacher_slow,
        Class.TEACHER,
        Reason.TEACHER_NOT_READY,
        Then.RESTARTS,
    ),
)


def _probe(identity: str, fault: str, reason: Reason, proof: str, *more: str, failure: FailureClass = Class.TEACHER) -> Failure:  # fmt: skip
    cause = faults.step_says("probe", failure, reason, teacher="big")
    return Failure(identity, fault, Step.PROBE, cause, failure, reason, Then.RESTARTS, (f"{PROBES}::{proof}", *more), no_hint=True)  # fmt: skip


PROBE = (
    _probe("teacher-uniform", "a teacher gives every token the same probability", Reason.TEACHER_UNIFORM, "test_uniform_output_is_recognised"),
    _probe("teacher-not-deterministic", "two scores of one sequence differ", Reason.TEACHER_NOT_DETERMINISTIC, "test_scores_that_do_not_repeat_are_refused_beyond_the_limits_and_not_below"),
    _probe("teacher-topk", "a teacher returns fewer tokens than `topK`", Reason.TEACHER_TOPK_TOO_SMALL, "test_a_teacher_that_gives_fewer_tokens_than_top_k_is_refused"),
    _probe("teacher-other-model", "a teacher serves another model, or answers wrongly", Reason.TEACHER_ERROR, "test_a_teacher_of_another_name_is_refused"),
    _probe("teacher-context", "a teacher refuses a sequence of full length", Reason.CONTEXT_TOO_SHORT, "test_a_teacher_that_refuses_a_sequence_of_full_length_is_found"),
    Failure(
        "endpoint-away",
        "an endpoint of somebody else's teacher does not answer (probed once more, nothing to restart)",
        Step.PROBE,
        faults.step_says("probe", Class.TEACHER, Reason.TEACHER_UNREACHABLE, teacher="far"),
        Class.TEACHER,
        Reason.TEACHER_UNREACHABLE,
        Then.RESTARTS,
        (f"{PROBES}::test_a_teacher_that_is_not_there_is_unreachable", f"{NEVER_COMES}[unreachable endpoint]"),
        job=FAR,
        no_hint=True,
    ),
    Failure(
        "probe-crashes",
        "the probe's pod ends with an error and no document",
        Step.PROBE,
        faults.step_ends("probe", "Traceback", exitCode=1),
        Class.INTERNAL,
        Reason.POD_FAILED,
        Then.FAILS,
    ),
    Failure(
        "probe-too-long",
        "the probe takes longer than `teacherReadyDeadlineSeconds`",
        Step.PROBE,
        faults.nothing_happens,
        Class.TEACHER,
        Reason.TEACHER_NOT_READY,
        Then.WAITS,
    ),
)  # fmt: skip


STUDENT = (
    Failure(
        "student-no-node",
        "no node has room for the student",
        Step.STUDENT,
        faults.student_unscheduled,
        Class.CAPACITY,
        Reason.UNSCHEDULABLE,
        Then.RELEASES,
        ("tests/e2e/jobs/test_contention.py::test_of_two_jobs_that_hold_what_the_other_needs_both_end",),
    ),
    Failure(
        "student-over-quota",
        "a ResourceQuota refuses a pod of the student",
        Step.STUDENT,
        faults.student_over_quota,
        Class.CAPACITY,
        Reason.QUOTA_EXCEEDED,
        Then.RELEASES,
    ),
    Failure(
        "student-queued",
        "a queue (Kueue) has suspended the RayJob and not admitted it",
        Step.STUDENT,
        faults.student_queued,
        Class.CAPACITY,
        Reason.NOT_ADMITTED,
        Then.RELEASES,
        (
            "tests/e2e/jobs/test_kueue.py::test_a_student_that_the_queue_does_not_admit_waits_and_gives_its_teachers_back",
        ),
    ),
    Failure(
        "student-image-missing",
        "the student's image does not exist",
        Step.STUDENT,
        faults.student_waits("ErrImagePull", "manifest unknown"),
        Class.CONFIG,
        Reason.IMAGE_PULL_FAILED,
        Then.WAITS,
    ),
    Failure(
        "ray-job-refused",
        "KubeRay refuses the RayJob",
        Step.STUDENT,
        faults.ray_job_refused,
        Class.CONFIG,
        Reason.RAY_JOB_INVALID,
        Then.FAILS,
    ),
    Failure(
        "student-never-runs",
        "KubeRay never brings the job to run",
        Step.STUDENT,
        faults.nothing_happens,
        Class.DEADLINE,
        Reason.PRE_RUNNING_DEADLINE_EXCEEDED,
        Then.WAITS,
    ),
    Failure(
        "no-first-heartbeat",
        "the job runs, but no heartbeat comes",
        Step.STUDENT,
        faults.silent_from_the_start,
        Class.INFRASTRUCTURE,
        Reason.HEARTBEAT_TIMEOUT,
        Then.RETRIES,
    ),
)
