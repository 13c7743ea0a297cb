"""Divergences between two small sets of buckets, in log-probabilities: the value, and the closed-form slopes.

A bucket is a token of the set or the tail (all other tokens together). `divergence` is written in plain torch and is what
autograd differentiates in `set_divergence`; `slopes` is its derivative with respect to the student's bucket log-probabilities
and is what the chunked backward passes use. The tests hold the two against each other.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from opd_trainer.core._numeric import log1mexp
from opd_trainer.core.kinds import SetKind, TailMode

# Stands for log 0 in log-sum-exp over valid entries: finite, so that a row without valid entries has no NaN gradient.
_NEVER = -1e30


class Objective(NamedTuple):
    """What to compute on a set; built and validated by `objective`."""

    kind: SetKind
    tail: TailMode
    jsd_alpha: float
    forward_weight: float
    log_prob_floor: float | None


def objective(
    kind: SetKind | str,
    tail: TailMode | str,
    jsd_alpha: float,
    forward_weight: float,
    log_prob_floor: float | None,
) -> Objective:
    """Validate, and turn the ends of the JSD interval into the divergences they stand for (0 reverse, 1 forward)."""
    kind, tail = SetKind(kind), TailMode(tail)
    if not 0 <= jsd_alpha <= 1:
        raise ValueError(f"jsd_alpha must be in [0, 1], got {jsd_alpha}")
    if not 0 <= forward_weight <= 1:
        raise ValueError(f"forward_weight must be in [0, 1], got {forward_weight}")
    if log_prob_floor is not None and not log_prob_floor < 0:
        raise ValueError(f"log_prob_floor must be negative, got {log_prob_floor}")
    if kind is SetKind.JSD and jsd_alpha in (0, 1):
        kind = SetKind.REVERSE_KL if jsd_alpha == 0 else SetKind.FORWARD_KL
    return Objective(kind, tail, jsd_alpha, forward_weight, log_prob_floor)


class Buckets(NamedTuple):
    """Log-probabilities of student and teacher per bucket [..., K or K + 1] with the entries that count.

    With a tail the last bucket is the tail. Entries that do not count hold 0.
    """

    student: Tensor
    teacher: Tensor
    counted: Tensor
    student_live: Tensor  # the student's slope passes: counted, and not clamped


def log_tail(logprobs: Tensor, valid: Tensor) -> Tensor:
    """log(1 − Σ p) over valid entries [..., K] → [...], never below log ε of the dtype.

    Evaluated in float64: of float32 log-probabilities, 1 − Σ p in float32 keeps no digit of a tail under 1e-6.
    """
    smallest = torch.finfo(logprobs.dtype).eps
    log_mass = torch.where(valid, logprobs.double(), _NEVER).logsumexp(dim=-1)
    return log1mexp(log_mass.clamp_max(math.log1p(-smallest))).to(logprobs.dtype)


def build(
    student: Tensor, teacher: Tensor, valid: Tensor, what: Objective, student_log_tail: Tensor | None = None
) -> Buckets:
    """Floor, renormalise or append the tail; inputs [..., K], `valid` already excludes entries that are not finite.

    Args:
        student_log_tail: the student's exact log tail mass [...] when the caller has the logits.
    """
    student = torch.where(valid, student, torch.zeros_like(student))
    teacher = torch.where(valid, teacher, torch.zeros_like(teacher))
    live = valid
    tails: tuple[Tensor, Tensor] | None = None
    if what.tail is TailMode.TAIL:
        own = log_tail(student, valid) if student_log_tail is None else student_log_tail
        tails = own, log_tail(teacher, valid)
    if what.log_prob_floor is not None:
        live = valid & (student >= what.log_prob_floor)
        student, teacher = student.clamp_min(what.log_prob_floor), teacher.clamp_min(what.log_prob_floor)
    if what.tail is TailMode.NORM:
        student = student - torch.where(valid, student, _NEVER).logsumexp(dim=-1, keepdim=True)
        teacher = teacher - torch.where(valid, teacher, _NEVER).logsumexp(dim=-1, keepdim=True)
        # A row without valid entries: back to finite numbers that count for nothing.
        student = torch.where(valid, student, torch.zeros_like(student))
        teacher = torch.where(valid, teacher, torch.zeros_like(teacher))
    if tails is None:
        return Buckets(student, teacher, valid, live)
    ones = torch.ones_like(valid[..., :1])
    return Buckets(
        torch.cat([student, tails[0].unsqueeze(-1)], dim=-1),
        torch.cat([teacher, tails[1].unsqueeze(-1)], dim=-1),
        torch.cat([valid, ones], dim=-1),
        torch.cat([live, ones], dim=-1),
    )


def divergence(buckets: Buckets, what: Objective) -> Tensor:
    """The divergence [...], differentiable with respect to the student's side."""
    terms = _terms(buckets.student, buckets.teacher, what)
    return torch.where(buckets.counted, terms, torch.zeros_like(terms)).sum(dim=-1)


def _terms(u: Tensor, v: Tensor, what: Objective) -> Tensor:
    """Per-bucket terms, u = log s, v = log t (research note §1.8)."""
    if what.kind is SetKind.FORWARD_KL:
        return v.exp() * (v - u)
    if what.kind is SetKind.REVERSE_KL:
        return u.exp() * (u - v)
    if what.kind is SetKind.MIXED:
        return (what.forward_weight * v.exp() - (1 - what.forward_weight) * u.exp()) * (v - u)
    if what.kind is SetKind.JSD:
        alpha, m = what.jsd_alpha, _log_mixture(u, v, what.jsd_alpha)
        return (1 - alpha) * u.exp() * (u - m) + alpha * v.exp() * (v - m)
    return torch.expm1(v - u) + u - v


def slopes(buckets: Buckets, what: Objective) -> Tensor:
    """∂D/∂log s per bucket, buckets taken as independent; same shape as the buckets, 0 where nothing passes.

    The chain through the renormalisation is included, the chain through the softmax is the caller's.
    """
    u, v = buckets.student, buckets.teacher
    if what.kind is SetKind.FORWARD_KL:
        slope = -v.exp()
    elif what.kind is SetKind.REVERSE_KL:
        slope = u.exp() * (u - v + 1)
    elif what.kind is SetKind.MIXED:
        slope = (1 - what.forward_weight) * u.exp() * (u - v + 1) - what.forward_weight * v.exp()
    elif what.kind is SetKind.JSD:
        # The derivative of the mixture drops out between the two halves.
        slope = (1 - what.jsd_alpha) * u.exp() * (u - _log_mixture(u, v, what.jsd_alpha))
    else:
        slope = -torch.expm1(v - u)
    slope = torch.where(buckets.counted, slope, torch.zeros_like(slope))
    if what.tail is TailMode.NORM:
        share = torch.where(buckets.counted, u.exp(), torch.zeros_like(u))
        slope = slope - share * slope.sum(dim=-1, keepdim=True)
    return torch.where(buckets.student_live, slope, torch.zeros_like(slope))


def _log_mixture(u: Tensor, v: Tensor, alpha: float) -> Tensor:
    return torch.logaddexp(u + math.log1p(-alpha), v + math.log(alpha))
