"""An API server in trouble: a fifth of all calls fails, some of them after they were carried out."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import load_kube_config
from operator_jobs import free_port
from operator_player import Player

from opd_operator.cluster import Cluster
from opd_operator.errors import ApiError, Unreachable
from opd_operator.main import Operator
from opd_operator.metrics import Metrics
from opd_operator.retrying import RetryPolicy
from opd_operator.settings import Settings

Manifest = dict[str, Any]


class Troubled(Cluster):
    """Loses calls on their way, loses answers on their way back, and meets servers that are busy or broken."""

    def __init__(self, *arguments: Any, seed: int, share: float, **options: Any) -> None:
        super().__init__(*arguments, retry=RetryPolicy(attempts=3, base_seconds=0.02, limit_seconds=0.1), **options)
        self._dice = random.Random(seed)
        self._share = share
        self.faults = 0

    async def _send_once(self, call: Any) -> Manifest:
        if self._dice.random() >= self._share:
            return await super()._send_once(call)
        self.faults += 1
        fault = self._dice.choice(["429", "500", "lost call", "lost answer"])
        if fault == "lost answer":
            await super()._send_once(call)
        if fault.startswith("lost"):
            raise Unreachable(fault)
        raise ApiError(int(fault), "InternalError", "injected")


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
async def test_a_job_ends_right_though_a_fifth_of_all_calls_fails(
    control_plane: Any, namespace: str, create_job: Any, player: Player, seed: int
) -> None:
    configuration = Configuration()
    await load_kube_config(config_file=str(control_plane.kubeconfig), client_configuration=configuration)
    metrics = Metrics()
    cluster = Troubled(configuration, observer=metrics, seed=seed, share=0.2)
    settings = Settings(
        watch_namespaces=(namespace,),
        lease_namespace=namespace,
        lease_name="troubled",
        retry_backoff_seconds=1,
        training_status_seconds=1,
        http_port=free_port(),
    )
    operator = Operator(settings, cluster, metrics)
    stop = asyncio.Event()
    running = asyncio.create_task(operator.run(stop))
    try:
        job = await create_job()
        await job.reaches("Succeeded", seconds=120)
    finally:
        stop.set()
        await running
        await cluster.close()
    assert cluster.faults > 5
    status = await job.status()
    assert status["attempt"] == 1
    assert [what for what, _ in player.log].count("rayjob seen") == 1
    assert [what for what, _ in player.log].count("check passed") == 1
    assert await job.names("ray.io/v1", "RayJob") <= {"math-1"}
