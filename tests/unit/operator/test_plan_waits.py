"""What a job waits for, says so, and until when."""

from __future__ import annotations

from datetime import timedelta

import pytest
from opd_failures.faults import NO_GPU, teacher_pod, waiting
from opd_world import World, final, job_document

from opd_operator.settings import Settings


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("Data", "FieldNotFound"),
        ("Config", "ModelNotFound"),
        ("Config", "StorageNotWritable"),
        ("Config", "TokenizerMismatch"),
    ],
)
def test_a_failed_check_fails_the_job_with_its_reason_and_no_accelerator_is_taken(failure: str, reason: str) -> None:
    world = World().settle()
    world.end_job(
        "check", final("Failed", failureClass=failure, reason=reason, message="spec.data: no such field"), ok=False
    )
    world.settle()
    assert world.phase == "Failed"
    assert world.condition("InputsChecked")["reason"] == "CheckFailed"
    assert world.condition("Failed")["reason"] == reason
    assert "no such field" in world.condition("Failed")["message"]
    assert world.names("Deployment") == []


def test_a_check_that_met_a_fault_of_the_cluster_is_tried_again() -> None:
    world = World().settle()
    world.end_job("check", final("Failed", failureClass="Infrastructure", message="disk gone"), ok=False)
    world.settle()
    assert world.names("Job") == []
    assert world.status["retries"] == 1
    assert world.condition("Progressing")["reason"] == "BackOff"
    world.after(11)
    assert world.names("Job") == ["math-check-inputs"]
    world.end_job("check", final())
    assert world.settle().phase == "StartingTeachers"


def test_a_check_that_leaves_no_document_is_a_fault_of_ours() -> None:
    world = World().settle()
    world.end_job("check", None)
    world.settle()
    assert world.phase == "Failed"
    assert world.condition("Failed")["reason"] == "NoFinalDocument"


def test_a_check_that_crashes_shows_its_last_words() -> None:
    world = World().settle()
    world.end_job("check", "Traceback\nImportError: no module named opd_trainer", ok=False, exitCode=1)
    world.settle()
    assert world.phase == "Failed"
    assert "ImportError" in world.condition("Failed")["message"]


def test_a_check_without_a_node_waits_and_fails_at_the_deadline_with_what_is_missing() -> None:
    world = World().settle()
    job = world.get("Job", "math-check-inputs")
    labels = {"opd.dev/role": "check", "batch.kubernetes.io/controller-uid": job["metadata"]["uid"]}
    world.unscheduled(world.pod("math-check-inputs-x", job, labels), "0/1 nodes are available: 1 Insufficient cpu.")
    world.settle()
    assert world.phase == "Checking"
    assert world.condition("Progressing")["reason"] == "Unschedulable"
    assert "1 Insufficient cpu" in world.condition("Progressing")["message"]
    world.after(1801)
    assert world.phase == "Failed"
    assert world.condition("Failed")["reason"] == "Unschedulable"
    assert world.names("Job") == []


def test_a_teacher_without_a_node_never_leads_to_a_ray_job() -> None:
    world = World().checked()
    world.unscheduled(teacher_pod(world), NO_GPU)
    world.settle()
    assert "3 Insufficient nvidia.com/gpu" in world.status["teachers"][0]["message"]
    assert world.condition("Progressing")["reason"] == "Unschedulable"
    world.after(3601)
    assert world.phase == "Failed"
    assert world.condition("Failed")["reason"] == "Unschedulable"
    assert world.names("Deployment") == world.names("RayJob") == []


@pytest.mark.parametrize(
    ("reason", "message", "expected"),
    [
        ("ImagePullBackOff", 'Back-off pulling image "x": not found', "ImagePullFailed"),
        ("CreateContainerConfigError", 'secret "nope" not found', "ContainerConfigError"),
    ],
)
def test_a_teacher_that_cannot_start_fails_at_the_deadline_without_a_restart(
    reason: str, message: str, expected: str
) -> None:
    world = World().checked()
    teacher_pod(world, **waiting(reason, message))
    world.settle()
    assert world.phase == "StartingTeachers"
    assert world.condition("Progressing")["reason"] == expected
    world.after(3601)
    assert world.phase == "Failed"
    assert world.condition("Failed")["reason"] == expected
    assert world.status["teacherRestarts"] == 0


