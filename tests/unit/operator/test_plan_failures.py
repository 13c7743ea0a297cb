"""What each end of an attempt leads to. The failures themselves are those of the table (tests/support/opd_failures)."""

from __future__ import annotations

import pytest
from opd_failures import FAILURES
from opd_failures.faults import OOM, head_gone, kuberay, says, success_contradicted
from opd_failures.row import Failure, Step, Then
from opd_world import World, final, job_document

from opd_operator.plan.draft import MAX_ATTEMPTS
from opd_operator.settings import Settings

RETRIED = [
    failure
    for failure in FAILURES
    if failure.step is Step.TRAINING and failure.then in (Then.RETRIES, Then.ONCE, Then.RESTARTS)
]
FINAL = [failure for failure in FAILURES if failure.step is Step.TRAINING and failure.then is Then.FAILS]


@pytest.mark.parametrize("failure", RETRIED, ids=lambda failure: failure.id)
def test_a_failure_that_is_worth_it_gets_a_new_attempt(failure: Failure) -> None:
    world = World().training()
    failure.cause(world)
    assert world.phase == "Retrying", world.condition("Failed")
    entry = world.attempt(1)
    assert (entry["failureClass"], entry["reason"]) == (failure.failure_class, failure.reason)
    assert entry["endTime"]
    assert world.names("RayJob") == []
    assert world.condition("Progressing")["reason"] == "BackOff"
    assert world.status.get("retries") == (failure.then is Then.RETRIES)
    if failure.then is not Then.RESTARTS:
        assert world.names("Deployment") == ["math-teacher-big"]


@pytest.mark.parametrize("failure", FINAL, ids=lambda failure: failure.id)
def test_a_failure_that_would_come_back_ends_the_job(failure: Failure) -> None:
    world = World().training()
    failure.cause(world)
    assert world.phase == "Failed"
    assert world.condition("Failed")["reason"] == failure.reason
    assert world.condition("Succeeded")["status"] == "False"
    assert world.status["reason"] == failure.reason
    assert world.accelerator_pods() == []
    assert world.condition("ResourcesReleased")["status"] == "True"
    assert world.status["completionTime"]


def test_the_next_attempt_follows_the_back_off_with_its_own_ray_job_and_configuration() -> None:
    world = World().training()
    configs = world.names("ConfigMap")
    head_gone(world)
    assert world.after(3).phase == "Retrying"
    world.after(10)
    assert world.phase == "StartingStudent"
    assert world.status["attempt"] == 2
    assert world.names("RayJob") == ["math-2"]
    assert len(world.names("ConfigMap")) == len(configs) + 1
    assert world.get("RayJob", "math-2")["metadata"]["labels"]["opd.dev/attempt"] == "2"
    assert "nextAttemptTime" not in world.status


def test_a_document_of_the_old_attempt_does_not_end_the_new_one() -> None:
    world = World().training()
    says("Infrastructure")(world)
    world.after(15)
    world.ray_runs(2)
    assert world.settle().phase == "StartingStudent"
    world.heartbeat(3, attempt=2)
    assert world.settle().phase == "Training"


def test_back_off_doubles_up_to_its_maximum() -> None:
    world = World(job_document(lifecycle={"backoffLimit": 9}))
    world.probed()
    waits = []
    for attempt in range(1, 9):
        world.ray_runs(attempt)
        world.heartbeat(1, attempt=attempt)
        world.settle()
        says("Infrastructure")(world)
        assert world.phase == "Retrying"
        start = world.now
        while world.phase == "Retrying":
            world.after(5)
        waits.append((world.now - start).total_seconds())
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600]


def test_the_limit_of_retries_ends_the_job() -> None:
    world = World(job_document(lifecycle={"backoffLimit": 1})).training()
    head_gone(world)
    world.after(15)
    world.ray_runs(2)
    world.heartbeat(1, attempt=2)
    world.settle()
    head_gone(world)
    assert world.phase == "Failed"
    assert world.condition("Failed")["reason"] == "BackoffLimitExceeded"
    assert "gone" in world.condition("Failed")["message"]
    assert world.attempt(2)["failureClass"] == "Infrastructure"


