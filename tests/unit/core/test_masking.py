"""Masked, padded, −inf and NaN entries reach neither a value nor a gradient; nothing trained means 0 with a valid graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from opd_trainer import core

POISONS = (float("nan"), float("inf"), -float("inf"))
MASK = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _poisoned(x: Tensor, poison: float) -> Tensor:
    return torch.where(MASK > 0, x, poison)


def _loss(kind: str) -> Callable[..., Tensor]:
    def compute(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return core.policy_loss(kind, logprobs, old, advantages, mask, weights=advantages.abs())[0]

    return compute


def _sampled(kind: str) -> Callable[..., Tensor]:
    def compute(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return core.distillation_loss(
            core.sampled_kl(logprobs, old, kind), logprobs, advantages, mask, per_token_clip=0.5, importance_clip=2.0
        )[0]

    return compute


def _value(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return core.value_loss(logprobs, old, advantages, mask, clip=0.2)[0]


LOSSES = {
    **{kind.value: _loss(kind.value) for kind in core.PolicyLossKind},
    **{f"sampled-{kind.value}": _sampled(kind.value) for kind in core.SampledKind},
    "value": _value,
}


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("name", LOSSES)
def test_what_is_masked_reaches_no_loss(name: str, poison: float) -> None:
    tensors = [_draw(2, 3, seed=seed) for seed in range(3)]

    def run(first: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        leaf = first.clone().requires_grad_()
        loss = core.aggregate(LOSSES[name](leaf, *others, MASK), MASK, "token-mean")
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    clean = run(*tensors)
    dirty = run(*(_poisoned(tensor, poison) for tensor in tensors))
    for ours, expected in zip(dirty, clean, strict=True):
        assert torch.equal(ours, expected)
    assert bool((dirty[1][MASK == 0] == 0).all())


@pytest.mark.parametrize("mode", list(core.AggregationMode))
@pytest.mark.parametrize("name", LOSSES)
def test_nothing_trained_gives_zero_with_a_zero_gradient(name: str, mode: core.AggregationMode) -> None:
    nothing = torch.zeros_like(MASK)
    leaf = torch.full((2, 3), torch.nan, requires_grad=True)
    loss = core.aggregate(LOSSES[name](leaf, leaf.detach(), leaf.detach(), nothing), nothing, mode)
    assert loss.item() == 0
    loss.backward()
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("mode", list(core.AggregationMode))
def test_an_empty_rank_gives_zero(mode: core.AggregationMode) -> None:
    leaf = torch.zeros(0, 4, requires_grad=True)
    loss = core.aggregate(leaf * 2, torch.zeros(0, 4), mode, num_tokens=7, num_sequences=2, data_parallel_size=2)
    loss.backward()
    assert loss.item() == 0


@pytest.mark.parametrize("kind", list(core.CorrectionKind))
@pytest.mark.parametrize("level", list(core.CorrectionLevel))
def test_what_is_masked_reaches_no_correction(kind: core.CorrectionKind, level: core.CorrectionLevel) -> None:
    train, rollout = _draw(2, 3), _draw(2, 3, seed=1)
    options = {"kind": kind, "level": level, "low": 0.5, "high": 2.0, "veto": 0.01, "batch_normalize": True}
    clean = core.correction_weights(train, rollout, MASK, **options)
    for poison in POISONS:
        dirty = core.correction_weights(_poisoned(train, poison), _poisoned(rollout, poison), MASK, **options)
        assert torch.equal(dirty[0], clean[0])
        assert torch.equal(dirty[1], clean[1])
        assert all(torch.equal(dirty[2][name], value) for name, value in clean[2].items())
    nothing = core.correction_weights(train * torch.nan, rollout, torch.zeros_like(MASK), **options)
    assert float(nothing[0].abs().sum()) == 0
    assert all(float(value) == 0 for value in nothing[2].values())


def test_what_is_masked_reaches_no_advantage() -> None:
    x, values = _draw(2, 3), _draw(2, 3, seed=1)
    moments = core.masked_moments(x, MASK)
    calls: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda a, b: torch.stack(core.masked_moments(a, MASK)),
        lambda a, b: core.center(a, MASK, moments),
        lambda a, b: core.whiten(a, MASK, moments),
        lambda a, b: core.reinforce_plus_plus(a, MASK, gamma=0.9),
        lambda a, b: torch.stack(core.gae(a, b, MASK, gamma=0.9, lam=0.8)),
        lambda a, b: core.combine_advantages(
            a, b, MASK, task_weight=0.3, coefficient=0.7, discount=0.5, per_token_clip=1.0, clip=2.0
        ),
    ]
    for call in calls:
        clean = call(x, values)
        for poison in POISONS:
            assert torch.equal(call(_poisoned(x, poison), _poisoned(values, poison)), clean)


def test_nothing_trained_gives_zero_advantages() -> None:
    nothing, junk = torch.zeros_like(MASK), torch.full((2, 3), torch.nan)
    moments = core.masked_moments(junk, nothing)
    groups = torch.tensor([0, 0])
    for advantages in (
        core.center(junk, nothing, moments),
        core.whiten(junk, nothing, moments),
        core.reinforce_plus_plus(junk, nothing),
        core.reinforce_plus_plus_baseline(torch.ones(2), groups, nothing),
        core.grpo(torch.ones(2), groups, nothing),
        core.rloo(torch.ones(2), groups, nothing),
        *core.gae(junk, junk, nothing),
        core.combine_advantages(junk, junk, nothing, task_weight=1.0, coefficient=1.0),
    ):
        assert torch.equal(advantages.float(), torch.zeros(2, 3))


# --- token sets -----------------------------------------------------------------------------------------------------
ROWS, VOCABULARY, SET, HIDDEN = 4, 8, 3, 5


def _sets() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    teacher, ids = torch.log_softmax(_draw(ROWS, VOCABULARY, seed=7), -1).topk(SET)
    valid = torch.ones(ROWS, SET, dtype=torch.bool)
    valid[1, 1] = valid[2, 0] = False
    valid[3] = False
    return _draw(ROWS, VOCABULARY, seed=8), ids, teacher, valid


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("tail", list(core.TailMode))
@pytest.mark.parametrize("kind", list(core.SetKind))
def test_entries_outside_the_set_reach_nothing(kind: core.SetKind, tail: core.TailMode, poison: float) -> None:
    logits, ids, teacher, valid = _sets()
    student = torch.log_softmax(logits, -1).gather(1, ids)

    def on_logprobs(s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        leaf = s.clone().requires_grad_()
        value = core.set_divergence(leaf, t, kind, tail=tail, valid=valid)
        return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]

    def on_logits(t: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        value = core.topk_divergence(leaf, chosen, t, kind, tail=tail, valid=valid).divergence
        return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]

    dirty_student, dirty_teacher = torch.where(valid, student, poison), torch.where(valid, teacher, poison)
    anything = torch.where(valid, ids, -1)
    for clean, dirty in (
        (on_logprobs(student, teacher), on_logprobs(dirty_student, dirty_teacher)),
        (on_logits(teacher, ids), on_logits(dirty_teacher, anything)),
    ):
        for ours, expected in zip(dirty, clean, strict=True):
            assert torch.equal(ours, expected)
            assert bool(torch.isfinite(ours).all())


@pytest.mark.parametrize("kind", list(core.SetKind))
def test_minus_infinity_leaves_the_set_and_joins_the_tail(kind: core.SetKind) -> None:
    logits, ids, teacher, _ = _sets()
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[:, -1] = False
    leaf = logits.clone().requires_grad_()
    value = core.topk_divergence(leaf, ids, torch.where(valid, teacher, -torch.inf), kind).divergence
    expected = core.topk_divergence(logits, ids, teacher, kind, valid=valid).divergence
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    assert bool(torch.isfinite(torch.autograd.grad(value.sum(), leaf)[0]).all())


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "mixed"])
def test_logits_of_minus_infinity_have_no_gradient(kind: str) -> None:
    logits, ids, teacher, _ = _sets()
    padded = torch.cat([logits, torch.full((ROWS, 2), -torch.inf, dtype=torch.float64)], dim=1).requires_grad_()
    labels = ids[:, 0]
    result = core.topk_divergence(padded, ids, teacher, kind, labels=labels)
    plain = core.topk_divergence(logits, ids, teacher, kind, labels=labels)
    for ours, expected in zip(result, plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    gradient = torch.autograd.grad((result.divergence + result.sampled_logprobs).sum(), padded)[0]
    assert bool(torch.isfinite(gradient).all())
    assert bool((gradient[:, VOCABULARY:] == 0).all())


@pytest.mark.parametrize("poison", POISONS)
def test_a_broken_row_harms_no_other_row(poison: float) -> None:
    logits, ids, teacher, _ = _sets()
    hidden, weight = _draw(ROWS, HIDDEN, seed=9), _draw(VOCABULARY, HIDDEN, seed=10)
    labels = ids[:, 0]
    used = torch.tensor([True, True, False, True])

    def fused(h: Tensor, w: Tensor) -> Tensor:
        result = core.linear_topk_divergence(h, w, ids, teacher, "jsd", labels=labels, chunk_rows=2)
        return result.divergence + result.sampled_logprobs

    def plain(z: Tensor) -> Tensor:
        result = core.topk_divergence(z, ids, teacher, "jsd", labels=labels, chunk_rows=2)
        return result.divergence + result.sampled_logprobs

    def gathered(h: Tensor, w: Tensor) -> Tensor:
        return core.linear_gather_logprobs(h, w, ids, chunk_rows=2).sum(-1)

    def full(z: Tensor) -> Tensor:
        return core.full_divergence(z, _draw(ROWS, VOCABULARY, seed=11), "jsd")

    for compute, inputs in (
        (fused, (hidden, weight)),
        (gathered, (hidden, weight)),
        (plain, (logits,)),
        (full, (logits,)),
    ):

        def run(first: Tensor, *others: Tensor, compute: Callable[..., Tensor] = compute) -> list[Tensor]:
            leaves = [tensor.clone().requires_grad_() for tensor in (first, *others)]
            value = torch.where(used, compute(*leaves), 0.0)
            return [value.detach(), *torch.autograd.grad(value.sum(), leaves)]

        broken = inputs[0].clone()
        broken[2] = poison
        for ours, expected in zip(run(broken, *inputs[1:]), run(*inputs), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_a_broken_value_on_a_trained_token_is_seen() -> None:
    logits, ids, teacher, _ = _sets()
    logits[0] = torch.nan
    assert bool(core.topk_divergence(logits, ids, teacher, "forward_kl").divergence[0].isnan())
    assert bool(core.gather_logprobs(logits, ids)[0].isnan().all())
    assert bool(core.sampled_kl(torch.tensor([torch.nan]), torch.zeros(1), "k3").isnan())


def test_the_surrogate_ignores_a_sampled_token_without_a_teacher() -> None:
    logits, ids, teacher, _ = _sets()
    leaf = logits.clone().requires_grad_()
    sampled = torch.tensor([next(v for v in range(VOCABULARY) if v not in row) for row in ids.tolist()])
    value = core.student_topk_surrogate(leaf, ids, teacher, sampled, torch.full((ROWS,), -torch.inf))
    inside = core.topk_divergence(logits, ids, teacher, "reverse_kl", tail="trunc").divergence
    torch.testing.assert_close(value, inside, rtol=1e-12, atol=1e-12)
    assert bool(torch.isfinite(torch.autograd.grad(value.sum(), leaf)[0]).all())
