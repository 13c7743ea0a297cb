"""Whole lives on a played world: how soon the next step follows, what an idle job costs, what one job writes."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from operator_jobs import eventually
from played import Life, Player
from processes import cpu_seconds, our_operator
from stage import Stage, job, paced, percentile

Measured = dict[str, Any]
#: Nothing was written for so long: the last pass over everything is over.
REST_SECONDS = 5.0
#: Lists of everything come once in ten minutes; here so often that the idle time holds some.
RESYNC_SECONDS = 60.0


async def measure_lives(stage: Stage) -> Measured:
    """Jobs at two a second to their training, left alone there, and ended at two a second."""
    sizes, namespace = stage.sizes, stage.namespace("lives")
    names = [f"life{number:03d}" for number in range(sizes.lives)]
    log = stage.logs / "lives.log"
    with our_operator(stage.kubeconfig, namespace, log, resync_seconds=str(RESYNC_SECONDS)) as ours:
        await eventually("ready", ours.ready, seconds=60)
        async with Player(stage.api, namespace).playing() as player:
            await paced(names, lambda name: stage.api.create(job(namespace, name)))
            await player.all("trains", names, seconds=300)
            await ours.rest(REST_SECONDS)
            before, spent, passes = await ours.calls(), cpu_seconds(ours.pid), await _passes(ours)
            await asyncio.sleep(sizes.idle_seconds)
            idle, spent = await ours.calls() - before, cpu_seconds(ours.pid) - spent
            passes = await _passes(ours) - passes
            await paced(names, lambda name: _end(player.lives[name]))
            await player.all("succeeded", names, seconds=300)
            await ours.rest(REST_SECONDS)
    lives = [player.lives[name] for name in names]
    next_step, release = [life.to_next_step for life in lives], [life.to_release for life in lives]
    return {
        "next_step_p99_seconds": percentile(next_step, 0.99),
        "next_step_p50_seconds": statistics.median(next_step),
        "release_p99_seconds": percentile(release, 0.99),
        "release_p50_seconds": statistics.median(release),
        "idle_writes": idle.writes,
        "idle_reads_a_second_and_job": idle.reads / sizes.idle_seconds / len(names),
        "idle_passes_a_minute_and_job": passes / sizes.idle_seconds * 60 / len(names),
        "idle_cores": spent / sizes.idle_seconds,
        "jobs": len(names),
        "idle_seconds": sizes.idle_seconds,
    }


async def _end(life: Life) -> None:
    life.may_end.set()


async def _passes(ours: Any) -> float:
    return float(await ours.value("opd_operator_reconcile_seconds_count"))


async def measure_happy(stage: Stage) -> Measured:
    """One job with checks, two teachers, probes and a trainer that speaks every 15 s: its writes, all of them."""
    namespace = stage.namespace("happy")
    with our_operator(stage.kubeconfig, namespace, stage.logs / "happy.log") as ours:
        await eventually("ready", ours.ready, seconds=60)
        async with Player(stage.api, namespace, beat_seconds=15.0).playing() as player:
            await stage.api.create(job(namespace, "happy"))
            life = player.lives["happy"]
            await player.all("trains", ["happy"], seconds=120)
            began = time.perf_counter()
            await asyncio.sleep(stage.sizes.training_seconds)
            life.may_end.set()
            await player.all("succeeded", ["happy"], seconds=60)
            assert life.ended is not None
            trained = life.ended - began
            await ours.rest(REST_SECONDS)
        calls = await ours.calls()
    kinds = {f"{verb} {kind}": count for (verb, kind), count in sorted(calls.by_kind.items())}
    return {
        "writes_less_one_in_30_seconds": calls.writes - trained / 30,
        "writes": calls.writes,
        "reads": calls.reads,
        "training_seconds": trained,
        "by_kind": kinds,
    }
