"""Whole lives of OPDJobs on a real API server; kubelet, KubeRay and trainer are played (tests/support/operator_player.py)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from operator_api import Api
from operator_jobs import eventually
from operator_player import Player

Manifest = dict[str, Any]


async def held_by(job: Any) -> list[str]:
    """Pods of a job that exist and hold accelerators."""
    pods = await job.children("v1", "Pod")
    return [
        pod["metadata"]["name"] for pod in pods if pod["metadata"]["labels"]["opd.dev/role"] in ("teacher", "worker")
    ]


async def gone(job: Any) -> bool:
    return not await held_by(job)


async def test_a_job_goes_all_the_way_and_frees_everything(
    start_operator: Any, create_job: Any, player: Player
) -> None:
    operator = await start_operator()
    job = await create_job()
    await job.reaches("Succeeded", seconds=60)
    status = await job.status()
    conditions = {entry["type"]: entry["status"] for entry in status["conditions"]}
    for kind in ("Accepted", "InputsChecked", "TeachersProbed", "RayJobCreated", "Succeeded"):
        assert conditions[kind] == "True", kind
    assert conditions["Failed"] == "False"
    assert status["training"]["step"] == 4
    assert status["result"]["exportedModel"] == "/data/export"
    assert len(status["attempts"]) == 1
    await eventually("accelerators are free", lambda: gone(job), state=lambda: held_by(job))

    async def released() -> bool:
        return (await job.condition("ResourcesReleased")).get("status") == "True"

    await eventually("ResourcesReleased", released, state=job.status)
    reasons = await job.reasons()
    assert "AttemptStarted" in reasons
    assert reasons.count("AttemptStarted") == 1
    assert await operator.metric("opd_job_phase", name="math", phase="Succeeded") == 1
    assert await operator.metric("opd_job_accelerators", name="math") == 0
    assert operator.terminate() == 0


async def test_the_rayjob_comes_after_the_last_teacher_was_ready_and_probed(
    start_operator: Any, create_job: Any, player: Player
) -> None:
    teachers = [
        {"name": name, "backend": "transformers", "model": {"source": f"/data/{name}"}} for name in ("code", "math")
    ]
    await start_operator()
    job = await create_job(teachers=teachers, routing={"map": {"a": "code", "b": "math"}})
    await job.reaches("Succeeded", seconds=60)
    events = [what for what, _ in player.log]
    assert events.count("teacher ready") == 2
    last_ready = len(events) - 1 - events[::-1].index("teacher ready")
    assert last_ready < events.index("probe passed") < events.index("rayjob seen")


async def test_a_teacher_that_never_gets_ready_means_no_rayjob_ever(
    start_operator: Any, create_job: Any, player: Player
) -> None:
    player.script.teachers_ready = False
    player.script.teacher_waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "nowhere/x:1"'}
    await start_operator()
    job = await create_job(lifecycle={"teacherReadyDeadlineSeconds": 3, "preemptionGraceSeconds": 5})
    await job.reaches("Failed", seconds=60)
    assert not await job.names("ray.io/v1", "RayJob")
    assert ("rayjob seen", "math-1") not in player.log
    failed = await job.condition("Failed")
    assert "nowhere/x:1" in failed["message"]
    await eventually("accelerators are free", lambda: gone(job), state=lambda: held_by(job))


async def test_a_failed_input_check_takes_no_accelerator(start_operator: Any, create_job: Any, player: Player) -> None:
    player.script.check = {
        "outcome": "Failed",
        "failureClass": "Data",
        "reason": "DataNotFound",
        "message": "/data/prompts.jsonl does not exist on the claim",
    }
    await start_operator()
    job = await create_job()
    await job.reaches("Failed")
    failed = await job.condition("Failed")
    assert failed["reason"] == "DataNotFound"
    assert "/data/prompts.jsonl" in failed["message"]
    assert not await job.names("apps/v1", "Deployment")
    assert not any(what == "teacher ready" for what, _ in player.log)


async def test_a_broken_rule_is_a_finding_and_creates_nothing(
    start_operator: Any, create_job: Any, player: Player
) -> None:
    await start_operator()
    # A rule that the API server does not keep too, or the job would never get this far.
    job = await create_job(distillation={"signal": "advantage", "tokenSelection": "teacher_topk", "topK": 16})

    async def refused() -> bool:
        return (await job.condition("Accepted")).get("status") == "False"

    await eventually("Accepted is False", refused, state=job.status)
    (finding,) = [entry for entry in (await job.status())["findings"] if entry["severity"] == "Error"]
    assert (finding["code"], finding["path"]) == ("SetAdvantageIsZero", "spec.distillation.signal")
    assert not await job.names("v1", "ConfigMap")
    assert not await job.names("batch/v1", "Job")


async def test_deleting_a_job_in_the_middle_frees_everything_with_the_operator_down(
    start_operator: Any, create_job: Any, player: Player
) -> None:
    player.script.hold_at_step = 1
    operator = await start_operator()
    job = await create_job()
    await job.reaches("Training")
    operator.kill()
    await job.delete()
    await eventually("pods are gone", lambda: gone(job), state=lambda: held_by(job))

    async def nothing_left() -> bool:
        kinds = [("ray.io/v1", "RayJob"), ("apps/v1", "Deployment"), ("batch/v1", "Job"), ("v1", "ConfigMap")]
        kinds += [("v1", "Service"), ("networking.k8s.io/v1", "NetworkPolicy"), ("v1", "Secret")]
        return not [name for kind in kinds for name in await job.names(*kind)] and await job.manifest() is None

    await eventually("children are gone", nothing_left)


async def test_suspend_saves_and_frees_and_resume_goes_on(start_operator: Any, create_job: Any, player: Player) -> None:
    player.script.hold_at_step = 2
    await start_operator()
    job = await create_job()
    await job.reaches("Training")
    await job.patch({"suspend": True})
    await job.reaches("Suspended")
    assert ("final", "1:Preempted") in player.log
    await eventually("accelerators are free", lambda: gone(job), state=lambda: held_by(job))
    assert not await job.names("ray.io/v1", "RayJob")
    assert not await job.names("apps/v1", "Deployment")
    player.script.hold_at_step = None
    await job.patch({"suspend": False})
    await job.reaches("Succeeded", seconds=60)
    status = await job.status()
    assert status["attempt"] == 2
    assert (status.get("retries") or 0) == 0
    assert ("step", "2:3") in player.log, "the second attempt went on from the saved step"


async def test_a_lost_head_is_a_new_attempt_from_the_last_checkpoint(
    start_operator: Any, create_job: Any, player: Player, api: Api
) -> None:
    player.script.hold_at_step = 2
    operator = await start_operator()
    job = await create_job()
    await job.reaches("Training")
    (head,) = await api.list("v1", "Pod", job.namespace, "opd.dev/role=head")
    await api.delete(head, grace_seconds=0)

    async def second_attempt() -> bool:
        return (await job.status()).get("attempt") == 2

    await eventually("attempt 2", second_attempt, seconds=60, state=job.status)
    player.script.hold_at_step = None
    await job.reaches("Succeeded", seconds=60)
    first, second = (await job.status())["attempts"]
    assert first["failureClass"] == "Infrastructure"
    assert not second.get("failureClass")
    assert await job.names("ray.io/v1", "RayJob") <= {"math-2"}
    assert await operator.metric("opd_job_attempts_total", **{"class": "Infrastructure"}) == 1


async def test_a_ttl_deletes_the_job_and_all_of_its_children(
    start_operator: Any, create_job: Any, player: Player
) -> None:
    await start_operator()
    job = await create_job(lifecycle={"ttlSecondsAfterFinished": 2, "preemptionGraceSeconds": 5})

    async def is_gone() -> bool:
        return await job.manifest() is None

    await eventually("the job is gone", is_gone, seconds=60, state=job.status)
    assert ("final", "1:Succeeded") in player.log


async def test_a_job_at_rest_is_neither_written_nor_read(
    start_operator: Any, create_job: Any, player: Player, settle: Callable[[float], Awaitable[None]]
) -> None:
    operator = await start_operator(leader_election="false")
    job = await create_job()
    await job.reaches("Succeeded", seconds=60)

    async def released() -> bool:
        return (await job.condition("ResourcesReleased")).get("status") == "True"

    await eventually("ResourcesReleased", released, state=job.status)
    await settle(2)
    before = await operator.calls()
    await settle(5)
    after = await operator.calls()
    assert {key: count - before.get(key, 0) for key, count in after.items() if count != before.get(key)} == {}


async def test_one_happy_job_costs_few_writes(start_operator: Any, create_job: Any, player: Player) -> None:
    operator = await start_operator(training_status_seconds="30", leader_election="false")
    job = await create_job()
    await job.reaches("Succeeded", seconds=60)
    calls = await operator.calls()
    writes = {key: count for key, count in calls.items() if key[0] in ("create", "update", "patch", "delete")}
    assert sum(writes.values()) <= 45, writes
