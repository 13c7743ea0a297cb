"""The chunked functions as PyTorch operators.

Custom operators, because torch.compile then sees one opaque call: tracing the chunk loop would unroll it and keep every
buffer. Each has a closed-form backward operator. That one has a backward that refuses: a second derivative of a chunked
pass is not offered, and a silent zero would be worse.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from opd_trainer.core._buckets import Objective, build, slopes
from opd_trainer.core._buckets import divergence as bucket_divergence
from opd_trainer.core._numeric import compute_dtype
from opd_trainer.core._rows import Head, RowSlopes, row_gradients, row_stats
from opd_trainer.core.kinds import SetKind, TailMode


def _refuse(ctx: Any, *gradients: Tensor) -> NoReturn:
    raise RuntimeError(
        "the chunked top-k functions have no second derivative: gather log-probabilities with plain torch and use "
        "set_divergence where a double backward is needed"
    )


def _no_context(ctx: Any, inputs: Any, output: Any) -> None:
    return None


# --- gather ---------------------------------------------------------------------------------------------------------
def _gather(
    inputs: Tensor, weight: Tensor | None, ids: Tensor, temperature: float, chunk_rows: int | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probabilities at ids [N, K], entropy [N], shift [N])."""
    stats = row_stats(Head(inputs, weight), ids, None, temperature, chunk_rows, with_entropy=with_entropy)
    return stats.gathered, stats.entropy, stats.shift


