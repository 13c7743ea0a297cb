"""A started job is edited into one that is refused: what runs goes on, nothing more starts, nothing is held or lost."""

from __future__ import annotations

from datetime import timedelta

import pytest
from opd_world import World, final, job_document, untold_attempt

from opd_operator.model import WriteProblemKind

REFUSED_ARGS = [{"name": "big", "model": {"source": "/data/teacher"}, "args": ["--port", "9"]}]
GOOD_ARGS = [{"name": "big", "model": {"source": "/data/teacher"}, "args": ["--log-level", "debug"]}]


def test_an_edit_that_breaks_a_rule_leaves_the_attempt_alone_and_starts_no_other() -> None:
    world = World().training()
    world.edit(teachers=REFUSED_ARGS).settle()
    assert world.phase == "Training"
    assert world.names("RayJob") == ["math-1"]
    assert world.get("Deployment", "math-teacher-big")["metadata"]["generation"] == 1
    accepted = world.condition("Accepted")
    assert accepted["status"] == "False"
    assert "spec.teachers[0].args" in accepted["message"]
    assert world.reasons().count("InvalidSpec") == 1
    assert "ChangeDeferred" not in world.reasons()
    world.final("Preempted")
    world.settle()
    world.after(11)
    assert world.names("RayJob") == world.names("Deployment") == [], "nothing is held while a person is waited for"
    assert world.condition("Progressing")["reason"] == "InvalidSpec"
    world.restart_operator().settle()
    assert world.names("RayJob") == world.names("Deployment") == []
    world.edit(teachers=GOOD_ARGS).settle()
    assert world.condition("Accepted")["status"] == "True"
    container = world.get("Deployment", "math-teacher-big")["spec"]["template"]["spec"]["containers"][0]
    assert "--log-level" in container["args"] + container.get("command", [])
    world.teacher_up()
    world.settle()
    world.end_job("probe", final())
    world.settle()
    assert world.names("RayJob") == ["math-2"]


def test_an_edit_that_breaks_a_rule_before_the_student_frees_the_teachers_until_it_is_corrected() -> None:
    world = World().checked()
    world.edit(teachers=REFUSED_ARGS).settle()
    assert world.names("Deployment") == []
    assert world.condition("Progressing")["reason"] == "InvalidSpec"
    world.edit(teachers=GOOD_ARGS).settle()
    assert world.names("Deployment") == ["math-teacher-big"]
    assert world.condition("Progressing")["status"] == "True"


def test_a_rule_that_only_a_later_operator_has_is_not_asked_of_a_started_job() -> None:
    """Neither of the spec that was accepted, nor at an edit of another field: the job could not be corrected."""
    world = World().training()
    world.job["spec"]["training"]["epochs"] = 2  # refused, and immutable by now
    world.restart_operator().settle()
    assert world.condition("Accepted")["status"] == "True"
    world.edit(suspend=True)
    world.final("Preempted")
    world.settle()
    world.edit(suspend=False).settle()
    assert world.condition("Accepted")["status"] == "True"
    assert world.names("Deployment") == ["math-teacher-big"]


def test_an_edit_that_the_api_server_finds_invalid_costs_no_work_and_waits_for_a_correction() -> None:
    world = World().training()
    world.edit(ray={"head": {"template": {"spec": {"dnsPolicy": "Nowhere"}}}}).settle()
    world.final("Preempted")
    world.settle()
    world.refuse["RayJob"] = (WriteProblemKind.INVALID, "dnsPolicy: Unsupported value")
    world.after(11)
    assert world.phase != "Failed"
    assert "RayJob math-2: dnsPolicy" in world.condition("Accepted")["message"]
    assert world.condition("Progressing")["reason"] == "WriteRefused"
    assert world.names("RayJob") == world.names("Deployment") == []
    assert [item["number"] for item in world.status["attempts"]] == [1]
    tried = len(world.plans)
    world.restart_operator().settle()
    assert not any(plan.create for plan in world.plans[tried:]), "nothing starts before the correction"
    world.refuse.clear()
    world.edit(ray={"head": {"template": {}}}).settle()
    world.teacher_up()
    world.settle()
    world.end_job("probe", final())
    world.settle()
    assert world.names("RayJob") == ["math-2"]
    assert world.condition("Accepted")["status"] == "True"