def test_a_preempted_attempt_is_not_counted() -> None:
    world = World(job_document(lifecycle={"backoffLimit": 0})).training()
    for attempt in (1, 2, 3):
        world.final("Preempted", attempt, message="saved step 3")
        world.settle()
        assert world.phase == "Retrying"
        assert world.attempt(attempt)["reason"] == "Preempted"
        assert "failureClass" not in world.attempt(attempt)
        world.after(15)
        world.ray_runs(attempt + 1)
        world.heartbeat(1, attempt=attempt + 1)
        world.settle()
    assert world.status["retries"] == 0
    assert world.phase == "Training"


def test_the_document_is_waited_for_while_a_pod_terminates() -> None:
    world = World().training()
    world.terminate("math-1-head", reason="EvictionByEvictionAPI")
    world.settle()
    assert world.after(60).phase == "Training"
    world.final("Preempted")
    world.settle()
    assert world.attempt(1)["reason"] == "Preempted"


def test_the_cause_seen_in_a_pod_replaces_the_trainers_internal_error() -> None:
    world = World().training()
    pod = world.objects["Pod", "math-1-worker"]
    pod["status"] |= {
        "phase": "Failed",
        "containerStatuses": [{"name": "ray-worker", "state": {"terminated": OOM}}],
    }
    world.settle()
    says("Internal", reason="LearnerFailed")(world)
    assert (world.attempt(1)["failureClass"], world.attempt(1)["reason"]) == ("Infrastructure", "OOMKilled")


def test_a_teacher_that_failed_the_trainer_is_restarted_and_probed_again() -> None:
    world = World().training()
    says("Teacher", teacher="big")(world)
    deployment = world.get("Deployment", "math-teacher-big")
    assert deployment["metadata"]["annotations"]["opd.dev/restart"] == "1"
    assert deployment["spec"]["template"]["metadata"]["annotations"]["opd.dev/restart"] == "1"
    assert world.status["teacherRestarts"] == 1
    world.after(30)
    assert world.names("RayJob") == []
    assert world.phase in ("StartingTeachers", "Retrying")
    world.teacher_up()
    world.settle()
    assert world.names("RayJob") == []
    world.end_job("probe", final())
    world.settle()
    assert world.names("RayJob") == ["math-2"]
    world.ray_runs(2)
    world.heartbeat(1, attempt=2)
    world.settle()
    says("Teacher", teacher="big")(world)
    assert world.phase == "Failed"
    assert world.attempt(2)["failureClass"] == "Teacher"


def test_only_the_blamed_teacher_is_restarted() -> None:
    teachers = [{"name": name, "model": {"source": f"/data/{name}"}} for name in ("big", "code")]
    world = World(job_document(teachers=teachers, routing={"map": {"math": "big"}, "default": "code"})).training()
    says("Teacher", teacher="code")(world)
    restarts = {
        name: world.get("Deployment", f"math-teacher-{name}")["metadata"]["annotations"]["opd.dev/restart"]
        for name in ("big", "code")
    }
    assert restarts == {"big": "0", "code": "1"}


