"""suspend: true frees every accelerator after a checkpoint; false goes on."""

from __future__ import annotations

import pytest
from opd_world import World, final, job_document, untold_attempt

from opd_operator.model import Manifest, ObjectRef, WriteProblem, WriteProblemKind
from opd_operator.planned import Plan


def test_a_job_that_is_suspended_from_the_start_creates_nothing() -> None:
    world = World(job_document(suspend=True)).settle()
    assert world.phase == "Suspended"
    assert world.created == []
    assert world.condition("Suspended")["status"] == "True"
    assert world.condition("ResourcesReleased")["status"] == "True"
    world.edit(suspend=False)
    assert world.settle().phase == "Checking"


def test_a_training_job_is_asked_to_save_before_it_is_freed() -> None:
    world = World().training()
    world.edit(suspend=True)
    world.settle()
    assert world.phase == "Suspending"
    assert world.stops == [1]
    assert world.names("RayJob") == ["math-1"]
    assert world.names("Deployment") == ["math-teacher-big"]
    world.final("Preempted", message="saved step 3", checkpoint={"step": 3, "path": "checkpoints/step-3.a1"})
    world.settle()
    assert world.phase == "Suspended"
    assert world.names("RayJob") == world.names("Deployment") == []
    assert world.accelerator_pods() == []
    assert world.status["retries"] == 0
    assert world.status["training"]["lastCheckpoint"]["step"] == 3


def test_a_trainer_that_does_not_answer_is_freed_after_the_grace() -> None:
    world = World().training()
    world.edit(suspend=True)
    world.settle()
    assert world.after(118).phase == "Suspending"
    assert world.after(3).phase == "Suspended"
    assert world.stops == [1], "asked once"


def linger(world: World, pod: Manifest, node: str) -> None:
    """A deleted pod that no kubelet ends."""
    metadata = {**pod["metadata"], "deletionTimestamp": world.now.strftime("%Y-%m-%dT%H:%M:%SZ")}
    world.objects["Pod", metadata["name"]] = {**pod, "metadata": metadata, "spec": {**pod["spec"], "nodeName": node}}


@pytest.mark.parametrize("condition", ["Progressing", "ResourcesReleased"])
def test_pods_that_outstay_their_grace_are_told_with_their_node(condition: str) -> None:
    world = World().training()
    [head] = [world.get("Pod", name) for name in world.accelerator_pods() if "head" in name]
    if condition == "Progressing":
        world.edit(suspend=True)
        world.settle()
        world.final("Preempted")
    else:
        world.ray(jobStatus="SUCCEEDED", jobDeploymentStatus="Complete")
        world.final("Succeeded")
    world.settle()
    linger(world, head, "gpu-7")
    assert world.settle().condition(condition)["message"] == "pods are going away"
    assert world.after(29).condition(condition)["message"] == "pods are going away"
    said = world.after(2).condition(condition)["message"]
    assert "gpu-7 did not end them in time" in said
    assert "delete its Node object" in said
    del world.objects["Pod", head["metadata"]["name"]]
    world.settle()
    assert world.condition("ResourcesReleased")["status"] == "True"


def test_pods_that_go_one_after_the_other_cost_one_status_write() -> None:
    world = World().training()
    [head] = [world.get("Pod", name) for name in world.accelerator_pods() if "head" in name]
    world.edit(suspend=True)
    world.settle()
    world.final("Preempted")
    world.settle()
    for number in range(3):
        linger(world, {**head, "metadata": {**head["metadata"], "name": f"going-{number}"}}, "gpu-7")
    world.settle()
    written = len([made for made in world.plans if made.status is not None])
    for number in range(2):
        del world.objects["Pod", f"going-{number}"]
        world.settle()
    assert len([made for made in world.plans if made.status is not None]) == written


@pytest.mark.parametrize("reach", ["settle", "checked", "ready", "probed"])
def test_a_job_without_a_running_trainer_is_freed_at_once(reach: str) -> None:
    world = World()
    getattr(world, reach)()
    world.edit(suspend=True)
    world.settle()
    assert world.phase == "Suspended"
    assert world.names("RayJob") == world.names("Deployment") == []
    assert world.accelerator_pods() == []
    assert world.stops == []


def test_a_resumed_job_starts_teachers_and_probes_again_and_takes_the_next_attempt() -> None:
    world = World().training()
    world.edit(suspend=True)
    world.settle()
    world.final("Preempted")
    world.settle()
    world.edit(suspend=False)
    world.settle()
    assert world.phase == "StartingTeachers"
    assert world.condition("Suspended")["status"] == "False"
    assert world.names("RayJob") == []
    world.teacher_up()
    world.settle()
    world.end_job("probe", final())
    world.settle()
    assert world.names("RayJob") == ["math-2"]
    assert "Resumed" in world.reasons()
    assert "Suspended" in world.reasons()


