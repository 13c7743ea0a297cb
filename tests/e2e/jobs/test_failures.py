"""The table of failures (docs/failures.md) on a real cluster: the jobs of a group fail side by side, each in its own way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opd_failures import GROUPS
from opd_failures.live import PHASE, differences, follow, seen, wait_until_free
from opd_failures.on_cluster import CLUSTER_WIDE, ON_CLUSTER_TEST, RARE, Place, Staged, document, stand_in_config_map
from opd_failures.on_cluster_rows import ON_CLUSTER
from opd_failures.row import Failure, Step
from operator_api import Api
from operator_jobs import Job, eventually

from opd_cluster import addons
from opd_cluster.errors import ClusterError

#: A Ray cluster starts on two shared cores, behind others.
DEADLINE_SECONDS = 600.0
#: Jobs of a group that fail at the same time: Ray gives up when it has not started in 30 s, everything else needs nearly nothing.
SIDE_BY_SIDE = {"student": 2, "cluster": 2, "kuberay": 2, "trainer": 2}
MANY = 6


@pytest.fixture(scope="module")
def stage(operator: Any) -> Iterator[Any]:
    """The cluster with an operator that tries again after seconds, and with one rare accelerator."""
    if operator.layout is None:
        pytest.skip("the operator and the nodes of a cluster of yours are left alone")
    pace = ("retryBackoffSeconds=1", "capacityBackoffMinSeconds=60")
    addons.install_operator(operator.layout, *(f"operator.{item}" for item in pace))
    node = operator.get("default", "nodes", selector="opd.dev/pool=gpu")[0]["metadata"]["name"]
    path = f"/status/capacity/{RARE.replace('/', '~1')}"
    patch = [{"op": "add", "path": path, "value": "1"}]
    operator.kubectl("patch", "node", node, "--subresource=status", "--type=json", "-p", json.dumps(patch))
    yield operator
    addons.install_operator(operator.layout)


@pytest.fixture
async def api(stage: Any) -> AsyncIterator[Api]:
    async with Api.connect(stage.layout.kubeconfig) as connected:
        yield connected


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("group", [pytest.param(group, marks=pytest.mark.long) for group in ON_CLUSTER])
async def test_failures_are_told_answered_and_cleaned_up(
    stage: Any, api: Api, make_namespace: Callable[[], str], tiny_files: Path, group: str
) -> None:
    rows = [row for row in GROUPS[group] if row.id in ON_CLUSTER[group]]
    turn = asyncio.Semaphore(SIDE_BY_SIDE.get(group, MANY))
    # The fixture is nothing for two threads: every namespace is made beforehand.
    shared, *own = [await _place(stage, make_namespace) for _ in range(1 + sum(_of(row).alone for row in rows))]

    async def fail(failure: Failure) -> str:
        async with turn:
            return await _fail(failure, _of(failure), api, own.pop() if _of(failure).alone else shared)

    found = await asyncio.gather(*(fail(row) for row in rows))
    wrong = [f"{row.id}: {what}" for row, what in zip(rows, found, strict=True) if what]
    assert not wrong, "\n".join(wrong)


def _of(failure: Failure) -> Staged:
    return next(group[failure.id] for group in ON_CLUSTER.values() if failure.id in group)


async def _place(stage: Any, make_namespace: Callable[[], str]) -> Place:
    place = Place(stage, await asyncio.to_thread(make_namespace))
    await place.apply(stand_in_config_map())
    return place


async def _fail(failure: Failure, staged: Staged, api: Api, place: Place) -> str:
    """Bring the failure about; what is wrong with the operator's answer, "" when nothing is."""
    job = Job(api, place.namespace, failure.id)
    try:
        if before := staged.before(place.namespace, failure.id):
            await place.apply(*before)
        if (prepared := staged.prepared) is not None:
            await eventually("the ground is prepared", lambda: prepared(place))
        await place.apply(document(failure.id, staged))
        await _happens(failure, staged, job, place)
        await follow(failure, job, heal=lambda: None, seconds=DEADLINE_SECONDS, to_the_end=False)
        await wait_until_free(job, DEADLINE_SECONDS)
        return "; ".join(differences(failure, await seen(failure, job, "cluster", ON_CLUSTER_TEST)))
    except (AssertionError, ClusterError) as wrong:
        return str(wrong)[:2500]
    finally:
        await place.kubectl("delete", "opdjob", failure.id, "--ignore-not-found", "--wait=false")
        for name in CLUSTER_WIDE if staged.alone else ():
            await place.kubectl("delete", name.format(place.namespace), "--ignore-not-found", "--wait=false")


async def _happens(failure: Failure, staged: Staged, job: Job, place: Place) -> None:
    if staged.act is None:
        return
    await job.reaches(PHASE[failure.step], "Failed", seconds=DEADLINE_SECONDS)
    assert await job.phase() != "Failed", f"ended before anything was done to it: {await job.condition('Failed')}"
    if failure.step is Step.STUDENT:
        await eventually("the RayJob is there", lambda: job.children("ray.io/v1", "RayJob"), seconds=DEADLINE_SECONDS)
    await staged.act(job, place)
