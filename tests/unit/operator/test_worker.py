"""The loop of a worker, with passes that find nothing to do."""

from __future__ import annotations

import asyncio
from typing import Any

from opd_operator.cache import Cache, JobKey
from opd_operator.execute import Execution
from opd_operator.leader import AlwaysLeading
from opd_operator.metrics import Metrics
from opd_operator.reconcile import Reconciler
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
