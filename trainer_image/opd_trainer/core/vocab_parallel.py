"""Log-sum-exp and gather when the vocabulary is split over the ranks of a process group.

Each rank holds a contiguous slice of the columns, [N, V_local]; slices may differ in width. Every rank gets the whole
result. The loss is taken to be replicated: each rank back-propagates the same upstream gradient into its own slice, and no
gradient is communicated. Memory as in `topk`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from opd_trainer.core._rows import Head, RowSlopes, row_gradients, row_stats


def vocab_parallel_logsumexp(
    logits: Tensor, *, group: dist.ProcessGroup, temperature: float = 1.0, chunk_rows: int | None = None
) -> Tensor:
    """log Σ exp(z / temperature) over the whole vocabulary.

    Args:
        logits: this rank's columns [N, V_local]; differentiable (once). −inf marks padding.
        group: the ranks among which the columns are split.

    Returns:
        [N], the same on every rank; float64 for float64 logits, else float32.
    """
    nothing = torch.empty(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
    return _gather_or_sum(logits, nothing, 0, group, temperature, chunk_rows)[1]


def vocab_parallel_gather_logprobs(
    logits: Tensor,
    ids: Tensor,
    *,
    first_id: int,
    group: dist.ProcessGroup,
    temperature: float = 1.0,
    chunk_rows: int | None = None,
) -> Tensor:
    """`gather_logprobs` of columns that are split over ranks.

    Args:
        logits: this rank's columns [N, V_local]; differentiable (once).
        ids: [N, K] ids of the whole vocabulary, the same on every rank.
        first_id: id of this rank's first column.
        group: the ranks among which the columns are split.

    Returns:
        [N, K], the same on every rank.
    """
    return _gather_or_sum(logits, ids, first_id, group, temperature, chunk_rows)[0]


def _gather_or_sum(
    logits: Tensor, ids: Tensor, first_id: int, group: dist.ProcessGroup, temperature: float, chunk_rows: int | None
) -> tuple[Tensor, Tensor]:
    values, total = _VocabParallel.apply(logits, ids, first_id, group, temperature, chunk_rows)
    return values, total


def _gradient(ctx: Any, upstream: Tensor, upstream_total: Tensor) -> tuple[Tensor | None, ...]:
    logits, local, mine, shift = ctx.saved_tensors
    everywhere = upstream_total - upstream.sum(dim=-1)
    coefficients = RowSlopes(everywhere, local, torch.where(mine, upstream, 0.0), None)
    gradient, _ = row_gradients(Head(logits, None), shift, coefficients, ctx.temperature, ctx.chunk_rows)
    return gradient, None, None, None, None, None


class _VocabParallel(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """(log-probabilities at ids [N, K], log-sum-exp [N])."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor,
        first_id: int,
        group: dist.ProcessGroup,
        temperature: float,
        chunk_rows: int | None,
    ) -> tuple[Tensor, Tensor]:
        local, mine = _local_ids(ids, first_id, logits.shape[1])
        own = (
            row_stats(Head(logits, None), local, None, temperature, chunk_rows, with_entropy=False).shift / temperature
        )
        top = own.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        total = torch.exp(own - top)
        dist.all_reduce(total, group=group)
        total = total.log() + top
        at_ids = torch.where(mine, logits.gather(1, local).to(own.dtype) / temperature, 0.0)
        dist.all_reduce(at_ids, group=group)
        ctx.save_for_backward(logits, local, mine, total * temperature)
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        return at_ids - total.unsqueeze(1), total

    backward = staticmethod(once_differentiable(_gradient))


def _local_ids(ids: Tensor, first_id: int, width: int) -> tuple[Tensor, Tensor]:
    """(column of this rank, or 0; whether the id is one of this rank's columns)."""
    local = ids - first_id
    mine = (local >= 0) & (local < width)
    return torch.where(mine, local, 0), mine