def test_a_teacher_that_is_late_is_restarted_once_then_the_job_fails() -> None:
    world = World().checked()
    teacher_pod(world)
    world.after(3601)
    assert world.phase == "StartingTeachers"
    assert world.status["teacherRestarts"] == 1
    assert world.get("Deployment", "math-teacher-big")["metadata"]["annotations"]["opd.dev/restart"] == "1"
    assert world.after(3500).phase == "StartingTeachers"
    world.after(101)
    assert world.phase == "Failed"
    assert world.condition("Failed")["reason"] == "TeacherNotReady"
    assert world.condition("ResourcesReleased")["status"] == "True" or world.accelerator_pods()


def test_a_crashing_teacher_does_not_use_up_the_deadline() -> None:
    world = World().checked()
    words = waiting("CrashLoopBackOff", restarts=5, last={"exitCode": 1, "message": "unrecognized arguments: --speed"})
    teacher_pod(world, **words)
    world.settle()
    assert world.status["teacherRestarts"] == 1
    assert world.phase == "StartingTeachers", "the pod from before the restart is still seen"
    teacher_pod(world, **words)
    world.settle()
    assert world.phase == "Failed"
    assert world.condition("Failed")["reason"] == "CrashLoop"
    assert "unrecognized arguments" in world.condition("Failed")["message"]


