"""Small numeric helpers shared by the core: dtype policy, masks, and sums that NaN cannot cross."""

from __future__ import annotations

import torch
from torch import Tensor


def as_float(x: Tensor) -> Tensor:
    """float64 stays float64; everything else is computed in float32."""
    return x if x.dtype == torch.float64 else x.float()


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype in which a function of these tensors is evaluated: float64 if any of them is, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def trained(mask: Tensor) -> Tensor:
    """Boolean view of a 0/1 mask; 1 = trained token."""
    return mask if mask.dtype == torch.bool else mask > 0


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x` where trained, 0 elsewhere.

    A selection and not a product: NaN · 0 is NaN, in the value and in the gradient.
    """
    return torch.where(trained(mask), x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over trained tokens, 0 when there are none; a scalar of x's dtype (float64 for booleans)."""
    keep = trained(mask)
    value = x.double() if x.dtype == torch.bool else x
    return masked(value, keep).sum() / keep.sum().clamp_min(1).to(value.dtype)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 − eˣ) for x < 0, accurate on both sides of −log 2 (Mächler 2012)."""
    near_zero = x > -0.6931471805599453
    small = torch.where(near_zero, x, -torch.ones_like(x))
    large = torch.where(near_zero, -torch.ones_like(x), x)
    return torch.where(near_zero, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))