def test_an_edited_teacher_that_the_api_server_finds_invalid_is_put_back_after_the_correction() -> None:
    world = World().checked()
    world.refuse["Deployment"] = (WriteProblemKind.INVALID, "spec.template.spec.dnsPolicy: Unsupported value")
    world.edit(teachers=[{"name": "big", "model": {"source": "/data/teacher"}, "image": "other:1"}]).settle()
    assert world.condition("Accepted")["reason"] == "WriteRefused"
    assert world.names("Deployment") == []
    world.refuse.clear()
    world.edit(teachers=[{"name": "big", "model": {"source": "/data/teacher"}, "image": "other:2"}]).settle()
    assert world.names("Deployment") == ["math-teacher-big"]


def refused(world: World) -> World:
    """The teacher's arguments are edited into ones that a rule refuses."""
    return world.edit(teachers=REFUSED_ARGS)


def assert_nothing_is_held(world: World) -> None:
    assert world.names("RayJob") == world.names("Deployment") == []
    assert world.condition("Progressing")["reason"] == "InvalidSpec"
    made = len(world.created)
    world.after(60)
    assert len(world.created) == made, "nothing is made while a correction is waited for"


def test_a_teacher_that_fails_the_attempt_is_not_restarted_from_a_refused_spec() -> None:
    world = refused(World().training()).settle()
    world.teacher_down()
    world.final("Failed", failureClass="Teacher", reason="TeacherUnreachable", message="no answer", teacher="big")
    world.settle()
    world.remove_pods("math-1")
    world.after(11)
    assert_nothing_is_held(world)
    assert len(world.status["attempts"]) == 1


def test_a_teacher_that_somebody_deletes_is_not_put_back_from_a_refused_spec() -> None:
    world = refused(World().training()).settle()
    world.vanish("Deployment", "math-teacher-big")
    world.settle()
    assert world.names("Deployment") == []
    assert world.phase == "Training"
    world.edit(teachers=GOOD_ARGS).settle()
    assert world.names("Deployment") == ["math-teacher-big"]


@pytest.mark.parametrize("attempt", [1, 2])
def test_an_attempt_that_no_status_tells_of_is_followed_though_the_edit_is_refused(attempt: int) -> None:
    world = refused(untold_attempt(attempt)).settle()
    assert world.names("RayJob") == [f"math-{attempt}"]
    assert "endTime" not in world.attempt(attempt)
    world.ray_starts(attempt)
    world.heartbeat(attempt=attempt)
    world.settle()
    assert world.phase == "Training"
    world.final("Preempted", attempt=attempt)
    world.settle()
    world.after(11)
    assert_nothing_is_held(world)


def test_an_attempt_that_could_not_begin_for_a_quota_is_taken_back_when_the_edit_is_refused() -> None:
    world = World().ready()
    world.refuse["RayJob"] = (WriteProblemKind.QUOTA, "exceeded quota: rayjobs")
    world.end_job("probe", final())
    world.settle()
    assert world.condition("Progressing")["reason"] == "QuotaExceeded"
    refused(world).settle()
    world.refuse.clear()
    assert_nothing_is_held(world)
    assert world.status.get("attempts", []) == []
    world.edit(teachers=GOOD_ARGS).settle()
    world.teacher_up()
    world.settle()
    world.end_job("probe", final())
    world.settle()
    assert world.names("RayJob") == ["math-1"]


def test_a_corrected_spec_is_not_blamed_for_the_refusal_of_the_one_before() -> None:
    world = World().training()
    world.refuse["Deployment"] = (WriteProblemKind.INVALID, "dnsPolicy: Unsupported value")
    world.edit(ray={"head": {"template": {}}}).settle()
    world.vanish("Deployment", "math-teacher-big")
    world.step()
    world.step()
    world.refuse.clear()
    world.edit(teachers=GOOD_ARGS).settle()
    assert world.condition("Accepted")["status"] == "True"
    assert world.names("Deployment") == ["math-teacher-big"]


