"""The gradient does not depend on how a step is cut: packing, layout, micro-batches, ranks, pass 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from opd_testing import learner as testing
from opd_testing.gradients import OBJECTIVES, compare, gradients, write_models
from transformers import AutoModelForCausalLM

from opd_trainer.learner.packing import Layout


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_one_rank_packed_and_in_many_micro_batches_gives_the_same_gradient(
    models: dict[str, Path], tmp_path: Path, objective: str
) -> None:
    sections = OBJECTIVES[objective]
    with testing.process_group():
        whole = gradients(models, tmp_path, sections=sections)
        single = gradients(models, tmp_path, sections=sections, max_tokens=1)
        packed = gradients(models, tmp_path, sections=sections, layout=Layout.PACKED, max_tokens=25)
        plain = gradients(
            models,
            tmp_path,
            sections={**sections, "training": {**sections.get("training", {}), "activationCheckpointing": False}},
        )
    for other in (single, packed, plain):
        compare(other, whole, 1e-9)


@pytest.mark.parametrize("objective", ["advantage", "set loss", "plain advantage"])
def test_the_update_is_the_same_with_and_without_pass_one(
    models: dict[str, Path], tmp_path: Path, objective: str
) -> None:
    sections = OBJECTIVES.get(objective, {})
    with testing.process_group():
        without = gradients(models, tmp_path, sections=sections)
        with_pass = gradients(models, tmp_path, sections=sections, always_pass_one=True)
    compare(with_pass, without, 1e-12)


def test_the_gradient_is_that_of_a_loss_written_by_hand(models: dict[str, Path], tmp_path: Path) -> None:
    """advantage + k1 with one update: mean over trained tokens of -(log t - log s) * d log s."""
    with testing.process_group():
        found = gradients(models, tmp_path, sections={})
    model = AutoModelForCausalLM.from_pretrained(models["student"], dtype=torch.float64)
    total, tokens = torch.zeros((), dtype=torch.float64), 0.0
    for sample in testing.samples(7, teacher=models["teacher"], student=models["student"]):
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64))[None]
        logits = model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
        own = torch.log_softmax(logits, -1).gather(1, ids[0, len(sample.prompt_ids) :, None])[:, 0]
        mask = torch.from_numpy(sample.loss_mask).double()
        advantage = torch.from_numpy(sample.teacher_logprobs).double() - own.detach()
        total = total - (mask * advantage * own).sum()
        tokens += float(mask.sum())
    (total / tokens).backward()
    compare(found, {f"model.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}, 1e-9)
