"""Crashes, takeovers, lost events, foreign objects and other writers, on a real API server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from operator_api import Api
from operator_jobs import eventually
from operator_player import Player

Manifest = dict[str, Any]


def uids(children: list[Manifest]) -> dict[str, str]:
    return {child["metadata"]["name"]: child["metadata"]["uid"] for child in children}


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("Checking", marks=LONG),
        "StartingTeachers",
        pytest.param("ProbingTeachers", marks=LONG),
        "StartingStudent",
        pytest.param("Training", marks=LONG),
    ],
)
async def test_a_killed_operator_makes_nothing_twice(
    start_operator: Any, create_job: Any, player: Player, phase: str
) -> None:
    kept = {
        "Checking": (),
        "StartingTeachers": (("batch/v1", "Job"),),
        "ProbingTeachers": (("apps/v1", "Deployment"),),
        "StartingStudent": (("apps/v1", "Deployment"), ("ray.io/v1", "RayJob")),
        "Training": (("apps/v1", "Deployment"), ("ray.io/v1", "RayJob")),
    }[phase]
    player.script.hold_at_step = 1
    player.script.kuberay = phase != "StartingStudent"
    player.script.teachers_ready = phase != "StartingTeachers"
    player.script.hold_steps_of = {"Checking": "check", "ProbingTeachers": "probe"}.get(phase, "")
    first = await start_operator()
    job = await create_job()
    await job.reaches(phase)
    first.kill()
    before = {kind: uids(await job.children(*kind)) for kind in kept}
    await start_operator("operator-b", leader_election="false")
    player.script.kuberay = player.script.teachers_ready = True
    player.script.hold_steps_of = ""
    await job.reaches("Training")
    for kind, known in before.items():
        now = uids(await job.children(*kind))
        assert known.items() <= now.items(), f"{kind} was made again"
    player.script.hold_at_step = None
    await job.reaches("Succeeded", seconds=60)
    assert (await job.status())["attempt"] == 1
    assert [what for what, _ in player.log].count("rayjob seen") == 1
    assert [what for what, _ in player.log].count("check passed") == 1


async def test_a_second_operator_takes_over_within_twenty_seconds_and_makes_nothing_twice(
    start_operator: Any, create_job: Any, player: Player
) -> None:
    player.script.hold_at_step = 1
    first = await start_operator("operator-a")
    await eventually("operator-a leads", first.leads)
    second = await start_operator("operator-b")
    assert await second.ready(), "a follower is ready"
    job = await create_job()
    await job.reaches("Training")
    assert not await second.leads()
    assert not any(verb in ("create", "delete") for verb, _ in await second.calls()), "a follower writes nothing"
    held = await first.metric("opd_job_accelerators", name="math")
    assert held > 0
    assert await second.metric("opd_job_accelerators") == 0, "or a sum over replicas would count it twice"
    ray_jobs = uids(await job.children("ray.io/v1", "RayJob"))
    first.kill()
    await eventually("operator-b leads", second.leads, seconds=20)
    assert await second.metric("opd_job_accelerators", name="math") == held
    player.script.hold_at_step = None
    await job.reaches("Succeeded", seconds=60)
    assert (await job.status())["attempt"] == 1
    assert [what for what, _ in player.log].count("rayjob seen") == len(ray_jobs) == 1


async def test_sigterm_hands_the_lease_over_at_once_and_ends_cleanly(start_operator: Any) -> None:
    first = await start_operator("operator-a")
    await eventually("operator-a leads", first.leads)
    second = await start_operator("operator-b")
    loop = asyncio.get_running_loop()
    assert await asyncio.to_thread(first.terminate) == 0
    released = loop.time()
    await eventually("operator-b leads", second.leads, seconds=20)
    assert loop.time() - released < 6, "nobody waited for the end of the term"
    assert not [line for line in first.logs() if line["level"] in ("error", "critical")]


async def test_a_foreign_object_is_told_and_left_alone_until_it_is_gone(
    start_operator: Any, create_job: Any, player: Player, api: Api, namespace: str
) -> None:
    foreign = await api.create(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "math-teacher-big", "namespace": namespace},
            "spec": {
                "replicas": 0,
                "selector": {"matchLabels": {"app": "other"}},
                "template": {
                    "metadata": {"labels": {"app": "other"}},
                    "spec": {"containers": [{"name": "c", "image": "i"}]},
                },
            },
        }
    )
    await start_operator()
    job = await create_job()

    async def collides() -> bool:
        return (await job.condition("NameCollision")).get("status") == "True"

    await eventually("NameCollision", collides, state=job.status)
    assert "math-teacher-big" in (await job.condition("NameCollision"))["message"]
    untouched = await api.get("apps/v1", "Deployment", namespace, "math-teacher-big")
    assert untouched is not None
    assert untouched["spec"] == foreign["spec"]
    assert "ownerReferences" not in untouched["metadata"]
    await api.delete(foreign)
    await job.reaches("Succeeded", seconds=240)


async def test_a_job_made_again_under_its_name_starts_from_nothing(
    start_operator: Any, create_job: Any, player: Player
) -> None:
    player.script.hold_at_step = 1
    await start_operator()
    first = await create_job()
    await first.reaches("Training")
    former = await first.manifest()
    await first.delete()
    second = await create_job()
    player.script.hold_at_step = None
    await second.reaches("Succeeded", seconds=90)
    job = await second.manifest()
    assert former is not None
    assert job is not None
    assert job["metadata"]["uid"] != former["metadata"]["uid"]
    for ray_job in await second.children("ray.io/v1", "RayJob"):
        assert ray_job["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]


async def test_another_writer_of_the_status_delays_nothing(
    start_operator: Any, create_job: Any, player: Player, api: Api
) -> None:
    operator = await start_operator()
    job = await create_job()

    async def write_for_ever() -> None:
        number = 0
        while True:
            number += 1
            found = await job.manifest()
            if found is not None:
                await api.patch(found, {"metadata": {"annotations": {"test/n": str(number)}}})
            await asyncio.sleep(0.02)

    writer = asyncio.create_task(write_for_ever())
    try:
        await job.reaches("Succeeded", seconds=240)
        assert not writer.done(), "it wrote all the time"
    finally:
        writer.cancel()
    assert (await job.status())["attempt"] == 1
    stale = await operator.metric("opd_operator_reconcile_seconds_count", outcome="stale")
    assert stale <= 3, "an annotation of somebody else ends no pass"


async def test_what_vanished_while_the_operator_was_away_is_made_again(
    start_operator: Any, create_job: Any, player: Player, api: Api
) -> None:
    player.script.teachers_ready = False
    first = await start_operator()
    job = await create_job()
    await job.reaches("StartingTeachers")

    async def teacher() -> Manifest | None:
        found = await job.children("apps/v1", "Deployment")
        return found[0] if found else None

    deployment = await eventually("the teacher exists", teacher)
    first.kill()
    await api.delete(deployment)
    player.script.teachers_ready = True
    await start_operator("operator-b", leader_election="false")
    await job.reaches("Succeeded", seconds=60)


async def test_an_exceeded_quota_is_named_and_waited_for(
    start_operator: Any, create_job: Any, player: Player, api: Api, control_plane: Any, namespace: str
) -> None:
    control_plane.kubectl("-n", namespace, "create", "quota", "jobs", "--hard=count/jobs.batch=0")

    async def enforced() -> bool:
        return "count/jobs.batch" in control_plane.kubectl(
            "-n", namespace, "get", "quota", "jobs", "-o", "jsonpath={.status.hard}"
        )

    await eventually("the quota is enforced", enforced)
    await start_operator()
    job = await create_job()

    async def told() -> bool:
        return (await job.condition("Progressing")).get("reason") == "QuotaExceeded"

    await eventually("QuotaExceeded", told, state=job.status)
    assert "exceeded quota" in (await job.condition("Progressing"))["message"]
    control_plane.kubectl("-n", namespace, "delete", "quota", "jobs")
    await job.reaches("Succeeded", seconds=240)


async def test_a_dying_namespace_is_left_in_peace(
    start_operator: Any, create_job: Any, player: Player, control_plane: Any, make_namespace: Any
) -> None:
    operator = await start_operator(leader_election="false")
    player.script.hold_at_step = 1
    job = await create_job()
    await job.reaches("Training")
    control_plane.kubectl("delete", "namespace", job.namespace, "--wait=false")

    async def is_gone() -> bool:
        names = control_plane.kubectl("get", "namespaces", "-o", "name")
        return f"namespace/{job.namespace}" not in names.split()

    await eventually("the namespace is gone", is_gone, seconds=90)
    assert operator.process.poll() is None
    faults = [line for line in operator.logs() if line["message"] == "pass failed by a fault of ours"]
    assert not faults
    created = [line for line in operator.logs() if line["message"] == "write refused"]
    assert len(created) < 10, "no loop of refused writes"
