"""Thousands of jobs that are created and deleted, a few at a time: does the operator's memory come to rest?

Each job lives until its RayJob is there, is deleted, and has its place taken when the garbage collector has removed the
RayJob: nothing piles up that is not the operator's.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from typing import Any

from operator_jobs import eventually
from processes import cpu_seconds, our_operator, resident_mib
from stage import Stage, short_lived
from watching import RAY_JOB, watching

from opd_api.vocabulary import Label

Manifest = dict[str, Any]
ALIVE = 16
SAMPLES = 200
#: Nothing of a job may take longer.
LATE_SECONDS = 120.0


class RayJobs:
    """When each job's RayJob came and went."""

    def __init__(self) -> None:
        self.made: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.gone: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def tell(self, at: float, change: str, found: Manifest) -> None:
        """From the watch."""
        name = found["metadata"]["labels"][Label.JOB.value]
        (self.gone if change == "DELETED" else self.made)[name].set()

    def forget(self, name: str) -> None:
        """A job that is gone."""
        self.made.pop(name, None)
        self.gone.pop(name, None)


async def measure_cycles(stage: Stage) -> dict[str, Any]:
    """Growth of the resident memory over the second half, in MiB a thousand cycles, and what a cycle costs."""
    namespace, count = stage.namespace("cycles"), stage.sizes.cycles
    samples: list[tuple[int, float]] = []
    seen, done = RayJobs(), 0
    numbers = iter(range(count))
    with our_operator(stage.kubeconfig, namespace, stage.logs / "cycles.log") as ours:
        await eventually("ready", ours.ready, seconds=60)

        began, spent = time.perf_counter(), cpu_seconds(ours.pid)

        async def live_and_die() -> None:
            nonlocal done
            for number in numbers:
                if time.perf_counter() - began > stage.sizes.cycle_seconds:
                    return
                name = f"cycle{number:05d}"
                async with asyncio.timeout(LATE_SECONDS):
                    created = await stage.api.create(short_lived(namespace, name))
                    await seen.made[name].wait()
                    await stage.api.delete(created)
                    await seen.gone[name].wait()
                seen.forget(name)
                done += 1
                if done % max(1, count // SAMPLES) == 0:
                    samples.append((done, resident_mib(ours.pid)))

        async with watching(stage.api, namespace, (RAY_JOB,), seen.tell), asyncio.TaskGroup() as group:
            for _ in range(ALIVE):
                group.create_task(live_and_die())
        took, spent = time.perf_counter() - began, cpu_seconds(ours.pid) - spent
        await ours.rest(5.0)
        calls, jobs_left = await ours.calls(), len(await ours.samples("opd_job_phase"))
    half = [(number, mib) for number, mib in samples if number > done / 2]
    slope = statistics.linear_regression([number for number, _ in half], [mib for _, mib in half]).slope
    return {
        "mib_in_1000_cycles": slope * 1000,
        "jobs_left": jobs_left,
        "mib_at_half": half[0][1],
        "mib_at_end": samples[-1][1],
        "mib_at_start": samples[0][1],
        "cycles": done,
        "seconds": took,
        "cycles_a_second": done / took,
        "operator_cpu_seconds_a_cycle": spent / done,
        "writes_a_cycle": calls.writes / done,
        "reads_a_cycle": calls.reads / done,
        "samples": [(number, round(mib, 2)) for number, mib in samples],
    }
