"""The learner group over real Ray actors: a step, files, a killed rank, a failing rank, a place that is not there."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from opd_testing import learner as testing
from opd_testing.tiny_models import write_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from opd_api.trainer_config import TrainerConfig
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError
from opd_trainer.learner.checkpoints import MANIFEST
from opd_trainer.learner.group import Deadlines, LearnerGroup
from opd_trainer.ray_runtime import start_ray

DEADLINES = Deadlines(placement=120, start=300, step=120, files=120)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "student": write_model(folder / "student", seed=1, family="qwen2"),
        "teacher": write_model(folder / "teacher", seed=2, family="qwen2", scale=2.0),
    }


@pytest.fixture(scope="module", autouse=True)
def _cluster(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    start_ray(config(models, tmp_path_factory.mktemp("run"), 2))
    yield
    ray.shutdown()


def config(models: dict[str, Path], folder: Path, ranks: int) -> TrainerConfig:
    training = {
        "steps": 10, "gpus": ranks, "dtype": "fp32", "learningRate": 0.01, "maxTokensPerMicroBatch": 30,
        "checkpoint": {"everySteps": 1},
    }  # fmt: skip
    return testing.job(models["student"], folder, training=training)


async def test_two_ranks_step_publish_and_save_and_a_killed_one_ends_the_next_step_quickly(
    models: dict[str, Path], tmp_path: Path
) -> None:
    batch = testing.samples(6, teacher=models["teacher"], student=models["student"])
    group = LearnerGroup(config(models, tmp_path, 2), total_steps=10, deadlines=DEADLINES)
    await group.start(None)
    try:
        result = await group.step(batch, 0)
        assert result.metrics["tokens"] == sum(float(sample.loss_mask.sum()) for sample in batch)
        assert set(result.old_logprobs) == {sample.sample_id for sample in batch}
        for sample in batch:
            kept = sample.loss_mask > 0
            np.testing.assert_allclose(
                result.old_logprobs[sample.sample_id][kept], sample.rollout_logprobs[kept], atol=1e-4
            )
        await group.publish(tmp_path / "published")
        await group.save(tmp_path / "checkpoint")
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "published").dtype == torch.float32
        assert (tmp_path / "checkpoint" / ".metadata").exists()

        os.kill(group.processes[1], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(TrainerError, match="rank 1 died") as caught:
            await group.step(batch, 1)
        assert time.monotonic() - began < 30
        assert caught.value.failure.failure_class is FailureClass.INFRASTRUCTURE
        assert caught.value.failure.reason is Reason.LEARNER_FAILED
        began = time.monotonic()
        with pytest.raises(TrainerError):
            await group.save(tmp_path / "never")
        assert time.monotonic() - began < 1
    finally:
        await group.stop()
        await group.stop()


async def test_ranks_finish_a_step_that_nobody_waits_for_and_nothing_is_saved_after_it(
    models: dict[str, Path], tmp_path: Path
) -> None:
    batch = testing.samples(6, teacher=models["teacher"], student=models["student"])
    group = LearnerGroup(config(models, tmp_path, 1), total_steps=10, deadlines=DEADLINES)
    await group.start(None)
    try:
        await group.publish(tmp_path / "before")
        step = asyncio.create_task(group.step(batch, 0))
        while not group._turn.locked():
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # the ranks have the call
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        with pytest.raises(TrainerError, match="belong to no step"):
            await group.save(tmp_path / "never")
        await group._actors[0].publish.remote(str(tmp_path / "after"))
        before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "after"))
        assert any(not torch.equal(before[name], after[name]) for name in before), "Ray does not stop a call"
    finally:
        await group.stop()


async def test_a_checkpoint_whose_weights_are_of_another_step_is_not_resumed_from(
    models: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "step-1.a1"
    batch = testing.samples(6, teacher=models["teacher"], student=models["student"])
    first = LearnerGroup(config(models, tmp_path, 1), total_steps=10, deadlines=DEADLINES)
    await first.start(None)
    try:
        for step in range(2):
            await first.step(batch, step)
        await first.save(checkpoint / "learner")
    finally:
        await first.stop()
    (checkpoint / MANIFEST).write_text(json.dumps({"step": 1}))
    second = LearnerGroup(config(models, tmp_path, 1), total_steps=10, deadlines=DEADLINES)
    with pytest.raises(TrainerError, match="of step 1, but its weights have 2 steps behind them") as caught:
        await second.start(checkpoint / "learner")
    assert caught.value.failure.failure_class is FailureClass.CONFIG


async def test_a_rank_that_fails_brings_its_class_and_reason(models: dict[str, Path], tmp_path: Path) -> None:
    missing = config({"student": tmp_path / "nowhere"}, tmp_path, 1)
    group = LearnerGroup(missing, total_steps=10, deadlines=DEADLINES)
    with pytest.raises(TrainerError, match="nowhere") as caught:
        await group.start(None)
    assert caught.value.failure.failure_class is FailureClass.CONFIG
    assert caught.value.failure.reason is Reason.MODEL_NOT_FOUND


async def test_a_place_that_cannot_be_had_names_what_is_missing(models: dict[str, Path], tmp_path: Path) -> None:
    group = LearnerGroup(config(models, tmp_path, 50), total_steps=10, deadlines=Deadlines(placement=2))
    with pytest.raises(TrainerError, match=r"50 learner ranks need 1 CPU each.* \d+ CPU are missing") as caught:
        await asyncio.wait_for(group.start(None), 30)
    assert caught.value.failure.reason is Reason.PLACEMENT_FAILED
    assert caught.value.failure.failure_class is FailureClass.INFRASTRUCTURE
