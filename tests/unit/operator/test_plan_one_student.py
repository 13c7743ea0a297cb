"""A job has one student at a time, whatever somebody wrote into its status or made beside it."""

from __future__ import annotations

import copy

import pytest
from opd_world import World, final

from opd_operator.model import WriteProblemKind


def living(world: World) -> list[str]:
    return world.names("RayJob")


@pytest.mark.parametrize("attempt", [99, 2, 2**40])
def test_an_attempt_written_by_hand_makes_no_second_ray_job_beside_the_living_one(attempt: int) -> None:
    world = World().training()
    world.job["status"]["attempt"] = attempt
    world.restart_operator().settle()
    assert living(world) == ["math-1"]
    assert world.status["attempt"] == 1
    assert world.phase == "Training"
    world.final()
    world.ray(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    world.settle()
    assert world.phase == "Succeeded"


def test_an_attempt_set_back_by_hand_is_found_again() -> None:
    world = World().training()
    world.remove_pods("math-1-head")
    world.settle()
    world.after(6)
    world.after(11)
    world.ray_runs(2)
    world.heartbeat(5, attempt=2)
    world.settle()
    world.job["status"]["attempt"] = 1
    world.settle()
    assert living(world) == ["math-2"]
    assert (world.status["attempt"], world.phase) == (2, "Training")


def test_a_status_that_was_wiped_makes_no_second_ray_job() -> None:
    world = World().training()
    world.remove_pods("math-1-head")
    world.settle()
    world.after(6)
    world.after(11)
    world.ray_runs(2)
    world.job["status"] = {}
    for _ in range(6):
        world.restart_operator().step()
        assert living(world) == ["math-2"]
    assert world.status["attempt"] == 2


def test_a_copy_of_the_ray_job_goes_and_the_attempt_goes_on() -> None:
    world = World().training()
    copied = copy.deepcopy(world.get("RayJob", "math-1"))
    copied["metadata"] |= {"name": "a-copy", "uid": "copied"}
    world.objects["RayJob", "a-copy"] = copied
    world.settle()
    assert living(world) == ["math-1"]
    assert world.phase == "Training"


def test_the_next_attempt_waits_until_no_other_ray_job_lives() -> None:
    world = World().training()
    copied = copy.deepcopy(world.get("RayJob", "math-1"))
    copied["metadata"] |= {"name": "a-copy", "uid": "copied"}
    world.final("Preempted")
    world.settle()
    world.objects["RayJob", "a-copy"] = copied
    world.now = world.now.replace(minute=world.now.minute + 1)
    made = world.step()
    while not made.create:
        assert len(living(world)) <= 1
        made = world.step()
    assert living(world) == ["math-2"]


@pytest.mark.parametrize("ending", ["failed", "suspended"])
def test_no_ray_job_of_ours_outlives_a_job_that_ended_or_is_suspended(ending: str) -> None:
    world = World().training()
    copied = copy.deepcopy(world.get("RayJob", "math-1"))
    copied["metadata"] |= {"name": "a-copy", "uid": "copied"}
    world.objects["RayJob", "a-copy"] = copied
    if ending == "failed":
        world.final("Failed", failureClass="Config", reason="ConfigError")
    else:
        world.edit(suspend=True)
        world.final("Preempted")
    world.settle()
    assert living(world) == []


def test_a_rayjob_that_was_refused_asks_the_teachers_again_before_it_is_made() -> None:
    world = World().ready()
    world.refuse["RayJob"] = (WriteProblemKind.QUOTA, "exceeded quota: rayjobs")
    world.end_job("probe", final())
    world.settle()
    world.teacher_down()
    world.settle()
    world.refuse.clear()
    world.after(16)
    assert world.names("RayJob") == [], "no teacher answers by now"
    world.teacher_up()
    world.settle()
    assert world.names("RayJob") == [], "other pods answer than those that were probed"
    world.end_job("probe", final())
    world.settle()
    assert world.names("RayJob") == ["math-1"]
