"""Two gloo ranks: the gradient of one, whatever the cut; checkpoints and exports of two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from opd_testing import learner as testing
from opd_testing.gradients import OBJECTIVES, PLAIN, compare, gradients, write_models

from opd_trainer.learner.packing import Layout


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
