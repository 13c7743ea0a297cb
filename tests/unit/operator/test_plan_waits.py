"""What a job waits for, says so, and until when."""

from __future__ import annotations

import json
from typing import Any

import pytest
from opd_world import World, final, job_document

from opd_operator.model import Manifest, WriteProblemKind
from opd_operator.settings import Settings

NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available."


def teacher_pod(world: World, **status: Any) -> Manifest:
    item = world.get("Deployment", "math-teacher-big")
    item["status"] = {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1}
    return world.pod(
        "math-teacher-big-x", item, item["spec"]["template"]["metadata"]["labels"], phase="Pending", **status
    )


def waiting(reason: str, message: str = "", restarts: int = 0, **last: Any) -> dict[str, Any]:
    return {
        "containerStatuses": [
            {
                "name": "teacher",
                "image": "lmsysorg/sglang:v0",
                "restartCount": restarts,
                "state": {"waiting": {"reason": reason, "message": message}},
                "lastState": {"terminated": last} if last else {},
            }
        ]
    }


# --- rules and refused writes ---


def test_a_spec_that_breaks_a_rule_fails_before_anything_is_created() -> None:
    world = World(job_document(training={"epochs": 2})).settle()
    assert world.phase == "Failed"
    assert world.created == []
    assert world.condition("Accepted")["status"] == "False"
    assert world.condition("Failed")["reason"] == "InvalidSpec"
    assert "spec.training" in world.condition("Failed")["message"]
    assert world.status["findings"][0]["severity"] == "Error"


def test_a_spec_that_is_no_opdjob_fails_with_the_path_of_the_mistake() -> None:
    world = World(job_document(training={"step": 3})).settle()
    assert world.phase == "Failed"
    assert "spec.training" in world.condition("Accepted")["message"]


def test_a_refused_spec_may_be_corrected_in_place() -> None:
    world = World(job_document(training={"epochs": 2})).settle()
    world.job["spec"]["training"].pop("epochs")
    world.edit()
    world.settle()
    assert world.phase == "Checking"
    assert world.condition("Failed")["status"] != "True"
    assert "completionTime" not in world.status


def test_a_running_job_is_not_touched_by_an_operator_that_cannot_read_its_spec() -> None:
    world = World().training()
    world.job["spec"]["invention"] = {"of": "tomorrow"}
    world.settle()
    assert world.phase == "Training"
    assert world.names("RayJob") == ["math-1"]
    assert world.condition("Accepted")["status"] == "False"


def test_a_child_that_the_api_server_finds_invalid_fails_the_job() -> None:
    world = World().checked()
    world = World()
    world.refuse["Deployment"] = (WriteProblemKind.INVALID, "spec.template.spec.containers[0].image: Required value")
    world.checked()
    assert world.phase == "Failed"
    assert "Deployment math-teacher-big" in world.condition("Failed")["message"]
    assert world.names("Service") == []


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (WriteProblemKind.QUOTA, "QuotaExceeded"),
        (WriteProblemKind.FORBIDDEN, "Waiting"),
        (WriteProblemKind.BEING_DELETED, "Waiting"),
        (WriteProblemKind.COLLISION, "NameCollision"),
    ],
)
def test_a_refused_write_is_named_and_tried_again(kind: WriteProblemKind, reason: str) -> None:
    world = World()
    world.refuse["Job"] = (kind, "words of the API server")
    world.settle()
    assert world.phase == "Checking"
    assert world.condition("Progressing")["status"] == "False"
    assert world.condition("Progressing")["reason"] == reason
    assert "math-check-inputs" in world.condition("Progressing")["message"]
    assert world.plans[-1].requeue_after is not None
    assert world.plans[-1].requeue_after <= 16
    world.refuse.clear()
    world.settle()
    assert world.names("Job") == ["math-check-inputs"]
    assert world.condition("Progressing")["status"] == "True"


def test_a_write_that_is_refused_for_ever_ends_at_the_deadline() -> None:
    world = World()
    world.refuse["Job"] = (WriteProblemKind.QUOTA, "exceeded quota: jobs")
    world.settle()
    assert world.after(1801).phase == "Failed"


# --- the input check ---


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


# --- teachers ---


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
    words = waiting("CrashLoopBackOff", restarts=5, exitCode=1)
    words["containerStatuses"][0]["lastState"]["terminated"]["message"] = "unrecognized arguments: --speed"
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


# --- the student ---


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


# --- changes of the spec ---


def test_a_change_during_training_waits_for_the_next_attempt_and_says_so() -> None:
    world = World().training()
    before = json.dumps(world.get("RayJob", "math-1")["spec"])
    world.edit(runtime={"nodeSelector": {"pool": "b"}})
    world.settle()
    assert json.dumps(world.get("RayJob", "math-1")["spec"]) == before
    assert world.get("Deployment", "math-teacher-big")["metadata"]["generation"] == 1
    told = dict(world.said)["ChangeDeferred"]
    assert "student" in told
    assert "teacher big" in told
    assert world.status["observedGeneration"] == 2
    world.final("Preempted")
    world.settle()
    world.after(11)
    template = world.get("Deployment", "math-teacher-big")["spec"]["template"]
    assert template["spec"]["nodeSelector"] == {"pool": "b"}
    world.teacher_up()
    world.settle()
    world.end_job("probe", final())
    world.settle()
    head = world.get("RayJob", "math-2")["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    assert head["spec"]["nodeSelector"] == {"pool": "b"}


def test_a_change_that_no_child_sees_is_no_event() -> None:
    world = World().training()
    world.edit(lifecycle={"ttlSecondsAfterFinished": 60})
    world.settle()
    assert "ChangeDeferred" not in world.reasons()


def test_a_change_before_the_student_acts_at_once() -> None:
    world = World().checked()
    world.edit(teachers=[{"name": "big", "model": {"source": "/data/teacher"}, "image": "corrected:1"}])
    world.settle()
    container = world.get("Deployment", "math-teacher-big")["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "corrected:1"


def test_an_upgraded_operator_touches_no_running_job() -> None:
    world = World().training()
    world.settings = Settings(trainer_image="opd-trainer:next", sglang_image="sglang:next")
    world.restart_operator()
    made = world.step()
    assert (made.apply, made.create, made.delete) == ((), (), ())
