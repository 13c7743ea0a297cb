"""The operator dies at each of its writes: the job ends the same, with nothing doubled and nothing left over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from opd_world import World, final


def happy(world: World) -> None:
    world.training()
    world.heartbeat(10, phase="Exporting")
    world.settle()
    world.final()
    world.ray(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    world.settle()


def retried(world: World) -> None:
    world.training()
    world.remove_pods("math-1-head")
    world.settle()
    for _ in range(10):  # a new process counts again from when it first saw the loss
        if ("RayJob", "math-2") not in world.objects:
            world.after(6)
    world.ray_runs(2)
    world.heartbeat(5, attempt=2)
    world.settle()
    world.final("Succeeded", 2)
    world.ray(2, jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    world.settle()


def suspended(world: World) -> None:
    world.training()
    world.edit(suspend=True)
    world.settle()
    world.final("Preempted")
    world.settle()
    world.edit(suspend=False)
    world.settle()
    world.teacher_up()
    world.settle()
    world.end_job("probe", final())
    world.settle()
    world.ray_runs(2)
    world.final("Succeeded", 2)
    world.ray(2, jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    world.settle()


def left(world: World) -> tuple[object, ...]:
    """What must not depend on when the operator died."""
    attempts = [(item["number"], item.get("failureClass"), item["reason"]) for item in world.status["attempts"]]
    kinds = {key for key in world.objects if key[0] not in ("Pod", "RayCluster")}
    truths = [(item["type"], item["status"]) for item in world.status["conditions"]]
    return world.phase, attempts, kinds, truths, world.status["retries"]


@pytest.mark.parametrize("story", [happy, retried, pytest.param(suspended, marks=pytest.mark.long)])
def test_a_kill_at_any_write_changes_nothing_in_the_end(story: Callable[[World], None]) -> None:
    reference = World()
    story(reference)
    assert reference.phase == "Succeeded"
    for number in range(1, reference.writes + 1):
        world = World()
        world.kill_at = number
        story(world)
        assert world.kills == 1
        assert left(world) == left(reference), f"killed at write {number}"
        assert sorted(world.created) == sorted(reference.created), f"killed at write {number}"
        assert world.accelerator_pods() == []


def test_a_ray_job_deleted_before_it_was_told_is_not_made_again_beside_its_own_pods() -> None:
    world = World().ready()
    world.end_job("probe", final())
    while ("RayJob", "math-1") not in world.objects:
        world.step()
    world.ray_starts()
    del world.objects["RayJob", "math-1"]
    world.restart_operator().settle()
    assert world.condition("RayJobCreated")["status"] == "False"
    assert world.names("RayJob") == [], "its pods still write, under the number of this attempt"
    world.remove_pods("math-1-")
    world.settle()
    assert world.names("RayJob") == ["math-1"]


def test_a_ray_job_that_trained_and_vanished_is_a_new_attempt_though_nobody_told_that_it_was_created() -> None:
    world = World().ready()
    world.end_job("probe", final())
    while ("RayJob", "math-1") not in world.objects:
        world.step()
    world.heartbeat(2)
    del world.objects["RayJob", "math-1"]
    world.restart_operator().settle()
    assert world.names("RayJob") == [], "its trainer has written under the number of this attempt"
    world.after(6)
    assert world.attempt(1)["reason"] == "RayJobStopped"
    world.after(11)
    assert world.names("RayJob") == ["math-2"]
