"""The learner group over real Ray actors: one and two ranks, elastic resume, a killed rank, a place that is not there."""

from __future__ import annotations

import asyncio
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
from transformers import AutoModelForCausalLM

from opd_api.trainer_config import TrainerConfig
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError
from opd_trainer.learner.group import Deadlines, LearnerGroup

DEADLINES = Deadlines(placement=120, start=300, step=120, files=120)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "student": write_model(folder / "student", seed=1, family="qwen2"),
        "teacher": write_model(folder / "teacher", seed=2, family="qwen2", scale=2.0),
    }


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    paths = os.pathsep.join(
        [str(Path(testing.__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    )
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    yield
    ray.shutdown()


def config(models: dict[str, Path], folder: Path, ranks: int) -> TrainerConfig:
    training = {
        "steps": 10, "gpus": ranks, "dtype": "fp32", "learningRate": 0.01, "maxTokensPerMicroBatch": 30,
        "checkpoint": {"everySteps": 1},
    }  # fmt: skip
    return testing.job(models["student"], folder, training=training)


async def test_two_ranks_train_like_one_and_each_resumes_the_other(models: dict[str, Path], tmp_path: Path) -> None:
    batch = testing.samples(6, teacher=models["teacher"], student=models["student"])
    one = LearnerGroup(config(models, tmp_path, 1), total_steps=10, deadlines=DEADLINES)
    await one.start(None)
    try:
        first = await one.step(batch, 0)
        await one.save(tmp_path / "one")
        second = await one.step(batch, 1)
        await one.export(tmp_path / "export-one")
    finally:
        await one.stop()

    two = LearnerGroup(config(models, tmp_path, 2), total_steps=10, deadlines=DEADLINES)
    await two.start(None)
    try:
        both = await two.step(batch, 0)
        assert both.metrics["opd_reverse_kl"] == pytest.approx(first.metrics["opd_reverse_kl"], abs=1e-5)
        assert both.metrics["grad_norm"] == pytest.approx(first.metrics["grad_norm"], rel=1e-4)
        assert both.metrics["tokens"] == first.metrics["tokens"]
        assert set(both.old_logprobs) == {sample.sample_id for sample in batch}
        for sample, values in both.old_logprobs.items():
            np.testing.assert_allclose(values, first.old_logprobs[sample], atol=1e-5)
        await two.save(tmp_path / "two")
    finally:
        await two.stop()

    resumed = LearnerGroup(config(models, tmp_path, 2), total_steps=10, deadlines=DEADLINES)
    await resumed.start(tmp_path / "one")
    try:
        again = await resumed.step(batch, 1)
        assert again.metrics["opd_reverse_kl"] == pytest.approx(second.metrics["opd_reverse_kl"], abs=1e-5)
        await resumed.publish(tmp_path / "published")
    finally:
        await resumed.stop()
    published = AutoModelForCausalLM.from_pretrained(tmp_path / "published").state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "export-one").state_dict().items():
        torch.testing.assert_close(published[name], value, atol=2e-4, rtol=0)

    smaller = LearnerGroup(config(models, tmp_path, 1), total_steps=10, deadlines=DEADLINES)
    await smaller.start(tmp_path / "two")
    try:
        shrunk = await smaller.step(batch, 1)
        assert shrunk.metrics["opd_reverse_kl"] == pytest.approx(second.metrics["opd_reverse_kl"], abs=1e-4)
    finally:
        await smaller.stop()


async def test_a_killed_rank_ends_the_step_quickly_and_names_itself(models: dict[str, Path], tmp_path: Path) -> None:
    group = LearnerGroup(config(models, tmp_path, 2), total_steps=10, deadlines=DEADLINES)
    await group.start(None)
    try:
        batch = testing.samples(6)
        await group.step(batch, 0)
        os.kill(group.processes[1], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(TrainerError, match="rank 1 died") as caught:
            await group.step(batch, 1)
        assert time.monotonic() - began < 20
        assert caught.value.failure.failure_class is FailureClass.INFRASTRUCTURE
        assert caught.value.failure.reason is Reason.LEARNER_FAILED
        began = time.monotonic()
        with pytest.raises(TrainerError):
            await group.save(tmp_path / "never")
        assert time.monotonic() - began < 1
    finally:
        await group.stop()
        await group.stop()


async def test_a_rank_that_fails_brings_its_class_and_reason(models: dict[str, Path], tmp_path: Path) -> None:
    missing = config({"student": tmp_path / "nowhere"}, tmp_path, 2)
    group = LearnerGroup(missing, total_steps=10, deadlines=DEADLINES)
    with pytest.raises(TrainerError, match="nowhere") as caught:
        await group.start(None)
    assert caught.value.failure.failure_class is FailureClass.CONFIG
    assert caught.value.failure.reason is Reason.MODEL_NOT_FOUND


async def test_a_place_that_cannot_be_had_names_what_is_missing(models: dict[str, Path], tmp_path: Path) -> None:
    group = LearnerGroup(config(models, tmp_path, 5), total_steps=10, deadlines=Deadlines(placement=2))
    with pytest.raises(TrainerError, match=r"5 learner ranks need 1 CPU each.* 3 CPU are missing") as caught:
        await asyncio.wait_for(group.start(None), 30)
    assert caught.value.failure.reason is Reason.PLACEMENT_FAILED
    assert caught.value.failure.failure_class is FailureClass.INFRASTRUCTURE
