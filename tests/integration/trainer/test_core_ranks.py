"""The core on two gloo ranks: a split vocabulary, and FSDP2 with activation checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opd_testing import core_ranks as programs
from opd_testing.learner import on_two_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_two_ranks(programs.both, tmp_path_factory.mktemp("ranks"))


def test_a_split_vocabulary_gives_every_rank_the_whole_result(ranks: list[dict[str, Any]]) -> None:
    logits, ids, _, _ = programs.vocabulary_inputs()
    scaled = logits / 0.7
    for rank in ranks:
        torch.testing.assert_close(rank["vocabulary"]["total"], scaled.logsumexp(-1), rtol=1e-12, atol=1e-12)
        expected = torch.log_softmax(scaled, -1).gather(1, ids)
        torch.testing.assert_close(rank["vocabulary"]["values"], expected, rtol=1e-12, atol=1e-12)


def test_a_split_vocabulary_gives_each_rank_the_gradient_of_its_columns(ranks: list[dict[str, Any]]) -> None:
    logits, ids, upstream, upstream_total = programs.vocabulary_inputs()
    whole = logits.requires_grad_()
    scaled = whole / 0.7
    values = torch.log_softmax(scaled, -1).gather(1, ids)
    ((values * upstream).sum() + (scaled.logsumexp(-1) * upstream_total).sum()).backward()
    gradient = torch.cat([rank["vocabulary"]["gradient"] for rank in ranks], dim=1)
    torch.testing.assert_close(gradient, whole.grad, rtol=1e-12, atol=1e-12)


def test_fsdp_with_checkpointing_gives_the_gradients_of_one_process(ranks: list[dict[str, Any]]) -> None:
    model = programs.student()
    programs.student_loss(model, slice(0, 6), 1).backward()
    for name, parameter in model.named_parameters():
        for rank in ranks:
            torch.testing.assert_close(rank["student"][name], parameter.grad, rtol=1e-9, atol=1e-12)
