"""Log-probabilities and divergences at a few ids per row, from logits or fused with the lm_head.

Rows are processed in chunks, and the backward pass is in closed form: beside the inputs and their gradients, memory is two
chunks of logits (16 MiB each on CPU, 1 GiB on CUDA, unless `chunk_rows` says otherwise). There is never a second [N, V]
buffer, and for the linear functions none at all. half-precision inputs are evaluated in float32. A second derivative is
refused with an error.

A row of NaN has a NaN value; it harms no gradient unless its value is used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from opd_trainer.core import _ops
from opd_trainer.core._buckets import Objective, objective
from opd_trainer.core.kinds import SetKind, TailMode


class TopKResult(NamedTuple):
    """Per row; `divergence` and `sampled_logprobs` are differentiable, the rest are diagnostics without gradient."""

    divergence: Tensor
    """[N], nats."""
    student_mass: Tensor
    """[N], Σ_A s."""
    teacher_mass: Tensor
    """[N], Σ_A t."""
    entropy: Tensor
    """[N], of the student over the whole vocabulary, nats."""
    sampled_logprobs: Tensor | None
    """[N], log s of the labels, 0 where the label is negative; None without labels."""


def gather_logprobs(logits: Tensor, ids: Tensor, *, temperature: float = 1.0, chunk_rows: int | None = None) -> Tensor:
    """log softmax(logits / temperature) at ids.

    Args:
        logits: [N, V]; differentiable.
        ids: [N, K] int64 in [0, V); repetitions are fine.
        temperature: positive.
        chunk_rows: rows per chunk; by bytes when absent.

    Returns:
        [N, K]; float64 for float64 logits, else float32.

    Raises:
        ValueError: shapes that do not fit, or a temperature that is not positive.
    """
    _check(logits, None, ids, temperature)
    values, _, _ = _ops.gather(logits, None, ids, temperature, chunk_rows, False)
    return values


def linear_gather_logprobs(
    hidden: Tensor, weight: Tensor, ids: Tensor, *, temperature: float = 1.0, chunk_rows: int | None = None
) -> Tensor:
    """`gather_logprobs` of hidden @ weightᵀ, [N, K], without forming the logits; gradients to hidden and weight.

    Args:
        hidden: [N, H].
        weight: [V, H], the lm_head.
        ids: [N, K].
    """
    _check(hidden, weight, ids, temperature)
    values, _, _ = _ops.gather(hidden, weight, ids, temperature, chunk_rows, False)
    return values


def linear_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: float = 1.0, chunk_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of one label per row and the entropy of the row, fused with the lm_head.

    Args:
        hidden: [N, H]; differentiable.
        weight: [V, H]; differentiable.
        labels: [N] int64; negative labels give 0.

    Returns:
        (logprobs [N], entropy [N]); the entropy has no gradient.
    """
    ids = labels.clamp_min(0).unsqueeze(1)
    _check(hidden, weight, ids, temperature)
    values, entropy, _ = _ops.gather(hidden, weight, ids, temperature, chunk_rows, True)
    own = values[:, 0]
    return torch.where(labels >= 0, own, torch.zeros_like(own)), entropy


def topk_divergence(
    logits: Tensor,
    ids: Tensor,
    teacher_logprobs: Tensor,
    kind: SetKind | str,
    *,
    tail: TailMode | str = "tail",
    labels: Tensor | None = None,
    valid: Tensor | None = None,
    jsd_alpha: float = 0.5,
    forward_weight: float = 0.5,
    log_prob_floor: float | None = None,
    temperature: float = 1.0,
    chunk_rows: int | None = None,
) -> TopKResult:
    """Divergence over a token set per row: `set_divergence` of the gathered log-probabilities, with an exact tail.

    Args:
        logits: [N, V]; differentiable.
        ids: the set A, [N, K] int64; valid entries of a row must differ.
        teacher_logprobs: log t at ids, [N, K]; detached.
        kind, tail, jsd_alpha, forward_weight, log_prob_floor: as in `set_divergence`.
        labels: sampled token [N]; adds `sampled_logprobs`. Negative labels give 0.
        valid: [N, K] bool; other entries, and those where the teacher is not finite or the student is −inf, belong to
            the tail. Their ids may be anything.
        temperature: logits are divided by it; the teacher's log-probabilities are taken as they are.
        chunk_rows: rows per chunk; by bytes when absent. The result does not depend on it.

    Raises:
        ValueError: unknown kind or tail, a parameter out of range, or shapes that do not fit.
    """
    what = objective(kind, tail, jsd_alpha, forward_weight, log_prob_floor)
    return _topk(logits, None, ids, teacher_logprobs, what, labels, valid, temperature, chunk_rows)


def linear_topk_divergence(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    teacher_logprobs: Tensor,
    kind: SetKind | str,
    *,
    tail: TailMode | str = "tail",
    labels: Tensor | None = None,
    valid: Tensor | None = None,
    jsd_alpha: float = 0.5,
    forward_weight: float = 0.5,
    log_prob_floor: float | None = None,
    temperature: float = 1.0,
    chunk_rows: int | None = None,
) -> TopKResult:
    """`topk_divergence` of hidden @ weightᵀ without forming the logits; gradients to hidden [N, H] and weight [V, H].

    One pass over the vocabulary gives divergence, masses, entropy and the sampled token's log-probability. The backward
    pass forms each chunk's logits again.
    """
    what = objective(kind, tail, jsd_alpha, forward_weight, log_prob_floor)
    return _topk(hidden, weight, ids, teacher_logprobs, what, labels, valid, temperature, chunk_rows)


def _topk(
    inputs: Tensor,
    weight: Tensor | None,
    ids: Tensor,
    teacher_logprobs: Tensor,
    what: Objective,
    labels: Tensor | None,
    valid: Tensor | None,
    temperature: float,
    chunk_rows: int | None,
) -> TopKResult:
    _check(inputs, weight, ids, temperature)
    for name, tensor, shape in (("teacher_logprobs", teacher_logprobs, ids.shape), ("valid", valid, ids.shape)):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must have the shape of ids {tuple(shape)}, got {tuple(tensor.shape)}")
    if labels is not None and labels.shape != ids.shape[:1]:
        raise ValueError(f"labels must be [{ids.shape[0]}], got {tuple(labels.shape)}")
    mask = None if valid is None else valid.bool()
    divergence, student_mass, teacher_mass, entropy, sampled, *_ = _ops.topk(
        inputs,
        weight,
        ids,
        teacher_logprobs.detach(),
        mask,
        labels,
        what.kind.value,
        what.tail.value,
        what.jsd_alpha,
        what.forward_weight,
        what.log_prob_floor,
        temperature,
        chunk_rows,
    )
    return TopKResult(
        divergence,
        student_mass.detach(),
        teacher_mass.detach(),
        entropy.detach(),
        None if labels is None else sampled,
    )


def _check(inputs: Tensor, weight: Tensor | None, ids: Tensor, temperature: float) -> None:
    if inputs.dim() != 2 or ids.dim() != 2 or inputs.shape[0] != ids.shape[0]:
        raise ValueError(f"need [N, ...] and [N, K], got {tuple(inputs.shape)} and ids {tuple(ids.shape)}")
    if weight is not None and (weight.dim() != 2 or weight.shape[1] != inputs.shape[1]):
        raise ValueError(f"weight must be [V, {inputs.shape[1]}], got {tuple(weight.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
