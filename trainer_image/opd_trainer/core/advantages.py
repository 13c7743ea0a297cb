"""Advantages: from task rewards, from the teacher, and their combination. Good is positive everywhere in this module.

Nothing here is differentiable: inputs are detached. Group statistics are computed in float64, because a group of equal
rewards divides its rounding error by ε.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from opd_trainer.core._numeric import as_float, compute_dtype, masked, trained


class Moments(NamedTuple):
    """Sum, sum of squares and count of the trained tokens, float64 scalars: add them up over ranks and micro-batches."""

    sum: Tensor
    sum_of_squares: Tensor
    count: Tensor


# --- moments --------------------------------------------------------------------------------------------------------
def masked_moments(x: Tensor, mask: Tensor) -> Moments:
    """Moments of x [B, T] over trained tokens.

    The caller all-reduces (adds) them: "global" means over all ranks and micro-batches of the step. float64, since
    Σx² − (Σx)²/n cancels.
    """
    values = masked(x.detach().double(), mask)
    return Moments(values.sum(), values.square().sum(), trained(mask).sum().double())


def center(x: Tensor, mask: Tensor, moments: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """x − mean on trained tokens, 0 elsewhere; [B, T]. With the step's moments this is `subtractBaseline` (NeMo-RL)."""
    total, _, count = moments
    mean = total / count.clamp_min(1)
    return masked(x.detach().double() - mean, mask).to(compute_dtype(x))


def whiten(x: Tensor, mask: Tensor, moments: tuple[Tensor, Tensor, Tensor], *, epsilon: float = 1e-8) -> Tensor:
    """(x − mean) / √(variance + ε) on trained tokens, 0 elsewhere; [B, T].

    Unbiased variance (n − 1), as in verl `masked_whiten`; with fewer than two trained tokens the result is 0.
    """
    total, squares, count = moments
    mean = total / count.clamp_min(1)
    variance = ((squares - total * mean) / (count - 1).clamp_min(1)).clamp_min(0)
    return masked((x.detach().double() - mean) * torch.rsqrt(variance + epsilon), mask).to(compute_dtype(x))


