"""From raw objects to an observation: what is ours, what is remembered, what is asked for besides."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from opd_world import World

from opd_api.v1alpha1.placement import accelerator_resource_of
from opd_operator.job_view import parse_status
from opd_operator.model import Fact, HeadState, Memory, ObjectRef, Unwritten
from opd_operator.observe import event_subjects, observe
from opd_operator.observe_children import accelerator_units


def test_a_healthy_job_needs_no_events() -> None:
    assert event_subjects(World().training().snapshot()) == ()


def test_events_are_asked_for_where_no_status_tells_anything() -> None:
    world = World().settle()
    assert event_subjects(world.snapshot()) == (ObjectRef("batch/v1", "Job", "team", "math-check-inputs"),)
    world = World().probed()
    world.ray_starts(head="Pending")
    assert event_subjects(world.snapshot()) == (ObjectRef("v1", "Pod", "team", "math-1-head"),)
    world.remove_pods("math-1")
    assert ObjectRef("ray.io/v1", "RayCluster", "team", "math-1-abcde") in event_subjects(world.snapshot())


def test_a_status_of_a_newer_operator_is_read_as_far_as_it_is_known() -> None:
    world = World().training()
    stored = {**world.status, "invention": {"of": "tomorrow"}, "retries": "many"}
    status = parse_status(stored)
    assert status.phase == "Training"
    assert len(status.conditions) == len(world.status["conditions"])
    assert status.retries is None


def test_of_a_list_in_the_status_only_what_cannot_be_read_is_left_out() -> None:
    world = World().training()
    stored = json.loads(json.dumps(world.status))
    stored["conditions"][3]["lastTransitionTime"] = "2026-01-01T23:59:60Z"
    stored["conditions"][5]["status"] = "Perhaps"
    stored["nextAttemptTime"] = "2026-13-01T00:00:00Z"
    status = parse_status(stored)
    left_out = {stored["conditions"][3]["type"], stored["conditions"][5]["type"]}
    assert {item["type"] for item in world.status["conditions"]} - {item.type for item in status.conditions} == left_out
    assert status.next_attempt_time is None
    assert status.attempts[0].number == 1


@pytest.mark.parametrize("time", ["9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z", "2026-01-01T23:59:60Z"])
def test_times_written_by_hand_into_a_status_never_stop_the_operator(time: str) -> None:
    world = World().training()
    world.job["spec"]["lifecycle"] = {"activeDeadlineSeconds": 31_536_000, "ttlSecondsAfterFinished": 31_536_000}
    for key in ("startTime", "completionTime", "nextAttemptTime"):
        world.job["status"][key] = time
    for item in (*world.status["conditions"], *world.status["attempts"]):
        item |= {key: time for key in ("lastTransitionTime", "startTime") if key in item}
    world.step()
    world.step()
    assert world.names("RayJob") in ([], ["math-1"])


@pytest.mark.parametrize("seconds", [10**12, 2**63 - 1])
def test_a_ttl_of_ages_keeps_no_accelerator(seconds: int) -> None:
    world = World().training()
    world.edit(lifecycle={"ttlSecondsAfterFinished": seconds})
    world.final("Failed", failureClass="Config", reason="ConfigError")
    world.settle()
    assert world.names("Deployment") == world.names("RayJob") == []
    assert not world.deleted


def test_a_status_that_was_refused_counts_until_somebody_stores_another() -> None:
    world = World().training()
    stored = {"phase": "Checking", "attempt": 1}
    memory = Memory(unwritten=Unwritten(stored, world.status))
    world.job["status"] = stored
    view = observe(world.snapshot(), world.now, memory).job
    assert (view.status.phase, view.raw_status) == ("Training", stored)
    assert observe(world.snapshot(), world.now, memory).memory.unwritten == memory.unwritten
    world.job["status"] = {"phase": "Pending", "attempt": 1}
    assert observe(world.snapshot(), world.now, memory).job.status.phase == "Pending"


def test_a_job_that_failed_for_a_reason_of_a_newer_operator_stays_failed() -> None:
    world = World().training()
    world.final("Failed", failureClass="Config", reason="ConfigError")
    world.settle()
    assert world.phase == "Failed"
    for condition in world.status["conditions"]:
        condition["reason"] = "InventedTomorrow"
    world.settle()
    assert world.phase == "Failed"
    assert world.condition("Failed")["reason"] == "InventedTomorrow"


def test_ages_are_counted_from_when_this_process_saw_a_change() -> None:
    world = World().training()
    first = world.memory.sequence
    assert first is not None
    world.now += timedelta(seconds=100)
    observation = observe(world.snapshot(), world.now, world.memory)
    assert observation.memory.sequence == first
    world.heartbeat(2, activity=1)
    observation = observe(world.snapshot(), world.now, world.memory)
    assert observation.memory.sequence is not None
    assert observation.memory.sequence.at == world.now
    assert observation.memory.activity is not None
    assert observation.memory.activity.at == first.at, "a heartbeat is no activity"
    fresh = observe(world.snapshot(), world.now, Memory())
    assert fresh.memory.sequence is not None
    assert fresh.memory.sequence.at == world.now


def test_a_disruption_is_remembered_after_the_pod_has_vanished() -> None:
    world = World().training()
    world.terminate("math-1-worker", reason="EvictionByEvictionAPI")
    world.settle()
    world.remove_pods("math-1-worker")
    world.settle()
    assert Fact.DISRUPTED in world.memory.since
    assert world.memory.disruption is not None
    assert world.memory.disruption.reason == "Evicted"


def test_pods_that_are_older_than_the_job_are_somebody_elses() -> None:
    world = World().training()
    for name in ("math-1-head", "math-1-worker"):
        world.objects["Pod", name]["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    observation = observe(world.snapshot(), world.now, Memory())
    assert observation.student_pods == {}
    assert observation.ray_jobs[1].head is HeadState.GONE


def test_documents_of_another_attempt_are_ignored() -> None:
    world = World().training()
    world.heartbeat(9, attempt=7)
    world.final("Succeeded", attempt=7)
    observation = observe(world.snapshot(), world.now, world.memory)
    assert observation.progress is None
    assert observation.final is None


def test_only_units_of_the_jobs_own_resource_are_counted_as_accelerators() -> None:
    limits = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32", "cpu": "500m"}
    pod = {"spec": {"containers": [{"resources": {"limits": limits}}, {"resources": {}}]}}
    assert accelerator_units(pod, "nvidia.com/gpu") == 8
    assert accelerator_units(pod, "amd.com/gpu") == 0
    assert accelerator_resource_of(None, "cuda") == "nvidia.com/gpu"
    assert accelerator_resource_of("amd.com/gpu", "cuda") == "amd.com/gpu"
    assert accelerator_resource_of(None, "cpu") is None


def test_pods_that_hold_something_are_those_on_nodes() -> None:
    world = World().training()
    assert observe(world.snapshot(), world.now, Memory()).holding_pods == 3
    world.unscheduled(world.objects["Pod", "math-1-worker"], "no room")
    assert observe(world.snapshot(), world.now, Memory()).holding_pods == 2
