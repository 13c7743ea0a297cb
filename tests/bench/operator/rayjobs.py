"""KubeRay's own rate beside ours, on the same machine: RayJobs until each has its RayCluster, OPDJobs until each has its RayJob.

Both sides are given as many objects at once, by as many creators. KubeRay runs as shipped and with as many workers as ours.
There is no bar: a RayCluster is two writes, a RayJob of ours is ten.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from operator_jobs import eventually
from processes import cpu_seconds, kuberay, our_operator
from stage import TOGETHER, Stage, short_lived, together
from watching import RAY_CLUSTER, RAY_JOB, watching

Manifest = dict[str, Any]
LATE_SECONDS = 600.0


async def measure_ray_jobs(stage: Stage) -> dict[str, Any]:
    """Seconds for all, on both sides."""
    count = stage.sizes.ray_jobs
    ours, templates = await _ours(stage, count)
    found: dict[str, Any] = {"ours_seconds": ours[0], "ours_cpu_seconds": ours[1], "jobs": count}
    for concurrency in (1, TOGETHER):
        seconds, cpu = await _kuberay(stage, templates, concurrency)
        found[f"kuberay_{concurrency}_seconds"], found[f"kuberay_{concurrency}_cpu_seconds"] = seconds, cpu
    return found


async def _ours(stage: Stage, count: int) -> tuple[tuple[float, float], list[Manifest]]:
    """OPDJobs to RayJobs; the RayJobs are what KubeRay gets."""
    namespace = stage.namespace("rayjobs")
    made: dict[str, tuple[float, Manifest]] = {}
    names = [f"ray{number:03d}" for number in range(count)]
    with our_operator(stage.kubeconfig, namespace, stage.logs / "rayjobs.log") as ours:
        await eventually("leads", lambda: _leads(ours), seconds=60)

        def tell(at: float, change: str, found: Manifest) -> None:
            made.setdefault(found["metadata"]["name"], (at, found))

        spent = cpu_seconds(ours.pid)
        async with watching(stage.api, namespace, (RAY_JOB,), tell):
            began = time.perf_counter()
            await together(names, lambda name: stage.api.create(short_lived(namespace, name)))
            await _until(lambda: len(made) >= count)
        spent = cpu_seconds(ours.pid) - spent
    return (max(at for at, _ in made.values()) - began, spent), [found for _, found in made.values()]


async def _leads(ours: Any) -> bool:
    return bool(await ours.value("opd_operator_leader"))


async def _kuberay(stage: Stage, templates: list[Manifest], concurrency: int) -> tuple[float, float]:
    namespace = stage.namespace(f"kuberay-{concurrency}")
    made: dict[str, float] = {}

    def tell(at: float, change: str, found: Manifest) -> None:
        made.setdefault(found["metadata"]["ownerReferences"][0]["name"], at)

    async def create(ray_job: Manifest) -> None:
        metadata = {"name": ray_job["metadata"]["name"], "namespace": namespace}
        await stage.api.create({**ray_job, "metadata": metadata, "status": {}})

    log = stage.logs / f"kuberay-{concurrency}.log"
    with kuberay(stage.kubeconfig, namespace, log, concurrency) as pid:
        async with watching(stage.api, namespace, (RAY_CLUSTER,), tell):
            await create({**templates[0], "metadata": {**templates[0]["metadata"], "name": "warm"}})
            await _until(lambda: "warm" in made)
            spent, began = cpu_seconds(pid), time.perf_counter()
            waiting = {template["metadata"]["name"]: template for template in templates}
            await together(waiting, lambda name: create(waiting[name]))
            await _until(lambda: len(made) > len(templates))
            spent = cpu_seconds(pid) - spent
    return max(made.values()) - began, spent


async def _until(true: Any) -> None:
    async with asyncio.timeout(LATE_SECONDS):
        while not true():
            await asyncio.sleep(0.05)
