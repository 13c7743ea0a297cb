"""Train/rollout mismatch: the rollout engine and the trainer give slightly different log-probabilities to the same token.

ρ = exp(log s_train − log s_rollout) at the level of a token, of a sequence (product) or of a sequence's geometric mean.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opd_trainer.core._numeric import compute_dtype, masked, masked_mean, trained
from opd_trainer.core.kinds import CorrectionKind, CorrectionLevel

_LOG_RATIO_BOUND = 20.0


def correction_weights(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: CorrectionKind | str,
    level: CorrectionLevel | str = "token",
    low: float | None = None,
    high: float = 2.0,
    veto: float | None = None,
    batch_normalize: bool = False,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Importance weights and the tokens to keep.

    tis: ρ clamped to [low, high] (from above only without low). icepop: ρ inside [low, high], else weight 0. mis: ρ
    inside [low, high], else the token (or the whole sequence, at the sequence levels) leaves the mask, and so the
    normaliser. Formulas: verl `rollout_corr_helper`, slime `mis.py`.

    Args:
        train_logprobs, rollout_logprobs: [B, T] log-probability of the sampled token in both engines; detached.
        mask: [B, T].
        kind, level: see above; `sequence` is exp(Σ log ρ), `geometric` is exp(mean log ρ).
        low, high: bounds of ρ, 0 < low ≤ high.
        veto: drop a whole sequence when one of its tokens has ρ below this.
        batch_normalize: divide the weights by their mean over trained tokens (token level) or over sequences with a
            trained token (other levels).

    Returns:
        (weights [B, T], 0 where masked or dropped; keep_mask [B, T] of mask's dtype; metrics). Metrics are detached
        scalars over trained tokens: ratio_mean, ratio_max, ratio_min of the raw ρ, fraction_high and fraction_low
        outside the bounds, kept_fraction, weight_mean and effective_sample_size of the weights before normalisation,
        kl = mean(log s_rollout − log s_train), k3_kl, and chi2 = mean(ρ²) − 1 of the token ratio.

    Raises:
        ValueError: unknown kind or level, or bounds that are not 0 < low ≤ high.
    """
    kind, level = CorrectionKind(kind), CorrectionLevel(level)
    if not high > 0 or (low is not None and not 0 <= low <= high):
        raise ValueError(f"bounds must satisfy 0 <= low <= high and high > 0, got low={low}, high={high}")
    keep = trained(mask)
    dtype = compute_dtype(train_logprobs, rollout_logprobs)
    log_ratio = masked(train_logprobs.detach().to(dtype) - rollout_logprobs.detach().to(dtype), keep)
    ratio = torch.exp(_at_level(log_ratio, keep, level).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND))
    above, below = ratio > high, ratio < (0.0 if low is None else low)
    kept = keep & ~_vetoed(log_ratio, keep, veto)
    weights = ratio
    if kind is CorrectionKind.TIS:
        weights = ratio.clamp(0.0 if low is None else low, high)
    elif kind is CorrectionKind.ICEPOP:
        weights = torch.where(above | below, torch.zeros_like(ratio), ratio)
    else:
        kept = kept & ~(above | below)
    weights = masked(weights, kept)
    metrics = _metrics(log_ratio, ratio, weights, keep, kept)
    if batch_normalize:
        weights = weights / _mean_weight(weights, keep, level)
    metrics["fraction_high"], metrics["fraction_low"] = masked_mean(above, keep), masked_mean(below, keep)
    return weights, kept.to(mask.dtype), metrics


def _at_level(log_ratio: Tensor, keep: Tensor, level: CorrectionLevel) -> Tensor:
    if level is CorrectionLevel.TOKEN:
        return log_ratio
    total = log_ratio.sum(dim=-1, keepdim=True)
    if level is CorrectionLevel.GEOMETRIC:
        total = total / keep.sum(dim=-1, keepdim=True).clamp_min(1).to(total.dtype)
    return total.expand_as(log_ratio)


def _vetoed(log_ratio: Tensor, keep: Tensor, veto: float | None) -> Tensor:
    if veto is None:
        return torch.zeros_like(keep)
    return ((log_ratio < math.log(veto)) & keep).any(dim=-1, keepdim=True).expand_as(keep)


def _mean_weight(weights: Tensor, keep: Tensor, level: CorrectionLevel) -> Tensor:
    """The divisor of batch normalisation; 1 when every weight is 0."""
    if level is CorrectionLevel.TOKEN:
        mean = masked_mean(weights, keep)
    else:
        mean = masked_mean(weights.amax(dim=-1), keep.any(dim=-1))
    return torch.where(mean > 0, mean, torch.ones_like(mean))


def _metrics(log_ratio: Tensor, ratio: Tensor, weights: Tensor, keep: Tensor, kept: Tensor) -> dict[str, Tensor]:
    token_ratio = torch.exp(log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND))
    any_trained = keep.any()
    zero = torch.zeros((), dtype=ratio.dtype, device=ratio.device)
    lowest = torch.where(keep, ratio, math.inf).amin() if ratio.numel() else zero
    mean, mean_square = masked_mean(weights, keep), masked_mean(weights.square(), keep)
    return {
        "ratio_mean": masked_mean(ratio, keep),
        "ratio_max": masked(ratio, keep).amax() if ratio.numel() else zero,
        "ratio_min": torch.where(any_trained, lowest, zero),
        "kept_fraction": masked_mean(kept, keep),
        "weight_mean": mean,
        "effective_sample_size": torch.where(mean_square > 0, mean.square() / mean_square.clamp_min(1e-30), zero),
        "kl": masked_mean(-log_ratio, keep),
        "k3_kl": masked_mean(torch.expm1(log_ratio) - log_ratio, keep),
        "chi2": masked_mean(token_ratio.square(), keep) - any_trained.to(ratio.dtype),
    }
