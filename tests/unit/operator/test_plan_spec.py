"""What a spec leads to: refused, corrected, refused by the API server, changed while the job runs."""

from __future__ import annotations

import json

import pytest
from opd_world import World, final, job_document

from opd_operator.model import WriteProblemKind
from opd_operator.settings import Settings


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
    world = World()
    world.checked()
    world.refuse["RayJob"] = (WriteProblemKind.INVALID, "spec.rayClusterSpec: Required value")
    world.teacher_up()
    world.settle()
    world.end_job("probe", final())
    world.settle()
    assert world.phase == "Failed"
    assert "RayJob math-1: spec.rayClusterSpec: Required value" in world.condition("Failed")["message"]
    assert world.names("Deployment") == world.names("RayJob") == []


@pytest.mark.parametrize("kind", ["Deployment", "RayJob", "NetworkPolicy", "Job"])
def test_children_that_the_api_server_would_refuse_fail_the_job_before_anything_is_made(kind: str) -> None:
    world = World()
    world.refuse[kind] = (WriteProblemKind.INVALID, "spec.template.spec.containers[0].image: Required value")
    world.settle()
    assert world.phase == "Failed"
    assert world.condition("Failed")["reason"] == "InvalidSpec"
    assert kind in world.condition("Failed")["message"]
    assert "spec.template.spec.containers[0].image" in world.condition("Failed")["message"]
    assert world.created == []
    assert "startTime" not in world.status
    world.refuse.clear()
    world.edit(runtime={"image": "trainer:2"}).settle()
    assert world.phase == "Checking", "a correction is tried anew"


def test_a_child_that_would_be_forbidden_is_told_before_a_teacher_starts_and_not_waited_for_for_ever() -> None:
    world = World()
    world.refuse["RayJob"] = (WriteProblemKind.FORBIDDEN, "denied by a policy")
    world.settle()
    assert world.condition("Progressing")["reason"] == "WriteRefused"
    assert world.created == []
    world.after(1801)
    assert world.phase == "Failed"
    assert world.condition("Failed")["reason"] == "WriteRefused"


def test_children_are_tried_once_and_by_no_later_process() -> None:
    world = World().settle()
    (made,) = world.tried
    assert {item.ref.kind for item in made.rehearse} == {"Job", "NetworkPolicy", "Deployment", "RayJob"}
    assert made.create == made.apply == made.events == ()
    assert made.status is None
    assert world.names("Job") == ["math-check-inputs"]
    world.restart_operator().settle()
    assert len(world.tried) == 1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (WriteProblemKind.QUOTA, "QuotaExceeded"),
        (WriteProblemKind.FORBIDDEN, "WriteRefused"),
        (WriteProblemKind.TYPE_NOT_READ, "TypeNotRead"),
        (WriteProblemKind.BEING_DELETED, "Waiting"),
        (WriteProblemKind.COLLISION, "NameCollision"),
    ],
)
def test_a_refused_write_is_named_and_tried_again(kind: WriteProblemKind, reason: str) -> None:
    world = World()
    world.refuse["Job"] = (kind, "words of the API server")
    world.settle()
    assert world.phase in ("Pending", "Checking")
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
