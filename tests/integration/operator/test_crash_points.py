"""kill -9 after every single write of a job's life: nothing is made twice, nothing is left over, the end is the same."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import load_kube_config
from operator_api import Api
from operator_jobs import Job, document, eventually, free_port
from operator_player import Player, Script

from opd_operator.cluster import Cluster
from opd_operator.errors import Unreachable
from opd_operator.main import Operator
from opd_operator.metrics import Metrics
from opd_operator.settings import Settings

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

Manifest = dict[str, Any]
WRITES = frozenset({"create", "update", "patch", "delete"})
#: Lives that run side by side.
TOGETHER = 4


class Mortal(Cluster):
    """Dies after a given number of writes: from then on nothing reaches the API server, and no answer comes back."""

    def __init__(self, *arguments: Any, writes: int | None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._left = writes
        self.written: list[str] = []
        self.dead = asyncio.Event()

    async def _send_once(self, call: Any) -> Manifest:
        if self.dead.is_set():
            raise Unreachable("dead")
        answer = await super()._send_once(call)
        if call.verb in WRITES and call.resource.plural != "leases":
            self.written.append(f"{call.verb} {call.path}")
            if self._left is not None and len(self.written) >= self._left:
                self.dead.set()
                raise Unreachable("dead")
        return answer


async def live(
    kubeconfig: Path, namespace: str, writes: int | None
) -> tuple[Mortal, asyncio.Task[None], asyncio.Event]:
    """An operator that dies after so many writes."""
    configuration = Configuration()
    await load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
    metrics = Metrics()
    cluster = Mortal(configuration, observer=metrics, writes=writes)
    settings = Settings(
        watch_namespaces=(namespace,),
        leader_election=False,
        workers=1,
        retry_backoff_seconds=1,
        training_status_seconds=30,
        http_port=free_port(),
    )
    stop = asyncio.Event()
    return cluster, asyncio.create_task(Operator(settings, cluster, metrics).run(stop)), stop


async def bury(cluster: Mortal, task: asyncio.Task[None]) -> None:
    """No goodbye: tasks are cut where they stand."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Unreachable):
        await task
    await cluster.close()


async def one_life(control_plane: Any, api: Api, namespace: str, writes: int | None, *, lose_head: bool) -> int:
    """A job whose operator dies once; how many writes the first operator made."""
    async with Player(api, namespace, Script(hold_at_step=1 if lose_head else None)).playing() as player:
        cluster, task, stop = await live(control_plane.kubeconfig, namespace, writes)
        await api.create(document(namespace))
        job = Job(api, namespace, "math")
        helper = asyncio.create_task(_lose_head(api, namespace, player)) if lose_head else None

        async def over() -> bool:
            return cluster.dead.is_set() or await rested(job)

        await eventually(f"the end, or death after {writes} writes", over, seconds=150, state=job.status)
        made = len(cluster.written)
        if cluster.dead.is_set():
            await bury(cluster, task)
            cluster, task, stop = await live(control_plane.kubeconfig, namespace, None)
            await eventually(f"the end after death at {writes}", lambda: rested(job), seconds=150, state=job.status)
        if helper is not None:
            await helper
        stop.set()
        await task
        await cluster.close()
        await inspect(job, player, attempts=2 if lose_head else 1, point=writes)
        return made


async def _lose_head(api: Api, namespace: str, player: Player) -> None:
    async def trains() -> bool:
        return any(what == "step" for what, _ in player.log)

    await eventually("training", trains, seconds=150)
    for head in await api.list("v1", "Pod", namespace, "opd.dev/role=head,opd.dev/attempt=1"):
        await api.delete(head, grace_seconds=0)

    async def again() -> bool:
        return ("rayjob seen", "math-2") in player.log

    await eventually("the second RayJob", again, seconds=150)
    player.script.hold_at_step = None


async def rested(job: Job) -> bool:
    """Succeeded, and everything is free."""
    return await job.phase() == "Succeeded" and (await job.condition("ResourcesReleased")).get("status") == "True"


async def inspect(job: Job, player: Player, *, attempts: int, point: int | None) -> None:
    """Zero duplicates, zero orphans, same end."""
    events = [what for what, _ in player.log]
    assert events.count("rayjob seen") == attempts, point
    assert events.count("check passed") == 1, point
    assert events.count("probe passed") >= 1, point
    status = await job.status()
    assert status["attempt"] == attempts, point
    assert len(status["attempts"]) == attempts, point
    assert status["training"]["step"] == 4, point
    assert not await job.names("apps/v1", "Deployment"), point
    me = await job.manifest()
    assert me is not None
    for kind in (("v1", "ConfigMap"), ("batch/v1", "Job"), ("ray.io/v1", "RayJob"), ("v1", "Service")):
        for child in await job.children(*kind):
            owners = [owner["uid"] for owner in child["metadata"]["ownerReferences"]]
            assert owners == [me["metadata"]["uid"]], (point, child["metadata"]["name"])


@pytest.mark.parametrize("lose_head", [False, True], ids=["happy path", "retry path"])
async def test_the_end_is_the_same_whichever_write_was_the_last(
    control_plane: Any,
    api: Api,
    make_namespace: Any,
    played_node: None,
    capsys: pytest.CaptureFixture[str],
    lose_head: bool,
) -> None:
    count = await one_life(control_plane, api, make_namespace(), None, lose_head=lose_head)
    assert 15 < count < 80
    with capsys.disabled():
        print(f"\n{'retry' if lose_head else 'happy'} path: the operator is killed after each of its {count} writes")
    gate = asyncio.Semaphore(TOGETHER)

    async def point(writes: int) -> None:
        async with gate:
            await one_life(control_plane, api, make_namespace(), writes, lose_head=lose_head)

    async with asyncio.TaskGroup() as group:
        for writes in range(1, count + 1):
            group.create_task(point(writes))
