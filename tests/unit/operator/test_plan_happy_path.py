"""The way of a job to success, step by step."""

from __future__ import annotations

import copy

import pytest
from opd_world import World, final, job_document

from opd_api.v1alpha1 import OPDJobStatus
from opd_api.vocabulary import ConditionType
from opd_operator.observe import observe
from opd_operator.plan import plan


def two_teachers() -> World:
    teachers = [{"name": name, "model": {"source": f"/data/{name}"}} for name in ("big", "code")]
    return World(job_document(teachers=teachers, routing={"map": {"math": "big"}, "default": "code"}))


def test_all_conditions_are_set_at_the_first_visit() -> None:
    world = World()
    world.step()
    assert [item["type"] for item in world.status["conditions"]] == [kind.value for kind in ConditionType]
    assert world.status["observedGeneration"] == 1


def test_nothing_but_the_input_check_runs_before_it_has_passed() -> None:
    world = World().settle()
    assert world.phase == "Checking"
    assert [name.split("/")[0] for name in world.created] == ["ConfigMap", "Job"]
    assert world.status["startTime"] == "2026-03-01T12:00:00Z"


def test_teachers_start_only_after_the_input_check() -> None:
    world = World().checked()
    assert world.phase == "StartingTeachers"
    assert world.names("Deployment") == world.names("Service") == ["math-teacher-big"]
    assert world.names("Secret") == ["math-0123abcd-keys"]
    assert world.names("NetworkPolicy") == ["math"]
    assert world.condition("InputsChecked")["reason"] == "CheckPassed"


def test_the_gate_waits_for_every_teacher() -> None:
    world = two_teachers().checked()
    world.teacher_up("big")
    world.settle()
    assert world.status["teachersReady"] == "1/2"
    assert world.condition("TeachersReady") | {"message": ""} == {
        "type": "TeachersReady",
        "status": "False",
        "reason": "TeachersStarting",
        "message": "",
        "lastTransitionTime": "2026-03-01T12:00:00Z",
        "observedGeneration": 1,
    }
    assert "code 0/1" in world.condition("TeachersReady")["message"]
    assert world.names("Job") == ["math-check-inputs"]
    world.teacher_up("code")
    world.settle()
    assert world.status["teachersReady"] == "2/2"
    assert world.phase == "ProbingTeachers"
    assert world.names("RayJob") == []


def test_no_ray_job_before_the_probe_has_passed() -> None:
    world = World().ready()
    assert world.phase == "ProbingTeachers"
    assert world.names("RayJob") == []
    world.end_job("probe", final())
    world.settle()
    assert world.phase == "StartingStudent"
    assert world.names("RayJob") == ["math-1"]
    assert world.condition("TeachersProbed")["status"] == "True"


def test_a_deployment_that_claims_readiness_without_pods_does_not_open_the_gate() -> None:
    world = World().checked()
    world.teacher_up("big")
    world.remove_pods("math-teacher-big")
    world.settle()
    assert world.phase == "StartingTeachers"


def test_a_probe_of_pods_that_are_gone_does_not_open_the_gate() -> None:
    world = World().ready()
    old = [name for name in world.names("Job") if "probe" in name]
    world.teacher_up("big")  # other pods of the same teacher
    world.end_job("probe", final())
    world.settle()
    assert world.names("RayJob") == []
    assert [name for name in world.names("Job") if "probe" in name] != old
    world.end_job("probe", final())
    assert world.settle().names("RayJob") == ["math-1"]


