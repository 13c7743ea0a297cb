"""Two gloo ranks: the gradient of one, whatever the cut; checkpoints and exports of two ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from opd_testing import learner as testing
from opd_testing.gradients import OBJECTIVES, PLAIN, compare, gradients, write_models
from transformers import AutoModelForCausalLM

from opd_trainer.learner.packing import Layout
from opd_trainer.learner.rank import LearnerRank


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_two_ranks_give_the_gradient_of_one(models: dict[str, Path], tmp_path: Path, objective: str) -> None:
    sections = OBJECTIVES[objective]
    with testing.process_group():
        one = gradients(models, tmp_path, sections=sections)
        one_single = gradients(models, tmp_path, sections=sections, master=torch.float32)

    def rank(number: int) -> list[dict[str, torch.Tensor]]:
        common: dict[str, Any] = {"sections": sections, "rank": number, "ranks": 2, "layout": Layout.PACKED}
        return [
            gradients(models, tmp_path, max_tokens=25, **common),
            gradients(models, tmp_path, max_tokens=25, master=torch.float32, **common),
        ]

    for double, single in testing.on_two_ranks(rank, tmp_path):
        compare(double, one, 1e-9)
        compare(single, one_single, 1e-5)


def test_ranks_without_a_sequence_make_empty_passes(models: dict[str, Path], tmp_path: Path) -> None:
    def run(number: int, ranks: int) -> float:
        config = testing.job(models["student"], tmp_path, training=PLAIN)
        learner = testing.started(config)
        batch = testing.samples(1, teacher=models["teacher"], student=models["student"])
        return learner.step(testing.work(config, batch, rank=number, ranks=ranks)).metrics["grad_norm"]

    with testing.process_group():
        alone = run(0, 1)
    assert testing.on_two_ranks(lambda number: run(number, 2), tmp_path) == pytest.approx([alone, alone], rel=1e-5)


def test_ranks_with_different_free_memory_make_the_same_collectives(models: dict[str, Path], tmp_path: Path) -> None:
    """Rank 1 has enough to train (8 bytes a parameter of two ranks), but not to keep whole gradients between micro-batches."""
    batch = testing.samples(6, teacher=models["teacher"], student=models["student"])
    config = testing.job(models["student"], tmp_path, training={**PLAIN, "maxTokensPerMicroBatch": 20})
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(models["student"]).parameters())

    def run(rank: int, ranks: int) -> dict[str, float]:
        with patch("opd_trainer.learner.rank.free_memory", lambda *_: (1e12, 12.0 * parameters)[rank]):
            learner = testing.started(config)
        return learner.step(testing.work(config, batch, rank=rank, ranks=ranks)).metrics

    with testing.process_group():
        alone = run(0, 1)
    for found in testing.on_two_ranks(lambda rank: run(rank, 2), tmp_path / "ranks"):
        assert found["micro_batches"] > 1
        assert found["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)


def test_checkpoints_move_between_one_and_two_ranks_and_exports_agree(models: dict[str, Path], tmp_path: Path) -> None:
    batch = testing.samples(6, teacher=models["teacher"], student=models["student"])
    config = testing.job(models["student"], tmp_path, training={**PLAIN, "schedule": "linear", "updatesPerStep": 2})

    def step(learner: LearnerRank, rank: int, ranks: int) -> dict[str, float]:
        return learner.step(testing.work(config, batch, rank=rank, ranks=ranks)).metrics

    with testing.process_group():
        learner = testing.started(config)
        step(learner, 0, 1)
        learner.save(tmp_path / "one")
        expected = step(learner, 0, 1)
        learner.export(tmp_path / "export-one")

    def two(rank: int) -> list[dict[str, float]]:
        grown = testing.started(config, tmp_path / "one")
        resumed = step(grown, rank, 2)
        grown.export(tmp_path / "export-two")
        fresh = testing.started(config)
        step(fresh, rank, 2)
        fresh.save(tmp_path / "two")
        return [resumed]

    results = testing.on_two_ranks(two, tmp_path / "ranks")
    with testing.process_group():
        shrunk = step(testing.started(config, tmp_path / "two"), 0, 1)
    for found in (*results[0], *results[1], shrunk):
        for name in ("opd_reverse_kl", "grad_norm", "learning_rate", "tokens"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4), name
    one = AutoModelForCausalLM.from_pretrained(tmp_path / "export-one").state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "export-two").state_dict().items():
        torch.testing.assert_close(one[name], value, atol=1e-4, rtol=0)


def test_two_ranks_share_adapters_and_an_in_process_teacher(models: dict[str, Path], tmp_path: Path) -> None:
    """Adapters are those of rank 0; the sharded teacher says what the whole one says."""
    batch = [
        dataclasses.replace(sample, teacher_logprobs=None, selected=None)
        for sample in testing.samples(5, teacher=models["teacher"], student=models["student"])
    ]
    config = testing.job(
        models["student"],
        tmp_path,
        student={"model": {"source": str(models["student"]), "dtype": "fp32"}, "lora": {"rank": 4, "alpha": 8.0}},
        teachers=[{"name": "teacher", "backend": "inprocess", "model": {"source": str(models["teacher"]), "dtype": "fp32"}}],
        distillation={"signal": "loss", "tokenSelection": "full", "divergence": "jsd"},
        training={**PLAIN, "maxTokensPerMicroBatch": 20},
    )  # fmt: skip

    def run(rank: int, ranks: int) -> dict[str, float]:
        learner = testing.started(config)
        learner.step(testing.work(config, batch, rank=rank, ranks=ranks))
        return learner.step(testing.work(config, batch, rank=rank, ranks=ranks)).metrics

    with testing.process_group():
        alone = run(0, 1)
    for found in testing.on_two_ranks(lambda rank: run(rank, 2), tmp_path / "ranks"):
        for name in ("opd_loss", "grad_norm", "opd_reverse_kl"):
            assert found[name] == pytest.approx(alone[name], rel=1e-3), name
