"""The fleet over real Ray actors: generate, update, lose an actor, go on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import ray
from opd_testing.configs import trainer_config
from opd_testing.tiny_models import write_model

from opd_trainer.errors import SampleError, TrainerError
from opd_trainer.rollout.engines import create_engine
from opd_trainer.rollout.engines.fleet import Fleet

pytestmark = pytest.mark.timeout(900)


@contextlib.asynccontextmanager
async def running(fleet: Fleet, weights: Path) -> AsyncIterator[Fleet]:
    try:
        await fleet.start(weights, 0)
        yield fleet
    finally:
        await fleet.stop()


@pytest.fixture(scope="module")
def cluster() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
async def test_an_actor_that_is_killed_is_replaced_and_no_request_is_lost(tmp_path: Path) -> None:
    first, second = write_model(tmp_path / "v0", seed=1), write_model(tmp_path / "v1", seed=2)
    config = trainer_config(tmp_path, student=str(first), lifecycle={"stallTimeoutSeconds": 600})
    async with running(create_engine(config), first) as fleet:

        async def ask(seed: int) -> int:
            ids = np.random.default_rng(seed).integers(3, 259, 5).astype(np.int32)
            result = await fleet.generate(ids, group_id=seed, max_tokens=12, top_k=2)
            assert result.topk is not None
            assert result.topk.ids.shape == (len(result.response_ids), 2)
            return result.version_spans[0].version

        assert await asyncio.gather(*(ask(seed) for seed in range(16))) == [0] * 16
        await fleet.update_weights(second, 1, abort=False)
        assert await ask(1) == 1
        fleet._slots[0].handle.kill()
        assert await asyncio.gather(*(ask(seed) for seed in range(16))) == [1] * 16
        with pytest.raises(SampleError, match="outside"):
            await fleet.generate(np.array([5, 4000], np.int32), group_id=1, max_tokens=4)


@pytest.mark.usefixtures("cluster")
async def test_accelerators_that_ray_does_not_have_are_named(tmp_path: Path) -> None:
    model = write_model(tmp_path / "v0")
    config = trainer_config(
        tmp_path,
        student=str(model),
        runtime={"acceleratorResource": "nvidia.com/gpu"},
        lifecycle={"stallTimeoutSeconds": 3},
    )
    with pytest.raises(TrainerError, match="1 GPU wanted, 0 of 0 free"):
        async with running(create_engine(config), model):
            pass