# --- from task rewards ----------------------------------------------------------------------------------------------
def grpo(rewards: Tensor, groups: Tensor, mask: Tensor, *, normalize_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """GRPO: (Rᵢ − μ_g) / (σ_g + ε), broadcast over trained tokens; Dr. GRPO without the division.

    Args:
        rewards: [B] scalar reward of each sequence.
        groups: [B] integer prompt group; a group must be complete in this call.
        mask: [B, T].
        normalize_std: divide by the unbiased standard deviation of the group; False is Dr. GRPO.
        epsilon: 1e-6 in verl, 1e-4 in TRL and ms-swift.

    Returns:
        [B, T]; a group of one keeps its reward (μ = 0, σ = 1), a fully masked sequence still counts in its group.
    """
    values, mean, count, index = _group_means(rewards, groups)
    alone = count == 1
    centred = values - torch.where(alone, torch.zeros_like(mean), mean)[index]
    if normalize_std:
        squares = torch.zeros_like(mean).index_add_(0, index, (values - mean[index]).square())
        deviation = (squares / (count - 1).clamp_min(1)).sqrt()
        centred = centred / (torch.where(alone, torch.ones_like(mean), deviation)[index] + epsilon)
    return _broadcast(centred, mask, rewards)


def rloo(rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """Leave-one-out: n/(n−1) · (Rᵢ − μ_g), broadcast over trained tokens [B, T]; a group of one keeps its reward.

    Ahmadian et al. 2024; verl `compute_rloo_outcome_advantage`.
    """
    values, mean, count, index = _group_means(rewards, groups)
    alone = (count == 1)[index]
    scale = (count / (count - 1).clamp_min(1))[index]
    return _broadcast(torch.where(alone, values, scale * (values - mean[index])), mask, rewards)


def reinforce_plus_plus(token_rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """REINFORCE++: discounted returns, whitened over the trained tokens of this call; [B, T]. Hu 2025; verl."""
    returns = discounted_returns(token_rewards, mask, gamma=gamma)
    return whiten(returns, mask, masked_moments(returns, mask))


def reinforce_plus_plus_baseline(rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """REINFORCE++-baseline: Rᵢ − μ_g, broadcast, whitened over the trained tokens of this call; [B, T].

    A group of one keeps its reward, as in GRPO.
    """
    centred = grpo(rewards, groups, mask, normalize_std=False)
    return whiten(centred, mask, masked_moments(centred, mask))


def discounted_returns(token_rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Gₜ = rₜ + γ Gₜ₊₁ on trained tokens, masked steps skipped; [B, T], 0 where masked."""
    keep = trained(mask)
    rewards = masked(as_float(token_rewards.detach()), keep)
    result = torch.zeros_like(rewards)
    running = rewards.new_zeros(rewards.shape[0])
    for step in reversed(range(rewards.shape[1])):
        candidate = rewards[:, step] + gamma * running
        running = torch.where(keep[:, step], candidate, running)
        result[:, step] = torch.where(keep[:, step], candidate, result[:, step])
    return result


def gae(
    token_rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: δₜ = rₜ + γ Vₜ₊₁ − Vₜ, Aₜ = δₜ + γλ Aₜ₊₁, carried over masked steps.

    Schulman et al. 2016; verl `compute_gae_advantage_return`.

    Args:
        token_rewards: [B, T].
        values: [B, T] predictions of the critic.
        mask: [B, T].

    Returns:
        (advantages, returns), both [B, T] and 0 where masked. Returns are A + V before whitening; advantages are
        whitened over the trained tokens of this call.
    """
    dtype = compute_dtype(token_rewards, values)
    keep = trained(mask)
    rewards = masked(token_rewards.detach().to(dtype), keep)
    baseline = masked(values.detach().to(dtype), keep)
    advantages = torch.zeros_like(rewards)
    running = rewards.new_zeros(rewards.shape[0])
    next_value = torch.zeros_like(running)
    for step in reversed(range(rewards.shape[1])):
        delta = rewards[:, step] + gamma * next_value - baseline[:, step]
        running = torch.where(keep[:, step], delta + gamma * lam * running, running)
        next_value = torch.where(keep[:, step], baseline[:, step], next_value)
        advantages[:, step] = running
    returns = masked(advantages + baseline, keep)
    return whiten(advantages, keep, masked_moments(advantages, keep)), returns


# --- from the teacher -----------------------------------------------------------------------------------------------
def distillation_advantage(student_logprobs: Tensor, teacher_logprobs: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Per-token advantage towards the teacher: log(α t + (1 − α) s) − log s, in nats; [B, T].

    α = 1 is log t − log s, the policy gradient of the reverse KL. α < 1 is TROPD's proximal teacher (NeMo-RL), bounded
    below by log(1 − α). The student's log-probabilities are those of the policy that is being credited (old or rollout).

    Raises:
        ValueError: α outside (0, 1].
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    dtype = compute_dtype(student_logprobs, teacher_logprobs)
    student, teacher = student_logprobs.detach().to(dtype), teacher_logprobs.detach().to(dtype)
    if alpha == 1:
        return teacher - student
    # Relative to log s, so that log s = −80 loses no digits: logaddexp(log α + log t − log s, log(1 − α)).
    gap = teacher - student
    return torch.logaddexp(gap + math.log(alpha), torch.full_like(gap, math.log1p(-alpha)))


def combine_advantages(
    task: Tensor | None,
    distillation: Tensor,
    mask: Tensor,
    *,
    task_weight: float,
    coefficient: float,
    discount: float = 0.0,
    per_token_clip: float | None = None,
    clip: float | None = None,
) -> Tensor:
    """A = task_weight · task + coefficient · x, with x the (clamped, discounted) distillation advantage; [B, T].

    Args:
        task: [B, T] task advantages, or None for pure distillation.
        distillation: [B, T] in advantage sign (log t − log s, or −D).
        mask: [B, T]; masked entries may hold anything and come out as 0.
        task_weight: weight of the task advantages (XTuner `task_adv_weight`).
        coefficient: λ > 0, in nats (slime `opd_kl_coef`, tinker `kl_penalty_coef`).
        discount: g in [0, 1): xₜ ← Σₖ gᵏ xₜ₊ₖ over trained tokens, k counting positions (tinker `kl_discount_factor`).
        per_token_clip: clamp x to ±this before discounting.
        clip: clamp the sum to ±this.
    """
    x = masked(as_float(distillation.detach()), mask)
    if per_token_clip is not None:
        x = x.clamp(-per_token_clip, per_token_clip)
    if discount:
        x = _discounted_future(x, discount)
    combined = coefficient * x
    if task is not None:
        combined = task_weight * task.detach().to(compute_dtype(task, x)) + combined
    if clip is not None:
        combined = combined.clamp(-clip, clip)
    return masked(combined, mask)


# --- parts ----------------------------------------------------------------------------------------------------------
def _discounted_future(x: Tensor, discount: float) -> Tensor:
    result = torch.empty_like(x)
    running = x.new_zeros(x.shape[0])
    for step in reversed(range(x.shape[1])):
        running = x[:, step] + discount * running
        result[:, step] = running
    return result


def _group_means(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rewards [B], mean per group [G], size per group [G], group index of each sequence [B]), float64."""
    values = rewards.detach().double()
    unique, index = torch.unique(groups, return_inverse=True)
    zeros = torch.zeros(unique.shape[0], dtype=torch.float64, device=values.device)
    count = zeros.index_add(0, index, torch.ones_like(values))
    return values, zeros.index_add(0, index, values) / count, count, index


def _broadcast(per_sequence: Tensor, mask: Tensor, rewards: Tensor) -> Tensor:
    expanded = per_sequence.to(compute_dtype(rewards)).unsqueeze(-1).expand(mask.shape)
    return masked(expanded, mask)