def test_old_pods_are_awaited_but_not_for_ever() -> None:
    world = World().training()
    leftover = world.objects["Pod", "math-1-worker"]
    leftover["metadata"]["ownerReferences"] = []
    leftover["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    says("Infrastructure")(world)
    world.after(170)
    assert world.phase == "Retrying"
    assert "old attempt's pods" in world.condition("Progressing")["message"]
    world.after(15)
    assert world.names("RayJob") == ["math-2"]


def test_no_new_attempt_while_a_teacher_is_lost() -> None:
    world = World().training()
    world.teacher_down()
    world.settle()
    assert world.condition("TeachersReady")["reason"] == "TeachersLost"
    assert world.phase == "Training"
    says("Infrastructure")(world)
    world.after(60)
    assert world.names("RayJob") == []
    world.teacher_up()
    world.settle()
    assert world.names("RayJob") == []
    world.end_job("probe", final())
    assert world.settle().names("RayJob") == ["math-2"]


def test_both_stall_clocks_stand_still_while_samples_are_held() -> None:
    world = World().training()
    for _ in range(30):
        world.heartbeat(1, phase="TeacherUnavailable", activity=7, unavailableTeacher="big")
        world.after(100)
    assert world.phase == "Training"
    assert world.condition("Progressing")["reason"] == "TeacherUnavailable"
    assert "big" in world.condition("Progressing")["message"]


def test_the_cluster_of_a_failed_job_can_be_kept() -> None:
    world = World(job_document(lifecycle={"cleanup": {"onFailure": "KeepRay", "keepSeconds": 900}})).training()
    says("Config")(world)
    assert world.phase == "Failed"
    assert world.names("RayJob") == ["math-1"]
    assert world.names("Deployment") == []
    assert world.condition("ResourcesReleased")["reason"] == "KeptForInspection"
    world.after(901)
    assert world.names("RayJob") == []
    assert world.condition("ResourcesReleased")["status"] == "True"


def test_attempts_are_bounded_and_once_retried_classes_are_not_forgotten() -> None:
    world = World(job_document(lifecycle={"backoffLimit": 0}), Settings(retry_backoff_seconds=1)).training()
    says("Internal")(world)
    for attempt in range(2, 15):
        world.after(15)
        world.ray_runs(attempt)
        world.heartbeat(1, attempt=attempt)
        world.settle()
        world.final("Preempted", attempt)
        world.settle()
    assert len(world.status["attempts"]) == MAX_ATTEMPTS
    world.after(15)
    world.ray_runs(15)
    world.heartbeat(1, attempt=15)
    world.settle()
    says("Internal")(world)
    assert world.phase == "Failed"


def test_a_success_document_that_kuberay_contradicts_is_a_fault_of_ours() -> None:
    world = World().training()
    success_contradicted(world)
    assert "RayJob says Failed/FAILED" in world.attempt(1)["message"]


def test_a_document_that_cannot_be_read_is_named() -> None:
    world = World().training()
    world.objects["ConfigMap", "math-progress"]["data"]["final"] = '{"attempt": 1, "outcome": "Splendid"}'
    kuberay(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")(world)
    assert world.attempt(1)["reason"] == "NoFinalDocument"
    assert "unreadable" in world.attempt(1)["message"]


def test_an_ended_ray_job_waits_for_the_other_watch_to_bring_the_document() -> None:
    world = World().training()
    world.ray(jobDeploymentStatus="Failed", jobStatus="FAILED", message="exit code 64")
    world.settle()
    assert world.phase == "Training"
    world.final("Failed", failureClass="Infrastructure", reason="LearnerFailed")
    world.settle()
    assert world.attempt(1)["reason"] == "LearnerFailed"


def test_a_retry_is_told_by_an_event_with_class_and_reason() -> None:
    world = World().training()
    head_gone(world)
    told = dict(world.said)["AttemptFailed"]
    assert "attempt 1" in told
    assert "Infrastructure" in told


def test_a_teacher_that_somebody_deletes_during_training_is_put_back() -> None:
    world = World().training()
    for kind in ("Deployment", "Service"):
        world.vanish(kind, "math-teacher-big")
    world.settle()
    assert world.names("Deployment") == world.names("Service") == ["math-teacher-big"]
    assert world.phase == "Training"
    assert world.condition("TeachersReady")["reason"] == "TeachersLost"


def test_a_teacher_is_not_put_back_once_it_is_not_needed() -> None:
    world = World().training()
    world.heartbeat(10, phase="Exporting")
    world.settle().settle()
    assert world.names("Deployment") == []


def test_a_progress_document_that_cannot_be_read_is_named_when_the_heartbeat_runs_out() -> None:
    world = World().training()
    world.objects["ConfigMap", "math-progress"]["data"]["progress"] = '{"attempt": 1, "phase": "Dreaming"}'
    world.settle()
    world.after(181)
    assert world.attempt(1)["reason"] == "HeartbeatTimeout"
    assert "unreadable" in world.attempt(1)["message"]


def test_a_condition_that_a_pass_sets_and_takes_back_keeps_its_time() -> None:
    world = World().probed()
    world.ray_runs()
    world.settle()
    before = world.condition("TrainingRunning")
    assert before["status"] == "False"
    world.heartbeat()
    world.final("Failed", failureClass="Data", message="no samples")
    world.after(7)
    assert world.phase == "Failed"
    assert world.condition("TrainingRunning")["status"] == "False"
    assert world.condition("TrainingRunning")["lastTransitionTime"] == before["lastTransitionTime"]
