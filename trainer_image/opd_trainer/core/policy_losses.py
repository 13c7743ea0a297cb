"""Per-token losses: policy gradient, value head, and back-propagated distillation.

Every loss is [B, T] and 0 where masked; metrics are detached scalars, means over the trained tokens of the call.
Masked entries may hold NaN or −inf: they are replaced before any exponential.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opd_trainer.core._numeric import compute_dtype, masked, masked_mean, trained
from opd_trainer.core.kinds import PolicyLossKind

# Bounds of log r before the exponential: verl's ±20 per token, +10 for GSPO's sequence ratio.
_LOG_RATIO_BOUND = 20.0
_SEQUENCE_LOG_RATIO_BOUND = 10.0

Metrics = dict[str, Tensor]


def policy_loss(
    kind: PolicyLossKind | str,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 3.0,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Policy-gradient surrogate per token, r = exp(log s − log s_old).

    vanilla: PPO with dual clip, max(−Ar, −A clip(r)), for A < 0 also min(·, −cA). gspo: the sequence ratio
    exp(mean log r) with the token's gradient (aggregate with seq-mean-token-mean). sapo: −A σ(τ(r − 1)) 4/τ, likewise.
    cispo: −sg(clip(r)) A log s. reinforce: −A log s. importance_sampling: −A r. Formulas: verl `core_algos`, tinker.

    Args:
        kind: the surrogate.
        logprobs: log s of the current policy [B, T]; differentiable.
        old_logprobs: log s of the policy that is the reference of the ratio; detached.
        advantages: [B, T]; detached.
        mask: [B, T].
        clip_low, clip_high: r is clipped to [1 − clip_low, 1 + clip_high].
        clip_c: the dual clip's c > 1.
        tau_pos, tau_neg: SAPO's temperatures for A > 0 and A ≤ 0.
        weights: [B, T] train/rollout correction, multiplied into the loss; detached.

    Returns:
        (loss [B, T], {clip_fraction, clip_fraction_lower, approx_kl}) with approx_kl the mean of −log r.

    Raises:
        ValueError: unknown kind.
    """
    kind = PolicyLossKind(kind)
    keep = trained(mask)
    dtype = compute_dtype(logprobs, old_logprobs)
    current = masked(logprobs.to(dtype), keep)
    old = masked(old_logprobs.detach().to(dtype), keep)
    advantage = masked(advantages.detach().to(dtype), keep)
    log_ratio = current - old
    never = torch.zeros_like(keep)
    clipped, clipped_lower = never, never
    if kind is PolicyLossKind.REINFORCE:
        loss = -advantage * current
    elif kind is PolicyLossKind.GSPO:
        ratio = _sequence_ratio(current, log_ratio, keep)
        unclipped, bounded = -advantage * ratio, -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
        loss, clipped = torch.maximum(unclipped, bounded), bounded > unclipped
    else:
        log_ratio = log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
        ratio = torch.exp(log_ratio)
        if kind is PolicyLossKind.VANILLA:
            loss, clipped, clipped_lower = _dual_clip(ratio, advantage, clip_low, clip_high, clip_c)
        elif kind is PolicyLossKind.CISPO:
            bounded = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
            loss, clipped = -bounded * advantage * current, ratio.detach() != bounded
        elif kind is PolicyLossKind.SAPO:
            tau = torch.where(advantage > 0, advantage.new_tensor(tau_pos), advantage.new_tensor(tau_neg))
            loss = -advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
        else:
            loss = -advantage * ratio
    if weights is not None:
        loss = loss * masked(weights.detach().to(dtype), keep)
    metrics = {
        "clip_fraction": masked_mean(clipped, keep),
        "clip_fraction_lower": masked_mean(clipped_lower, keep),
        "approx_kl": masked_mean(-log_ratio.detach(), keep),
    }
    return masked(loss, keep), metrics


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float
) -> tuple[Tensor, Metrics]:
    """Clipped value loss per token: ½ max((V − G)², (clip(V, V_old ± clip) − G)²); verl `compute_value_loss`.

    Args:
        values: new predictions V [B, T]; differentiable.
        old_values: predictions when the step began; detached.
        returns: G [B, T]; detached.
        mask: [B, T].
        clip: half-width of the trust interval.

    Returns:
        (loss [B, T], {clip_fraction}). The gradient is 0 where the clipped branch wins outside the interval.
    """
    keep = trained(mask)
    dtype = compute_dtype(values, old_values, returns)
    current = masked(values.to(dtype), keep)
    old = masked(old_values.detach().to(dtype), keep)
    target = masked(returns.detach().to(dtype), keep)
    free = (current - target).square()
    bounded = (torch.minimum(torch.maximum(current, old - clip), old + clip) - target).square()
    loss = 0.5 * torch.maximum(free, bounded)
    return masked(loss, keep), {"clip_fraction": masked_mean((bounded > free).detach(), keep)}


def distillation_loss(
    divergence: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    *,
    per_token_clip: float | None = None,
    importance_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Back-propagated divergence per token: min(D, τ) · sg(min(exp(log s − log s_old), ρ)).

    Relax `compute_policy_opd_loss`. Without `importance_clip` there is no weight at all.

    Args:
        divergence: D [B, T]; differentiable. Tokens above per_token_clip have zero gradient.
        logprobs, old_logprobs: log-probability of the sampled token under the current and the old policy; detached,
            used only with importance_clip.
        mask: [B, T].
        per_token_clip: τ > 0, from above only: a truncated forward KL may be negative, and clamping it at 0 would take
            the gradient of most tokens away.
        importance_clip: ρ > 1.

    Returns:
        (loss [B, T], {per_token_clip_fraction, importance_clip_fraction}).
    """
    keep = trained(mask)
    dtype = compute_dtype(divergence)
    loss = masked(divergence.to(dtype), keep)
    clipped = torch.zeros_like(keep)
    weighted = torch.zeros_like(keep)
    if per_token_clip is not None:
        clipped = loss.detach() > per_token_clip
        loss = loss.clamp_max(per_token_clip)
    if importance_clip is not None:
        log_ratio = masked(logprobs.detach().to(dtype), keep) - masked(old_logprobs.detach().to(dtype), keep)
        ratio = torch.exp(log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND))
        weighted = ratio > importance_clip
        loss = loss * ratio.clamp_max(importance_clip)
    metrics = {
        "per_token_clip_fraction": masked_mean(clipped, keep),
        "importance_clip_fraction": masked_mean(weighted, keep),
    }
    return masked(loss, keep), metrics


def _dual_clip(
    ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, clip_c: float
) -> tuple[Tensor, Tensor, Tensor]:
    unclipped = -advantage * ratio
    bounded = -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    upper = torch.maximum(unclipped, bounded)
    ceiling = -advantage * clip_c
    negative = advantage < 0
    loss = torch.where(negative, torch.minimum(ceiling, upper), upper)
    return loss, bounded > unclipped, (upper > ceiling) & negative


def _sequence_ratio(current: Tensor, log_ratio: Tensor, keep: Tensor) -> Tensor:
    """GSPO: the value is the sequence's geometric mean ratio, the gradient that of the token's log-probability."""
    length = keep.sum(dim=-1, keepdim=True).clamp_min(1).to(log_ratio.dtype)
    sequence = log_ratio.detach().sum(dim=-1, keepdim=True) / length
    return torch.exp((current - current.detach() + sequence).clamp_max(_SEQUENCE_LOG_RATIO_BOUND))
