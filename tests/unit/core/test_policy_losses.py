"""What the oracles do not run: options of ours, and the arithmetic of a single token."""

from __future__ import annotations

import math

import pytest
import torch

from opd_trainer import core

ONE = torch.ones(1, 1)


def _loss(kind: str, log_ratio: float, advantage: float, **options: float) -> tuple[float, float]:
    """(loss, gradient) of one token with log s_old = 0."""
    current = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(1, 1, dtype=torch.float64)
    value, _ = core.policy_loss(kind, current, old, torch.full((1, 1), advantage), ONE, **options)
    value.sum().backward()
    return value.item(), current.grad.item()


@pytest.mark.parametrize("log_ratio", [-1.0, 0.0, 2.0])
def test_importance_sampling_is_the_unclipped_ratio(log_ratio: float) -> None:
    value, gradient = _loss("importance_sampling", log_ratio, 0.7)
    assert value == pytest.approx(-0.7 * math.exp(log_ratio))
    assert gradient == pytest.approx(value)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected", "moves"),
    [
        (0.0, 1.0, -1.0, True),
        (1.0, 1.0, -1.3, False),  # above the clip with a good token: nothing left to gain
        (-1.0, 1.0, -math.exp(-1), True),
        (1.0, -1.0, math.e, True),
        (2.0, -1.0, 3.0, False),  # the dual clip
        (-1.0, -1.0, 0.9, False),
    ],
)
def test_vanilla_stops_at_its_three_clips(log_ratio: float, advantage: float, expected: float, moves: bool) -> None:
    value, gradient = _loss("vanilla", log_ratio, advantage, clip_low=0.1, clip_high=0.3, clip_c=3.0)
    assert value == pytest.approx(expected)
    assert (gradient != 0) == moves


def test_cispo_keeps_the_gradient_of_a_clipped_token() -> None:
    _, gradient = _loss("cispo", 2.0, 1.0, clip_high=0.3)
    assert gradient == pytest.approx(-1.3)


def test_sapo_takes_its_temperature_from_the_sign_of_the_advantage() -> None:
    for advantage, tau in ((0.5, 2.0), (-0.5, 3.0)):
        value, _ = _loss("sapo", 0.4, advantage, tau_pos=2.0, tau_neg=3.0)
        gate = 1 / (1 + math.exp(-tau * (math.exp(0.4) - 1)))
        assert value == pytest.approx(-advantage * gate * 4 / tau)


def test_weights_scale_loss_and_gradient_without_a_gradient_of_their_own() -> None:
    logprobs = torch.zeros(1, 2, requires_grad=True)
    weights = torch.tensor([[0.5, 2.0]], requires_grad=True)
    loss, _ = core.policy_loss(
        "reinforce", logprobs, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2), weights=weights
    )
    loss.sum().backward()
    assert logprobs.grad.tolist() == [[-0.5, -2.0]]
    assert weights.grad is None


def test_a_distillation_loss_is_clipped_from_above_only() -> None:
    divergence = torch.tensor([[-3.0, 0.2, 5.0]], requires_grad=True)
    zeros = torch.zeros(1, 3)
    loss, metrics = core.distillation_loss(divergence, zeros, zeros, torch.ones(1, 3), per_token_clip=1.0)
    loss.sum().backward()
    assert loss.tolist() == [pytest.approx([-3.0, 0.2, 1.0])]
    assert divergence.grad.tolist() == [[1.0, 1.0, 0.0]]
    assert metrics["per_token_clip_fraction"].item() == pytest.approx(1 / 3)


def test_a_distillation_loss_weighs_by_the_bounded_ratio() -> None:
    divergence = torch.ones(1, 2, requires_grad=True)
    logprobs = torch.tensor([[0.0, 2.0]], requires_grad=True)
    loss, metrics = core.distillation_loss(
        divergence, logprobs, torch.zeros(1, 2), torch.ones(1, 2), importance_clip=3.0
    )
    loss.sum().backward()
    assert loss.tolist() == [[1.0, 3.0]]
    assert logprobs.grad is None
    assert metrics["importance_clip_fraction"].item() == 0.5


def test_a_veto_drops_the_whole_sequence() -> None:
    train = torch.tensor([[0.0, -4.0, 0.0], [0.0, -0.1, 0.0]])
    weights, keep, metrics = core.correction_weights(train, torch.zeros(2, 3), torch.ones(2, 3), kind="tis", veto=0.1)
    assert keep.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert weights[0].tolist() == [0, 0, 0]
    assert metrics["kept_fraction"].item() == 0.5


def test_an_advantage_is_clipped_after_it_was_combined() -> None:
    combined = core.combine_advantages(
        torch.tensor([[1.0, -1.0]]),
        torch.tensor([[9.0, -9.0]]),
        torch.ones(1, 2),
        task_weight=0.5,
        coefficient=2.0,
        per_token_clip=3.0,
        clip=6.2,
    )
    assert combined.tolist() == [pytest.approx([6.2, -6.2])]
