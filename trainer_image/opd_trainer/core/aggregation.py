"""From a per-token loss to the scalar that is back-propagated.

The normaliser comes first and is global: count tokens (or sequences) over all ranks and micro-batches of the step, pass
the count here, and the sum of the micro-batch losses does not depend on how the step was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opd_trainer.core._numeric import as_float, masked, trained
from opd_trainer.core.kinds import AggregationMode

# Added to a sequence's token count before dividing, as verl's agg_loss does.
_LENGTH_GUARD = 1e-8


def aggregate(
    loss: Tensor,
    mask: Tensor,
    mode: AggregationMode | str,
    *,
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
    horizon: float | None = None,
    data_parallel_size: int = 1,
) -> Tensor:
    """Reduce a [B, T] loss to a scalar.

    token-mean Σ lm / N; token-sum Σ lm; seq-mean-token-sum Σ lm / B'; seq-mean-token-sum-norm the same divided by the
    horizon; seq-mean-token-mean Σᵢ (Σₜ lm / nᵢ) / B'. Formulas: verl `agg_loss`.

    Args:
        loss: [B, T]; masked positions may hold anything, NaN included.
        mask: [B, T], 1 = trained token.
        mode: the reduction.
        num_tokens: N over all ranks and micro-batches of the step; the local count when absent.
        num_sequences: B' likewise, sequences with at least one trained token; the local count when absent.
        horizon: divisor of seq-mean-token-sum-norm; T when absent.
        data_parallel_size: multiplies the result, because FSDP and DDP average gradients over ranks.

    Returns:
        Scalar of loss's dtype (float32 for half precision). 0 with a valid graph and zero gradient when nothing is trained.

    Raises:
        ValueError: unknown mode.
    """
    mode = AggregationMode(mode)
    keep = trained(mask)
    values = masked(as_float(loss), keep)
    lengths = keep.sum(dim=-1)
    if mode is AggregationMode.TOKEN_SUM:
        return values.sum() * data_parallel_size
    if mode is AggregationMode.TOKEN_MEAN:
        return values.sum() / _positive(num_tokens, lengths.sum(), values) * data_parallel_size
    sequences = _positive(num_sequences, (lengths > 0).sum(), values)
    per_sequence = values.sum(dim=-1)
    if mode is AggregationMode.SEQ_MEAN_TOKEN_MEAN:
        per_sequence = per_sequence / (lengths.to(values.dtype) + _LENGTH_GUARD)
    total = per_sequence.sum() / sequences * data_parallel_size
    if mode is AggregationMode.SEQ_MEAN_TOKEN_SUM_NORM:
        total = total / (loss.shape[-1] if horizon is None else horizon)
    return total


def _positive(given: float | Tensor | None, counted: Tensor, like: Tensor) -> Tensor:
    """The normaliser as a tensor; 1 instead of 0, because the numerator is 0 then as well."""
    count = torch.as_tensor(counted if given is None else given, dtype=like.dtype, device=like.device)
    return torch.where(count > 0, count, torch.ones_like(count))