def test_an_edit_whose_children_cannot_even_be_built_is_told_and_ends_no_attempt() -> None:
    world = World().training()
    world.edit(teachers=[{**REFUSED_ARGS[0], "args": [], "template": {"metadata": {"labels": ["a"]}}}]).settle()
    assert world.phase == "Training"
    assert "template.metadata.labels" in world.condition("Accepted")["message"]
    world.final("Failed", failureClass="Teacher", reason="TeacherUnreachable", message="no answer", teacher="big")
    world.settle()
    world.remove_pods("math-1")
    world.after(11)
    assert_nothing_is_held(world)


def test_a_hold_stops_the_clock_of_the_input_check() -> None:
    world = World().settle()
    assert world.phase == "Checking"
    refused(world).settle()
    assert world.names("Job") == []
    world.now += timedelta(hours=2)
    world.edit(teachers=GOOD_ARGS).settle()
    assert world.phase == "Checking"
    assert world.names("Job") == ["math-check-inputs"]


def test_workers_too_small_for_an_engine_are_refused_while_the_job_runs() -> None:
    world = World(job_document(rollout={"tensorParallelSize": 2}, ray={"workers": {"gpusPerWorker": 2}}))
    world.training()
    world.edit(ray={"workers": {"gpusPerWorker": 1}}).settle()
    assert world.condition("Accepted")["status"] == "False"
    assert "spec.ray.workers.gpusPerWorker" in world.condition("Accepted")["message"]


def test_without_kuberay_the_next_attempt_waits_and_no_teacher_is_held() -> None:
    world = World().training()
    world.final("Preempted")
    world.settle()
    world.kuberay_missing = True
    world.after(11)
    assert world.names("Deployment") == []
    assert world.condition("Progressing")["reason"] == "KubeRayMissing"
    world.kuberay_missing = False
    world.settle()
    world.teacher_up()
    world.settle()
    world.end_job("probe", final())
    world.settle()
    assert world.names("RayJob") == ["math-2"]


@pytest.mark.parametrize("kind", [WriteProblemKind.NOT_SERVED, WriteProblemKind.FORBIDDEN])
def test_what_the_cluster_refuses_for_a_while_is_no_fault_of_an_edited_spec(kind: WriteProblemKind) -> None:
    world = World().training()
    world.edit(lifecycle={"ttlSecondsAfterFinished": 60}).settle()
    world.final("Preempted")
    world.settle()
    world.refuse["RayJob"] = (kind, "words of the API server")
    world.after(11)
    assert world.condition("Accepted")["status"] == "True"
    assert world.condition("Progressing")["status"] == "False"
    world.refuse.clear()
    world.after(16)
    assert world.names("RayJob") == ["math-2"]


def test_an_edit_reaches_the_check_that_waits_for_it() -> None:
    world = World().settle()
    before = world.get("Job", "math-check-inputs")["metadata"]["uid"]
    world.edit(runtime={"image": "corrected:1"}).settle()
    job = world.get("Job", "math-check-inputs")
    assert job["metadata"]["uid"] != before
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == "corrected:1"
    world.edit(lifecycle={"ttlSecondsAfterFinished": 60}).settle()
    assert world.get("Job", "math-check-inputs")["metadata"]["uid"] == job["metadata"]["uid"], "it is the same Job"


def test_an_edit_reaches_the_probe_that_waits_for_it() -> None:
    world = World().ready()
    (name,) = [name for name in world.names("Job") if "probe" in name]
    before = world.get("Job", name)["metadata"]["uid"]
    world.edit(preflight={"nodeSelector": {"pool": "cpu"}}).settle()
    assert world.get("Job", name)["metadata"]["uid"] != before
    assert world.get("Job", name)["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "cpu"}
