"""The loop of a worker, with passes that find nothing to do, and when it looks again."""

from __future__ import annotations

import asyncio
from typing import Any

from opd_world import World

from opd_operator.cache import Cache, JobKey
from opd_operator.execute import Execution
from opd_operator.leader import AlwaysLeading
from opd_operator.metrics import Metrics
from opd_operator.model import Snapshot
from opd_operator.planned import Plan
from opd_operator.reconcile import EVENTS_SECONDS, Reconciler
from opd_operator.settings import Settings
from opd_operator.workqueue import WorkQueue

JOBS = 100


class Still(Reconciler):
    """No pass reads or writes."""

    passes = 0

    async def reconcile(self, key: JobKey) -> Execution:
        self.passes += 1
        return Execution()


async def test_passes_without_work_leave_the_loop_to_others_in_between() -> None:
    """Thousands of ended jobs are looked at after a start; the calls of a job that lives must not wait for the last."""
    nothing: Any = None
    metrics = Metrics()
    queue: WorkQueue[JobKey] = WorkQueue(observer=metrics)
    worker = Still(
        cache=Cache(),
        queue=queue,
        executor=nothing,
        events=nothing,
        claims=nothing,
        recorder=nothing,
        metrics=metrics,
        settings=Settings(),
    )
    for number in range(JOBS):
        queue.add(JobKey("team", f"ended{number}"))
    election = AlwaysLeading()
    leading = asyncio.create_task(election.run())
    working = asyncio.create_task(worker.work(election))
    seen = []
    while worker.passes < JOBS:
        await asyncio.sleep(0)
        seen.append(worker.passes)
    assert len(set(seen)) > JOBS / 2, "somebody else had a turn after nearly every pass"
    for task in (working, leading):
        task.cancel()
    await asyncio.gather(working, leading, return_exceptions=True)


class OneJob:
    """The rims of a Reconciler around a world that nothing changes any more."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.delays: list[float] = []

    def snapshot(self, key: JobKey) -> Snapshot:
        return self.world.snapshot()

    async def complete(self, snapshot: Snapshot, **_: Any) -> Snapshot:
        return snapshot

    async def execute(self, job: Any, plan: Plan) -> Execution:
        assert plan.status is None, "the world was not at rest"
        return Execution()

    def add_after(self, key: JobKey, delay: float) -> None:
        self.delays.append(delay)

    async def look(self) -> float:
        """Seconds until the next look, when nothing is heard until then."""
        rim: Any = self
        reconciler = Reconciler(
            cache=rim,
            queue=rim,
            executor=rim,
            events=rim,
            claims=rim,
            recorder=rim,
            metrics=Metrics(),
            settings=Settings(),
            now=lambda: self.world.now,
        )
        await reconciler.reconcile(JobKey("team", "math"))
        return self.delays[-1]


async def test_events_that_nobody_watches_are_read_again_while_they_may_tell_what_is_waited_for() -> None:
    world = World().settle()
    job = OneJob(world)
    assert await job.look() == EVENTS_SECONDS, "a Job without a pod: its Events tell why"
    check = world.get("Job", "math-check-inputs")
    world.pod("math-check-inputs-x", check, check["spec"]["template"]["metadata"]["labels"])
    world.settle()
    assert await job.look() > EVENTS_SECONDS, "a pod that runs tells by its status"
