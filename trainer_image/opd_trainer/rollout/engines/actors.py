"""Engine replicas as Ray actors. The only file of the engines that knows Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from opd_api.v1alpha1 import RolloutEngine
from opd_trainer.errors import Failure
from opd_trainer.interfaces import GenerateResult
from opd_trainer.rollout.engines.replica import ReplicaLostError, ReplicaSettings, ReplicaStatus

#: CPU share of a replica that asks for no accelerator: small, because rollouts and updates take turns on a laptop.
CPU_SHARE = 0.5
#: Probes must pass while thousands of requests wait.
MAX_CONCURRENCY = 8192

Result = TypeVar("Result")


def replica_resources(*, accelerators: bool, tensor_parallel_size: int) -> dict[str, float]:
    """What one replica asks Ray for."""
    if accelerators:
        return {"GPU": float(tensor_parallel_size)}
    return {"CPU": CPU_SHARE}


def replica_class(engine: RolloutEngine) -> type[Any]:
    """The plain class behind the actor; imported late, because engines are heavy."""
    if engine is RolloutEngine.SGLANG:
        from opd_trainer.rollout.engines.sglang_engine import SglangReplica

        return SglangReplica
    from opd_trainer.rollout.engines.transformers_engine import TransformersReplica as InProcessReplica

    return InProcessReplica


class RayReplica:
    """`ReplicaHandle` over an actor."""

    def __init__(
        self,
        engine: RolloutEngine,
        settings: ReplicaSettings,
        *,
        accelerators: bool,
    ) -> None:
        resources = replica_resources(accelerators=accelerators, tensor_parallel_size=settings.tensor_parallel_size)
        options: dict[str, Any] = {
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources.get("GPU", 0),
            "max_concurrency": MAX_CONCURRENCY,
            "max_restarts": 0,
        }
        self._actor = ray.remote(replica_class(engine)).options(**options).remote(settings)

    @staticmethod
    async def _wait(reference: Awaitable[Result]) -> Result:
        try:
            return await reference
        except RayError as error:
            raise ReplicaLostError(f"{type(error).__name__}: {str(error)[:300]}") from None

    async def placed(self, seconds: float) -> None:
        """Wait until the actor runs somewhere. Raises TimeoutError or ReplicaLostError."""
        await asyncio.wait_for(self._wait(self._actor.__ray_ready__.remote()), seconds)

    async def start(self, weights: str, version: int) -> Failure | None:
        """See Replica."""
        return await self._wait(self._actor.start.remote(weights, version))

    async def generate(self, prompt_ids: NDArray[np.int32], max_tokens: int, top_k: int) -> GenerateResult | Failure:
        """See Replica."""
        return await self._wait(self._actor.generate.remote(prompt_ids, max_tokens, top_k))

    async def load(self, weights: str, version: int, abort: bool) -> Failure | None:
        """See Replica."""
        return await self._wait(self._actor.load.remote(weights, version, abort))

    async def status(self) -> ReplicaStatus:
        """See Replica."""
        return await self._wait(self._actor.status.remote())

    async def stop(self) -> None:
        """See Replica."""
        await self._wait(self._actor.stop.remote())

    def kill(self) -> None:
        """End the actor without asking."""
        with contextlib.suppress(RayError):
            ray.kill(self._actor, no_restart=True)


def missing_resources(*, accelerators: bool, tensor_parallel_size: int) -> str:
    """What is asked for and what the Ray cluster has, for an error message."""
    wanted = replica_resources(accelerators=accelerators, tensor_parallel_size=tensor_parallel_size)
    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(
        f"{amount:g} {name} wanted, {free.get(name, 0):g} of {total.get(name, 0):g} free"
        for name, amount in wanted.items()
    )