def _gather_shapes(
    inputs: Tensor, weight: Tensor | None, ids: Tensor, temperature: float, chunk_rows: int | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(inputs)
    rows = inputs.new_empty(inputs.shape[:1], dtype=dtype)
    return inputs.new_empty(ids.shape, dtype=dtype), rows, torch.empty_like(rows)


def _gather_backward(
    inputs: Tensor,
    weight: Tensor | None,
    ids: Tensor,
    shift: Tensor,
    upstream: Tensor,
    temperature: float,
    chunk_rows: int | None,
) -> list[Tensor]:
    """[gradient of inputs] or [gradient of inputs, gradient of weight]."""
    coefficients = RowSlopes(-upstream.sum(dim=-1), ids, upstream, None)
    return _present(row_gradients(Head(inputs, weight), shift, coefficients, temperature, chunk_rows))


def _gather_backward_shapes(
    inputs: Tensor,
    weight: Tensor | None,
    ids: Tensor,
    shift: Tensor,
    upstream: Tensor,
    temperature: float,
    chunk_rows: int | None,
) -> list[Tensor]:
    return [torch.empty_like(t) for t in (inputs, weight) if t is not None]


def _gather_context(ctx: Any, inputs: Any, output: Any) -> None:
    source, weight, ids, ctx.temperature, ctx.chunk_rows, _ = inputs
    _, entropy, shift = output
    ctx.save_for_backward(source, weight, ids, shift)
    ctx.mark_non_differentiable(entropy, shift)


def _gather_gradient(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    source, weight, ids, shift = ctx.saved_tensors
    gradients = gather_backward(source, weight, ids, shift, upstream, ctx.temperature, ctx.chunk_rows)
    return gradients[0], gradients[1] if weight is not None else None, None, None, None, None


# --- divergence -----------------------------------------------------------------------------------------------------
def _topk(
    inputs: Tensor,
    weight: Tensor | None,
    ids: Tensor,
    teacher_logprobs: Tensor,
    valid: Tensor | None,
    labels: Tensor | None,
    kind: str,
    tail: str,
    jsd_alpha: float,
    forward_weight: float,
    log_prob_floor: float | None,
    temperature: float,
    chunk_rows: int | None,
) -> list[Tensor]:
    """[divergence, student mass, teacher mass, entropy, sampled log-probabilities ([N], zeros without labels), and what
    the backward needs: shift [N], a [N], c [N], slope at ids [N, K], probability at ids [N, K], valid [N, K]]."""
    what = Objective(SetKind(kind), TailMode(tail), jsd_alpha, forward_weight, log_prob_floor)
    dtype, width = compute_dtype(inputs), ids.shape[1]
    teacher = teacher_logprobs.to(dtype)
    counted = torch.isfinite(teacher) if valid is None else torch.isfinite(teacher) & valid
    # Ids of entries that do not count may be anything (−1 in padded batches).
    safe = torch.where(counted, ids, torch.zeros_like(ids))
    wanted = safe if labels is None else torch.cat([safe, labels.clamp_min(0).unsqueeze(1)], dim=1)
    in_set = counted if labels is None else torch.cat([counted, torch.zeros_like(counted[:, :1])], dim=1)
    stats = row_stats(Head(inputs, weight), wanted, in_set, temperature, chunk_rows, with_entropy=True)
    own = stats.gathered[:, :width]
    # NaN logits must stay visible: only −inf (an id the model cannot produce) leaves the set.
    counted = counted & ~torch.isneginf(own)
    smallest = 2 * torch.log(torch.tensor(torch.finfo(dtype).eps, dtype=dtype, device=own.device))
    log_outside = stats.log_outside.clamp_min(smallest)
    buckets = build(own, teacher, counted, what, log_outside)
    slope = slopes(buckets, what)
    zero = torch.zeros_like(log_outside)
    at_tail = torch.where(stats.log_outside > smallest, slope[:, width], zero) if what.tail is TailMode.TAIL else zero
    at_ids = slope[:, :width]
    probability = torch.where(counted, own.exp(), torch.zeros_like(own))
    teacher_mass = torch.where(counted, teacher.exp(), torch.zeros_like(teacher)).sum(dim=-1)
    sampled = zero
    if labels is not None:
        sampled = torch.where(labels >= 0, stats.gathered[:, width], zero)
    a = -at_ids.sum(dim=-1) - at_tail
    c = at_tail * torch.exp(-log_outside)
    return [
        bucket_divergence(buckets, what),
        probability.sum(dim=-1),
        teacher_mass,
        stats.entropy,
        sampled,
        stats.shift,
        a,
        c,
        at_ids.contiguous(),
        probability,
        counted,
    ]


def _topk_shapes(
    inputs: Tensor,
    weight: Tensor | None,
    ids: Tensor,
    teacher_logprobs: Tensor,
    valid: Tensor | None,
    labels: Tensor | None,
    kind: str,
    tail: str,
    jsd_alpha: float,
    forward_weight: float,
    log_prob_floor: float | None,
    temperature: float,
    chunk_rows: int | None,
) -> list[Tensor]:
    dtype = compute_dtype(inputs)
    rows = [inputs.new_empty(inputs.shape[:1], dtype=dtype) for _ in range(8)]
    per_id = [inputs.new_empty(ids.shape, dtype=dtype) for _ in range(2)]
    return [*rows, *per_id, inputs.new_empty(ids.shape, dtype=torch.bool)]


def _topk_backward(
    inputs: Tensor,
    weight: Tensor | None,
    ids: Tensor,
    labels: Tensor | None,
    state: list[Tensor],
    upstream: Tensor,
    upstream_sampled: Tensor,
    temperature: float,
    chunk_rows: int | None,
) -> list[Tensor]:
    """Gradients of inputs (and weight); `state` is the tail of `topk`'s result from shift on."""
    shift, a, c, at_ids, probability, counted = state
    asked, asked_sampled = upstream != 0, upstream_sampled
    if labels is None:
        asked_sampled = torch.zeros_like(upstream_sampled)
    else:
        asked_sampled = torch.where(labels >= 0, upstream_sampled, torch.zeros_like(upstream_sampled))
    # Selected, not multiplied: a masked row's slopes may be NaN.
    zero = torch.zeros_like(a)
    a, c = torch.where(asked, upstream * a, zero), torch.where(asked, upstream * c, zero)
    own = torch.where(asked.unsqueeze(1), upstream.unsqueeze(1) * at_ids, torch.zeros_like(at_ids))
    share = torch.where(counted & (a - asked_sampled != 0).unsqueeze(1), probability, torch.zeros_like(probability))
    target = torch.where(counted, own + (a - asked_sampled).unsqueeze(1) * share, torch.zeros_like(own))
    ids = torch.where(counted, ids, torch.zeros_like(ids))
    replaced = counted
    if labels is not None:
        ids = torch.cat([ids, labels.clamp_min(0).unsqueeze(1)], dim=1)
        target = torch.cat([target, asked_sampled.unsqueeze(1)], dim=1)
        replaced = torch.cat([replaced, torch.zeros_like(replaced[:, :1])], dim=1)
    coefficients = RowSlopes(a + c - asked_sampled, ids, target, replaced)
    return _present(row_gradients(Head(inputs, weight), shift, coefficients, temperature, chunk_rows))


def _topk_backward_shapes(
    inputs: Tensor,
    weight: Tensor | None,
    ids: Tensor,
    labels: Tensor | None,
    state: list[Tensor],
    upstream: Tensor,
    upstream_sampled: Tensor,
    temperature: float,
    chunk_rows: int | None,
) -> list[Tensor]:
    return [torch.empty_like(t) for t in (inputs, weight) if t is not None]


def _topk_context(ctx: Any, inputs: Any, output: Any) -> None:
    source, weight, ids, _, _, labels, *_, ctx.temperature, ctx.chunk_rows = inputs
    ctx.save_for_backward(source, weight, ids, labels, *output[5:])


def _topk_gradient(ctx: Any, upstream: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    source, weight, ids, labels, *state = ctx.saved_tensors
    nothing = torch.zeros_like(state[0])
    divergence, sampled = (nothing if g is None else g for g in (upstream[0], upstream[4]))
    gradients = topk_backward(source, weight, ids, labels, state, divergence, sampled, ctx.temperature, ctx.chunk_rows)
    return gradients[0], gradients[1] if weight is not None else None, *[None] * 11


def _present(gradients: tuple[Tensor, Tensor | None]) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


# Defined through the low-level library and not by torch.library.custom_op, whose kernels import torch._dynamo at the first
# call: four seconds and 160 MiB in a process that compiles nothing.
_LIBRARY = torch.library.Library("opd", "FRAGMENT")


def _register(name: str, function: Any, shapes: Any, gradient: Any, context: Any) -> Any:
    qualified = f"opd::{name}"
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, shapes, lib=_LIBRARY)
    torch.library.register_autograd(qualified, gradient, setup_context=context, lib=_LIBRARY)
    return getattr(torch.ops.opd, name).default


gather = _register("gather", _gather, _gather_shapes, _gather_gradient, _gather_context)
gather_backward = _register("gather_backward", _gather_backward, _gather_backward_shapes, _refuse, _no_context)
topk = _register("topk", _topk, _topk_shapes, _topk_gradient, _topk_context)
topk_backward = _register("topk_backward", _topk_backward, _topk_backward_shapes, _refuse, _no_context)
