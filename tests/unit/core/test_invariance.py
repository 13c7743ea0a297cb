"""The step's gradient does not depend on how the step was cut: packing, micro-batches, ranks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import masks, quick
from torch import Tensor

from opd_trainer import core

B, T = 6, 4


def _step(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logprobs, old, advantages = (torch.randn(B, T, dtype=torch.float64, generator=generator) for _ in range(3))
    return logprobs, old, advantages


def _gradient(logprobs: Tensor, pieces: list[tuple[Tensor, Tensor, Tensor, Tensor]], **counts: float) -> Tensor:
    """Gradient at `logprobs` [B, T] of the sum of the pieces' losses; a piece is (index into B·T, old, advantages, mask)."""
    leaf = logprobs.clone().requires_grad_()
    for index, old, advantages, mask in pieces:
        own = leaf.reshape(-1)[index]
        loss, _ = core.policy_loss("vanilla", own, old, advantages, mask)
        core.aggregate(loss, mask, **counts).backward()
    return leaf.grad


@quick
@given(masks(B, T), st.permutations(range(B)), st.integers(1, B), st.sampled_from(list(core.AggregationMode)))
def test_the_micro_batch_size_changes_nothing(
    mask: Tensor, order: list[int], size: int, mode: core.AggregationMode
) -> None:
    logprobs, old, advantages = _step(0)
    positions = torch.arange(B * T).reshape(B, T)
    counts = {"num_tokens": mask.sum(), "num_sequences": (mask.sum(-1) > 0).sum(), "mode": mode}

    def piece(rows: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return positions[rows], old[rows], advantages[rows], mask[rows]

    whole = _gradient(logprobs, [piece(list(range(B)))], mode=mode)
    cut = _gradient(logprobs, [piece(order[start : start + size]) for start in range(0, B, size)], **counts)
    torch.testing.assert_close(cut, whole, rtol=1e-9, atol=1e-9)


@quick
@given(masks(B, T), st.integers(0, B), st.sampled_from(list(core.AggregationMode)))
def test_the_number_of_ranks_changes_nothing(mask: Tensor, first: int, mode: core.AggregationMode) -> None:
    logprobs, old, advantages = _step(1)
    positions = torch.arange(B * T).reshape(B, T)
    counts = {"num_tokens": mask.sum(), "num_sequences": (mask.sum(-1) > 0).sum(), "mode": mode}
    whole = _gradient(logprobs, [(positions, old, advantages, mask)], mode=mode)
    ranks = [
        _gradient(
            logprobs, [(positions[rows], old[rows], advantages[rows], mask[rows])], data_parallel_size=2, **counts
        )
        for rows in (slice(0, first), slice(first, B))
    ]
    # FSDP averages over ranks.
    torch.testing.assert_close(sum(ranks) / 2, whole, rtol=1e-9, atol=1e-9)


@quick
@given(masks(B, T))
def test_packing_changes_nothing(mask: Tensor) -> None:
    logprobs, old, advantages = _step(2)
    positions = torch.arange(B * T).reshape(B, T)
    whole = _gradient(logprobs, [(positions, old, advantages, mask)], mode="token-mean")
    kept = mask > 0
    packed = [tensor[kept].unsqueeze(0) for tensor in (positions, old, advantages, mask)]
    torch.testing.assert_close(_gradient(logprobs, [tuple(packed)], mode="token-mean"), whole, rtol=1e-9, atol=1e-9)


@quick
@given(masks(B, T), st.integers(0, B))
def test_moments_of_the_ranks_add_up_to_those_of_the_step(mask: Tensor, first: int) -> None:
    x, _, _ = _step(3)
    whole = core.masked_moments(x, mask)
    parts = [core.masked_moments(x[rows], mask[rows]) for rows in (slice(0, first), slice(first, B))]
    summed = tuple(a + b for a, b in zip(*parts, strict=True))
    torch.testing.assert_close(summed, tuple(whole), rtol=1e-9, atol=1e-9)
    for normalise in (core.center, core.whiten):
        joined = torch.cat([normalise(x[rows], mask[rows], summed) for rows in (slice(0, first), slice(first, B))])
        torch.testing.assert_close(joined, normalise(x, mask, whole), rtol=1e-9, atol=1e-9)
    trained = core.whiten(x, mask, whole)[mask > 0]
    if trained.numel() > 1:
        torch.testing.assert_close(trained.mean().item(), 0.0, rtol=0, atol=1e-9)
        torch.testing.assert_close(trained.var().item(), 1.0, rtol=0, atol=1e-6)


@quick
@given(masks(B, T), st.permutations(range(B)))
def test_the_order_of_sequences_changes_no_group_advantage(mask: Tensor, order: list[int]) -> None:
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.5, 0.25, 0.25], dtype=torch.float64)
    groups = torch.tensor([7, 7, 7, 2, 2, 9])
    for estimator in (core.grpo, core.rloo):
        whole = estimator(rewards, groups, mask)
        shuffled = estimator(rewards[order], groups[order], mask[order])
        torch.testing.assert_close(shuffled, whole[order], rtol=1e-9, atol=1e-9)


def test_teacher_and_advantages_are_detached() -> None:
    teacher = torch.zeros(2, 3, requires_grad=True)
    student = torch.full((2, 3), -1.0, requires_grad=True)
    mask = torch.ones(2, 3)
    for value in (
        core.sampled_kl(student, teacher, "k3"),
        core.set_divergence(student, teacher - 1, "jsd"),
        core.full_divergence(student, teacher, "forward_kl"),
        core.topk_divergence(student, torch.zeros(2, 1, dtype=torch.int64), teacher[:, :1] - 1, "jsd").divergence,
        core.policy_loss("vanilla", student, teacher, teacher, mask, weights=teacher)[0],
        core.distillation_loss(student * 1, student, teacher, mask, importance_clip=2.0)[0],
        core.value_loss(student, teacher, teacher, mask, clip=1.0)[0],
    ):
        value.sum().backward()
    assert teacher.grad is None
    for constant in (
        core.distillation_advantage(student, teacher, alpha=0.5),
        core.combine_advantages(student, teacher, mask, task_weight=1.0, coefficient=1.0),
        core.mixture_logprobs(teacher, torch.ones(2)),
        core.correction_weights(student, teacher, mask, kind="tis")[0],
    ):
        assert not constant.requires_grad