def test_phases_come_in_order_and_columns_follow() -> None:
    world = World().training(step=1)
    assert world.status["stepProgress"] == "1/10"
    world.heartbeat(4, metrics={"opd_reverse_kl": 0.5}, lastCheckpoint={"step": 4, "path": "checkpoints/step-4.a1"})
    world.after(31)
    assert world.status["stepProgress"] == "4/10"
    assert world.status["training"]["percent"] == 40
    assert world.status["training"]["reverseKl"] == "0.5"
    assert world.condition("CheckpointAvailable")["message"] == "step 4 at checkpoints/step-4.a1"
    world.heartbeat(10, phase="Exporting")
    world.settle()
    world.final(result={"checkpoint": "c", "exportedModel": "e", "report": "r"})
    world.settle()
    world.ray(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    world.settle()
    assert world.phases == [
        "Checking",
        "StartingTeachers",
        "ProbingTeachers",
        "StartingStudent",
        "Training",
        "Finishing",
        "Succeeded",
    ]
    assert world.status["result"] == {"checkpoint": "c", "exportedModel": "e", "report": "r"}
    assert world.condition("Succeeded")["status"] == "True"
    assert world.condition("Failed")["status"] == "False"


def test_teachers_are_freed_when_the_trainer_exports() -> None:
    world = World().training()
    world.heartbeat(10, phase="Exporting")
    world.settle()
    assert world.names("Deployment") == world.names("Service") == []
    assert world.phase == "Finishing"
    assert world.condition("TeachersReady")["reason"] == "TeachersReleased"


def test_success_needs_the_document_and_kuberay() -> None:
    world = World().training()
    world.final()
    world.settle()
    assert world.phase == "Finishing"
    world.ray(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    assert world.settle().phase == "Succeeded"


def test_success_is_accepted_after_a_minute_when_kuberay_never_agrees() -> None:
    world = World().training()
    world.final()
    world.settle()
    assert world.after(59).phase == "Finishing"
    assert world.after(2).phase == "Succeeded"


def test_everything_is_freed_at_the_end_and_the_records_stay() -> None:
    world = World().training()
    world.final()
    world.ray(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    world.settle()
    assert world.names("RayJob") == world.names("Deployment") == world.names("Service") == []
    assert world.accelerator_pods() == []
    assert "math-progress" in world.names("ConfigMap")
    assert world.condition("ResourcesReleased")["status"] == "True"
    assert not world.deleted


def test_resources_are_not_called_released_while_a_pod_still_runs() -> None:
    world = World().training()
    leftover = world.objects["Pod", "math-1-worker"]
    leftover["metadata"]["ownerReferences"] = []
    world.final()
    world.ray(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    world.settle()
    assert world.condition("ResourcesReleased")["reason"] == "Releasing"
    world.remove_pods("math-1-worker")
    world.settle()
    assert world.condition("ResourcesReleased")["status"] == "True"


def test_the_job_is_deleted_at_its_ttl() -> None:
    world = World(job_document(lifecycle={"ttlSecondsAfterFinished": 300})).training()
    world.final()
    world.ray(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    world.settle()
    assert world.plans[-1].requeue_after == pytest.approx(300, abs=1)
    world.now = world.now.replace(minute=4, second=59)
    world.settle()
    assert not world.deleted
    assert world.after(1).deleted


def test_a_job_at_rest_plans_nothing() -> None:
    world = World().training()
    made = world.step()
    assert (made.delete, made.create, made.apply, made.secrets, made.annotate, made.status, made.events) == (
        (),
        (),
        (),
        (),
        (),
        None,
        (),
    )
    assert made.requeue_after is not None
    assert made.requeue_after > 25


def test_heartbeats_reach_the_status_at_most_every_thirty_seconds() -> None:
    world = World().training(step=1)
    written = 0
    for step in range(2, 9):
        world.now = world.now.replace(second=(step - 1) * 7)
        world.heartbeat(step)
        written += world.step().status is not None
    assert written == 1
    assert world.status["training"]["step"] in (5, 6)


@pytest.mark.parametrize(
    ("change", "field"), [({"phase": "TeacherUnavailable"}, "activity"), ({"phase": "Stopping"}, "activity")]
)
def test_a_new_phase_of_the_trainer_reaches_the_status_at_once(change: dict[str, str], field: str) -> None:
    world = World().training()
    world.heartbeat(1, **change)
    world.settle()
    assert world.status["training"][field] == change["phase"]


def test_a_happy_path_with_two_teachers_stays_within_its_budget_of_writes() -> None:
    world = two_teachers().training()
    for step in range(2, 10):
        world.heartbeat(step, lastCheckpoint={"step": step, "path": f"checkpoints/step-{step}.a1"})
        world.after(15)
    world.heartbeat(10, phase="Exporting")
    world.settle()
    world.final()
    world.ray(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    world.settle()
    assert world.phase == "Succeeded"
    assert world.writes <= 45 + 8 * 15 / 30


def test_a_restarted_operator_goes_on_without_a_second_create() -> None:
    world = World().settle().restart_operator().settle()
    world.end_job("check", final())
    world.settle().restart_operator().settle()
    world.teacher_up()
    world.settle().restart_operator().settle()
    world.end_job("probe", final())
    world.settle().restart_operator().settle()
    world.ray_runs()
    world.heartbeat(1)
    world.settle().restart_operator().settle()
    assert world.phase == "Training"
    assert len(world.created) == len(set(world.created)) == 12


def test_the_status_always_fits_the_api() -> None:
    world = World().training()
    world.final()
    world.ray(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    world.settle()
    for made in world.plans:
        if made.status is not None:
            OPDJobStatus.model_validate(made.status)


def test_disabled_preflight_runs_neither_check_nor_probe() -> None:
    world = World(job_document(preflight={"enabled": False})).settle()
    world.teacher_up()
    world.settle()
    assert world.names("Job") == []
    assert world.names("RayJob") == ["math-1"]
    assert world.condition("InputsChecked")["reason"] == "CheckDisabled"
    assert world.condition("TeachersProbed")["reason"] == "CheckDisabled"


def test_external_teachers_are_probed_but_not_served() -> None:
    teachers = [{"name": "far", "endpoints": ["http://teacher.example:30000"], "maxContextTokens": 8192}]
    world = World(job_document(teachers=teachers)).checked()
    assert world.names("Deployment") == world.names("Secret") == []
    assert world.phase == "ProbingTeachers"
    world.end_job("probe", final())
    world.settle()
    assert world.names("RayJob") == ["math-1"]
    assert world.status["teachersReady"] == "1/1"


def test_teachers_inside_the_learner_need_no_server_and_no_probe() -> None:
    teachers = [{"name": "inside", "backend": "inprocess", "model": {"source": "/data/teacher"}}]
    world = World(job_document(teachers=teachers), ignore_rules=True).checked()
    assert world.names("Deployment") == []
    assert world.names("RayJob") == ["math-1"]


def test_nothing_is_made_or_told_for_a_job_that_is_being_deleted() -> None:
    world = World().training()
    world.vanish("Deployment", "math-teacher-big")
    world.job["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    made = world.step()
    assert (made.create, made.apply, made.status, made.events, made.requeue_after) == ((), (), None, (), None)


def test_findings_of_the_check_reach_the_status_and_stay() -> None:
    world = World().settle()
    finding = {
        "code": "NotChecked",
        "severity": "NotChecked",
        "path": "spec.teachers[0].model",
        "message": "node-local",
    }
    world.end_job("check", final(findings=[finding]))
    world.settle()
    assert finding in world.status["findings"]
    del world.objects["Job", "math-check-inputs"]
    world.settle()
    assert finding in world.status["findings"]


def test_objects_of_an_earlier_job_of_the_same_name_are_not_taken_for_ours() -> None:
    world = World().probed()
    for item in world.objects.values():
        if item["kind"] not in ("Pod", "RayCluster"):
            item["metadata"]["ownerReferences"] = [{"uid": "another-job", "kind": "OPDJob"}]
    fresh = World()
    fresh.objects = world.objects
    fresh.settle()
    assert fresh.phase == "Checking"
    assert fresh.status["attempts"] == []
    assert fresh.condition("NameCollision")["status"] == "True"
    assert "Job math-check-inputs" in fresh.condition("NameCollision")["message"]
    fresh.objects = {}
    fresh.settle()
    assert fresh.condition("NameCollision")["status"] == "False"
    assert fresh.names("Job") == ["math-check-inputs"]


def test_observing_and_planning_change_nothing_that_they_are_given() -> None:
    world = World().training()
    world.heartbeat(2)
    before = copy.deepcopy((world.objects, world.job))
    observation = observe(world.snapshot(), world.now, world.memory)
    plan(observation, world.now, world.settings)
    assert (world.objects, world.job) == before


def test_every_condition_says_something_at_every_moment() -> None:
    world = World().training()
    world.final()
    world.ray(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    world.settle()
    assert world.phase == "Succeeded"
    for made in world.plans:
        for condition in made.status["conditions"] if made.status is not None else ():
            assert condition["message"], condition
    first = world.plans[0].status
    assert first is not None
    said = {item["type"]: item["message"] for item in first["conditions"]}
    assert said["Suspended"] == "the job is not suspended"
    assert said["Failed"] == said["Succeeded"] == "the job has not ended"


def test_a_trainer_that_loads_its_models_is_not_said_to_train() -> None:
    world = World().training()
    world.heartbeat(0, phase="Starting")
    world.settle()
    assert "nothing is trained yet" in world.condition("TrainingRunning")["message"]


def test_teachers_that_are_not_needed_any_more_do_not_look_lost() -> None:
    world = World().training()
    world.heartbeat(10, phase="Exporting")
    world.settle()
    assert world.status["teachersReady"] == "released"
    world.final()
    world.ray(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    world.settle()
    assert world.phase == "Succeeded"
    assert world.status["teachersReady"] == "released"


def test_a_job_that_fails_before_its_teachers_counts_none() -> None:
    world = World().settle()
    world.end_job("check", final("Failed", failureClass="Data", reason="DataNotFound", message="no file"), ok=False)
    world.settle()
    assert (world.phase, world.status["teachersReady"]) == ("Failed", "-")


def test_the_event_of_a_finding_has_its_code_as_reason() -> None:
    world = World(job_document(training={"learningRate": 1e-4})).settle()
    assert "spec.training.learningRate" in dict(world.said)["LearningRateHigh"]


@pytest.mark.parametrize("reach", ["settle", "ready"], ids=["check", "probe"])
def test_a_step_whose_job_appears_says_nothing_new(reach: str) -> None:
    world = World()
    getattr(world, reach)()
    made = [plan for plan in world.plans if any(item["kind"] == "Job" for item in plan.create)]
    after = world.plans[world.plans.index(made[-1]) + 1 :]
    assert after, "the pass that sees the Job"
    assert not [plan for plan in after if plan.status is not None]
