"""An operator is started on thousands of ended jobs and one new one. Ours, and the kopf baseline, on the same objects.

A start is over when the new job's first teacher is there: that is what people wait for, and the same on both sides. The ended
jobs are at rest for both: they have the status that our operator left on one of them, and the annotation that kopf would
have. They have no children, which a job has until its time to live is over.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import kopf
from operator_jobs import eventually
from played import Player
from processes import cpu_seconds, imports_mib, kopf_baseline, our_operator, resident_mib
from stage import Stage, job, together, unchecked
from watching import CONFIG_MAP, DEPLOYMENT, OPDJOB, watching

from opd_api.vocabulary import Label

Manifest = dict[str, Any]
#: Writes of one side to make the ended jobs that are under way together.
MAKERS = 16
#: The baseline is given up after so many times of ours: by then the bar is settled, and its time counts as at least that.
PATIENCE = 12.0
#: Bounds of that, in seconds.
LEAST_SECONDS, MOST_SECONDS = 60.0, 400.0
LATE_SECONDS = 300.0
SAMPLE = "samplejob"


async def measure_cold(stage: Stage) -> dict[str, Any]:
    """Seconds to the new job's first teacher, and memory."""
    namespace, count = stage.namespace("cold"), stage.sizes.ended
    status, annotations = await _at_rest(stage, namespace)
    names = [f"ended{number:05d}" for number in range(count)]
    await together(names, lambda name: _make_ended(stage, namespace, name, status, annotations), MAKERS)
    return await compare(stage, namespace)


async def compare(stage: Stage, namespace: str) -> dict[str, Any]:
    """Both operators on the jobs that are there."""
    count, bare = stage.sizes.ended, imports_mib()
    ours = await _start_ours(stage, namespace)
    print(f"  ours: {ours}", flush=True)
    theirs = await _start_kopf(
        stage, namespace, min(MOST_SECONDS, max(LEAST_SECONDS, PATIENCE * ours["first_teacher_seconds"]))
    )
    return {
        **ours,
        **theirs,
        "of_kopf_index": ours["first_teacher_seconds"] / theirs["kopf_first_teacher_seconds"],
        "mib_after_imports": bare,
        "memory": ours["mib"] / (1.2 * bare + 0.05 * count),
        "jobs": count,
    }


async def _start_ours(stage: Stage, namespace: str) -> dict[str, float]:
    await stage.api.create(unchecked(namespace, "new-for-ours"))
    with our_operator(stage.kubeconfig, namespace, stage.logs / "cold.log", leader_election="false") as ours:
        first = asyncio.create_task(_first_teacher(stage, namespace, "new-for-ours", ours.started))
        await eventually("ready", ours.ready, seconds=LATE_SECONDS)
        ready = time.perf_counter() - ours.started
        async with asyncio.timeout(LATE_SECONDS):
            seconds = await first
        cpu_at_first = cpu_seconds(ours.pid)
        await ours.rest(10.0, limit=LATE_SECONDS)
        return {
            "ready_seconds": ready,
            "first_teacher_seconds": seconds,
            "cpu_seconds_to_first_teacher": cpu_at_first,
            "cpu_seconds": cpu_seconds(ours.pid),
            "mib": resident_mib(ours.pid),
            "writes": (await ours.calls()).writes,
        }


async def _start_kopf(stage: Stage, namespace: str, limit: float) -> dict[str, float]:
    await stage.api.create(unchecked(namespace, "new-for-kopf"))
    with kopf_baseline(stage.kubeconfig, namespace, stage.logs / "cold-kopf.log") as pid:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(limit):
                seconds = await _first_teacher(stage, namespace, "new-for-kopf", started)
            in_time = True
        except TimeoutError:
            seconds, in_time = limit, False
        return {
            "kopf_first_teacher_seconds": seconds,
            "kopf_in_time": in_time,
            "kopf_cpu_seconds": cpu_seconds(pid),
            "kopf_mib": resident_mib(pid),
        }


async def _at_rest(stage: Stage, namespace: str) -> tuple[str, dict[str, str]]:
    """Status of a job that has lived its life, and the annotation of one that kopf has handled, which holds the spec with the
    defaults that the API server fills in. The job itself is removed with all that it owns."""
    with our_operator(stage.kubeconfig, namespace, stage.logs / "cold-sample.log") as ours:
        await eventually("ready", ours.ready, seconds=60)
        async with Player(stage.api, namespace).playing() as player:
            player.lives[SAMPLE].may_end.set()
            await stage.api.create(job(namespace, SAMPLE))
            await player.all("succeeded", [SAMPLE], seconds=120)
            await ours.rest(5.0)
            sample = await stage.api.get(OPDJOB.api_version, OPDJOB.kind, namespace, SAMPLE)
            assert sample is not None
            await stage.api.delete(sample)
            await eventually("its ConfigMaps are gone", lambda: _nothing_left(stage, namespace), seconds=60)
    storage = kopf.AnnotationsDiffBaseStorage()
    body, patch = kopf.Body(sample), kopf.Patch()
    storage.store(body=body, patch=patch, essence=storage.build(body=body))
    return json.dumps(sample["status"]), dict(patch["metadata"]["annotations"])


async def _nothing_left(stage: Stage, namespace: str) -> bool:
    return not await stage.api.list(CONFIG_MAP.api_version, CONFIG_MAP.kind, namespace, Label.JOB.value)


async def _make_ended(stage: Stage, namespace: str, name: str, status: str, annotations: dict[str, str]) -> None:
    manifest = job(namespace, name)
    manifest["metadata"]["annotations"] = annotations
    made = await stage.api.create(manifest)
    await stage.api.patch(made, {"status": json.loads(status.replace(SAMPLE, name))}, "status")


async def _first_teacher(stage: Stage, namespace: str, name: str, started: float) -> float:
    """Seconds from the start of a process to the job's first Deployment."""
    seen: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def tell(at: float, change: str, found: Manifest) -> None:
        mine = (found["metadata"].get("labels") or {}).get(Label.JOB.value) == name
        if mine and change == "ADDED" and not seen.done():
            seen.set_result(at - started)

    async with watching(stage.api, namespace, (DEPLOYMENT,), tell):
        return await seen
