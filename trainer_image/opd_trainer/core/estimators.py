"""Estimators of KL(student‖teacher) from one sampled token per position.

Notation: s student, t teacher, y the sampled token, d = log s_y − log t_y, natural logarithms. Which estimator optimises
what depends on whether it is back-propagated or used as an advantage: see docs/what-is-optimised.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opd_trainer.core._numeric import as_float
from opd_trainer.core.kinds import SampledKind


def sampled_kl(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    kind: SampledKind | str,
    *,
    log_ratio_clamp: float | None = None,
    value_clamp: float | None = None,
    straight_through: bool = False,
) -> Tensor:
    """Per-token estimate of KL(student‖teacher), in nats.

    k1 = d, abs = |d|, k2 = d²/2, k3 = e^(−d) − 1 + d (Schulman, "Approximating KL divergence", 2020). Aliases: kl and
    reverse_kl for k1, mse for k2, low_var_kl for k3.

    Args:
        student_logprobs: log s_y, any shape; differentiable.
        teacher_logprobs: log t_y, same shape; detached here.
        kind: the estimator.
        log_ratio_clamp: clamp d to ±this before the formula; clamped entries have zero gradient.
        value_clamp: clamp the result to ±this; clamped entries have zero gradient.
        straight_through: keep the value, but give the gradient of k2 (that is d, unclamped): an unbiased gradient of
            the reverse KL under on-policy sampling for every kind.

    Returns:
        Same shape, float64 for float64 inputs, else float32. A position whose d is not finite (NaN or −inf in either
        input) keeps its non-finite value, so that a fault on a trained token is seen, but has a zero gradient, so
        that a masked one harms nothing.

    Raises:
        ValueError: unknown kind, or a clamp that is not positive.
    """
    kind = SampledKind(kind)
    for name, bound in (("log_ratio_clamp", log_ratio_clamp), ("value_clamp", value_clamp)):
        if bound is not None and not bound > 0:
            raise ValueError(f"{name} must be positive, got {bound}")
    raw = as_float(student_logprobs) - as_float(teacher_logprobs.detach())
    finite = torch.isfinite(raw)
    difference = torch.where(finite, raw, torch.zeros_like(raw))
    value = _estimate(difference, kind, log_ratio_clamp, value_clamp)
    if straight_through:
        surrogate = 0.5 * difference.square()
        value = value.detach() + surrogate - surrogate.detach()
    return torch.where(finite, value, _estimate(raw.detach(), kind, log_ratio_clamp, value_clamp))


def _estimate(d: Tensor, kind: SampledKind, log_ratio_clamp: float | None, value_clamp: float | None) -> Tensor:
    if log_ratio_clamp is not None:
        d = d.clamp(-log_ratio_clamp, log_ratio_clamp)
    if kind is SampledKind.K1:
        value = d
    elif kind is SampledKind.ABS:
        value = d.abs()
    elif kind is SampledKind.K2:
        value = 0.5 * d.square()
    else:
        # expm1 keeps the digits of nearly equal log-probabilities, where e^(−d) − 1 cancels.
        value = torch.expm1(-d) + d
    return value if value_clamp is None else value.clamp(-value_clamp, value_clamp)