def test_a_resumed_check_starts_anew() -> None:
    world = World().settle()
    world.edit(suspend=True)
    world.settle()
    world.after(5000)
    world.edit(suspend=False)
    world.settle()
    assert world.phase == "Checking"
    assert world.names("Job") == ["math-check-inputs"]


def test_suspended_is_not_said_while_a_pod_still_runs() -> None:
    world = World().training()
    leftover = world.objects["Pod", "math-1-worker"]
    leftover["metadata"]["ownerReferences"] = []
    world.edit(suspend=True)
    world.settle()
    world.final("Preempted")
    world.settle()
    assert world.phase == "Suspending"
    assert world.condition("Suspended")["status"] == "Unknown"
    world.remove_pods("math-1-worker")
    assert world.settle().phase == "Suspended"


def test_a_job_that_finishes_while_it_is_asked_to_stop_has_succeeded() -> None:
    world = World().training()
    world.edit(suspend=True)
    world.settle()
    world.final()
    world.ray(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    world.settle()
    assert world.phase == "Succeeded"


def test_a_fault_that_would_come_back_ends_a_suspending_job() -> None:
    world = World().training()
    world.edit(suspend=True)
    world.settle()
    world.final("Failed", failureClass="Data", reason="DataError", message="bad row")
    world.settle()
    assert world.phase == "Failed"


def test_a_fault_of_the_cluster_while_suspending_is_not_counted() -> None:
    world = World(job_document(lifecycle={"backoffLimit": 0})).training()
    world.edit(suspend=True)
    world.settle()
    world.remove_pods("math-1-head")
    world.settle()
    world.after(6)
    assert world.phase == "Suspended"
    assert world.status["retries"] == 0


def test_a_stop_that_is_called_off_goes_on_with_the_next_attempt() -> None:
    world = World().training()
    world.edit(suspend=True)
    world.settle()
    world.edit(suspend=False)
    world.settle()
    assert world.phase == "Training"
    world.final("Preempted")
    world.settle()
    world.after(11)
    assert world.status["attempt"] == 2
    assert world.names("RayJob") == ["math-2"]


def test_no_deadline_runs_while_a_job_is_suspended() -> None:
    world = World(job_document(lifecycle={"activeDeadlineSeconds": 100})).training()
    world.edit(suspend=True)
    world.settle()
    world.final("Preempted")
    world.settle()
    assert world.after(100_000).phase == "Suspended"
    made = world.step()
    assert made.requeue_after is None


def test_a_retrying_job_can_be_suspended() -> None:
    world = World().training()
    world.final("Failed", failureClass="Infrastructure")
    world.settle()
    assert world.phase == "Retrying"
    world.edit(suspend=True)
    world.settle()
    assert world.phase == "Suspended"
    assert world.names("Deployment") == []
    world.edit(suspend=False)
    world.settle()
    assert world.status["attempt"] == 2
    assert world.phase == "StartingTeachers"


def test_an_ended_job_ignores_suspend() -> None:
    world = World().training()
    world.final("Failed", failureClass="Config")
    world.settle()
    world.edit(suspend=True)
    assert world.settle().phase == "Failed"


def test_a_deleted_job_that_a_finalizer_of_somebody_keeps_lets_go_of_everything() -> None:
    world = World().training()
    before = world.status
    world.job["metadata"] |= {"deletionTimestamp": "2026-03-01T12:00:00Z", "finalizers": ["somebody/else"]}
    world.settle()
    assert world.names("Deployment") == world.names("RayJob") == world.names("Job") == []
    assert world.status == before
    assert world.step() == Plan()


@pytest.mark.parametrize("way", ["ended", "deleted"])
def test_a_delete_that_is_refused_is_tried_again_though_nothing_else_happens(way: str) -> None:
    world = World().training()
    if way == "ended":
        world.final("Failed", failureClass="Config", reason="ConfigError")
        world.step()
        world.step()
    else:
        world.job["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    refused = WriteProblem(ObjectRef("apps/v1", "Deployment", "team", "math-teacher-big"), WriteProblemKind.FORBIDDEN)
    world.memory = world.memory.with_problems((refused,), 1)
    made = world.step()
    assert made.requeue_after is not None
    assert made.requeue_after <= 16


@pytest.mark.parametrize("attempt", [1, 2])
def test_an_attempt_whose_beginning_was_not_written_keeps_its_number(attempt: int) -> None:
    world = untold_attempt(attempt)
    world.edit(suspend=True)
    world.settle()
    assert world.phase == "Suspended"
    assert world.names("RayJob") == []
    assert world.attempt(attempt)["reason"] == "Suspended"
    world.edit(suspend=False)
    world.settle()
    if not world.names("RayJob"):
        world.teacher_up()
        world.settle()
        world.end_job("probe", final())
        world.settle()
    assert world.names("RayJob") == [f"math-{attempt + 1}"], "the number of the untold attempt was used again"