def test_a_quota_that_refuses_a_teachers_pod_is_shown() -> None:
    world = World().checked()
    message = 'pods "x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: 8, limited: 8'
    world.get("Deployment", "math-teacher-big")["status"] = {
        "conditions": [{"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}]
    }
    world.settle()
    assert world.condition("Progressing")["reason"] == "QuotaExceeded"
    assert "gpus" in world.condition("Progressing")["message"]


def test_a_failed_probe_restarts_the_teacher_it_blames_once() -> None:
    world = World().ready()
    document = final("Failed", failureClass="Teacher", reason="TeacherUniform", teacher="big", message="uniform scores")
    world.end_job("probe", document, ok=False)
    world.settle()
    assert world.status["teacherRestarts"] == 1
    assert world.phase == "StartingTeachers"
    assert world.names("RayJob") == []
    world.teacher_up()
    world.settle()
    world.end_job("probe", document, ok=False)
    world.settle()
    assert world.phase == "Failed"
    assert world.condition("TeachersProbed")["reason"] == "ProbeFailed"
    assert world.condition("Failed")["reason"] == "TeacherUniform"


def test_an_external_teacher_that_does_not_answer_gets_a_second_probe() -> None:
    teachers = [{"name": "far", "endpoints": ["http://teacher.example:30000"], "maxContextTokens": 8192}]
    world = World(job_document(teachers=teachers)).checked()
    document = final("Failed", failureClass="Teacher", reason="TeacherUnreachable", teacher="far", message="refused")
    world.end_job("probe", document, ok=False)
    world.settle()
    assert world.phase == "ProbingTeachers"
    world.end_job("probe", document, ok=False)
    world.settle()
    assert world.phase == "Failed"
    assert world.condition("Failed")["reason"] == "TeacherUnreachable"


def test_a_probe_that_takes_too_long_fails_the_job() -> None:
    world = World().ready()
    world.after(3601)
    assert world.phase == "Failed"
    assert world.condition("Failed")["reason"] == "TeacherNotReady"


def test_a_student_without_room_lets_go_of_everything_for_a_while() -> None:
    world = World(settings=Settings(capacity_backoff_min_seconds=20, capacity_backoff_max_seconds=40)).probed()
    world.ray_starts()
    world.unscheduled(world.objects["Pod", "math-1-worker"], NO_GPU)
    world.settle()
    assert world.phase == "StartingStudent"
    assert world.condition("Progressing")["reason"] == "Unschedulable"
    world.after(601)
    assert world.phase == "Pending"
    assert world.names("RayJob") == world.names("Deployment") == []
    assert world.attempt(1)["reason"] == "CapacityReleased"
    assert world.condition("Progressing")["reason"] == "CapacityReleased"
    assert world.status["retries"] == 0
    assert "Insufficient nvidia.com/gpu" in world.condition("Progressing")["message"]
    assert world.after(19).phase == "Pending"
    world.after(22)
    assert world.phase == "StartingTeachers"
    world.teacher_up()
    world.settle()
    world.end_job("probe", final())
    assert world.settle().names("RayJob") == ["math-2"]


@pytest.mark.parametrize("silence", ["no room", "no heartbeat"])
def test_an_end_for_silence_asks_the_sources_first_and_one_that_was_told_does_not(silence: str) -> None:
    world = World().probed()
    if silence == "no room":
        world.ray_starts()
        world.unscheduled(world.objects["Pod", "math-1-worker"], NO_GPU)
    else:
        world.ray_runs()
    world.settle()
    world.now += timedelta(seconds=601)
    asked = world.step().doubt
    assert [(ref.kind, ref.name) for ref in asked] == [("RayJob", "math-1"), ("ConfigMap", "math-progress")]

    told = World().training()
    told.objects["RayJob", "math-1"]["status"] |= {"jobDeploymentStatus": "Failed", "reason": "AppFailed"}
    for _ in range(6):
        told.after(10)
    assert told.attempt(1)["failureClass"] == "Internal"
    assert all(plan.doubt == () for plan in told.plans)


def test_jobs_that_wait_for_each_other_part_ways() -> None:
    pauses = set()
    for number in range(8):
        document = job_document()
        document["metadata"]["uid"] = f"{number}123abcd-0000"
        world = World(document).probed()
        world.ray_starts()
        world.unscheduled(world.objects["Pod", "math-1-worker"], NO_GPU)
        world.settle()
        world.after(601)
        pauses.add(world.status["nextAttemptTime"])
    assert len(pauses) > 5


def test_the_clock_of_the_start_stands_still_while_the_student_waits_for_room() -> None:
    world = World(
        job_document(lifecycle={"teacherIdleTimeoutSeconds": 100_000, "preRunningDeadlineSeconds": 300})
    ).probed()
    world.ray_starts()
    world.unscheduled(world.objects["Pod", "math-1-worker"], NO_GPU)
    world.settle()
    assert world.after(5000).phase == "StartingStudent"
    cluster = world.objects["RayCluster", "math-1-abcde"]
    world.pod("math-1-worker", cluster, world.objects["Pod", "math-1-worker"]["metadata"]["labels"], phase="Pending")
    world.settle()
    assert world.after(290).phase == "StartingStudent"
    world.after(20)
    assert world.phase == "Failed"
    assert world.condition("Failed")["reason"] == "PreRunningDeadlineExceeded"


def test_an_image_of_the_student_that_does_not_exist_fails_at_the_deadline() -> None:
    world = World().probed()
    world.ray_starts(head="Pending")
    head = world.objects["Pod", "math-1-head"]
    head["status"] |= waiting("ErrImagePull", "manifest unknown")
    world.settle()
    assert world.phase == "StartingStudent"
    assert world.condition("Progressing")["reason"] == "ImagePullFailed"
    world.after(1801)
    assert world.phase == "Failed"
    assert world.attempt(1)["failureClass"] == "Config"


def test_a_ray_job_that_kuberay_never_touches_ends_at_the_deadline() -> None:
    world = World().probed()
    assert world.after(1700).phase == "StartingStudent"
    assert world.after(101).phase == "Failed"


def test_a_running_ray_job_without_a_first_heartbeat_is_lost() -> None:
    world = World().probed()
    world.ray_runs()
    world.settle()
    world.after(181)
    assert world.attempt(1)["reason"] == "HeartbeatTimeout"


def test_the_total_deadline_bounds_the_queue_too() -> None:
    world = World(job_document(lifecycle={"activeDeadlineSeconds": 1000})).probed()
    world.ray_starts()
    world.unscheduled(world.objects["Pod", "math-1-worker"], NO_GPU)
    world.settle()
    world.after(1001)
    assert world.phase == "Failed"
    assert world.condition("Failed")["reason"] == "DeadlineExceeded"
    assert world.names("Deployment") == world.names("RayJob") == []
