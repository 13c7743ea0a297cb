"""Divergences over a set of tokens or the whole vocabulary, and the choice of the set.

A divergence at a position depends on the prefix only. It is a loss to back-propagate, never an advantage: its expected
policy gradient is exactly zero (docs/what-is-optimised.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from opd_trainer.core._buckets import Objective, build, divergence, objective
from opd_trainer.core._numeric import compute_dtype
from opd_trainer.core.kinds import Selection, SetKind, TailMode
from opd_trainer.core.topk import gather_logprobs


def set_divergence(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    kind: SetKind | str,
    *,
    tail: TailMode | str = "tail",
    valid: Tensor | None = None,
    jsd_alpha: float = 0.5,
    forward_weight: float = 0.5,
    log_prob_floor: float | None = None,
) -> Tensor:
    """Divergence per position over a set A of K tokens, in nats.

    forward_kl Σ t(log t − log s); reverse_kl Σ s(log s − log t); jsd with m = (1 − α)s + αt is (1 − α)KL(s‖m) +
    αKL(t‖m), its ends being reverse_kl (0) and forward_kl (1); mixed w·forward + (1 − w)·reverse; low_var_kl
    Σ (t/s − 1 − log(t/s)). tail adds one bucket with the mass outside A (a true KL, at most the full one); norm divides
    by the mass on A (blind to what lies outside); trunc takes the values as they are (not a KL: negative values, and a
    gradient at s = t).

    Args:
        student_logprobs: log s on A, normalised over the whole vocabulary, [..., K]; differentiable.
        teacher_logprobs: log t on A, [..., K]; detached.
        kind, tail: see above.
        valid: [..., K] bool, entries that belong to the set; entries that are not finite never do. What leaves the set
            joins the tail.
        jsd_alpha: α in [0, 1].
        forward_weight: w of `mixed`, in [0, 1].
        log_prob_floor: negative; log-probabilities of set entries are raised to it on both sides. A raised student entry
            has no gradient; the teacher's weight is the raised one. The tail keeps the mass of the original values.

    Returns:
        [...], float64 for float64 inputs, else float32. From log-probabilities alone a tail mass is known to about one
        rounding of 1; `topk_divergence` has the exact one.

    Raises:
        ValueError: unknown kind or tail, or a parameter out of range.
    """
    what = objective(kind, tail, jsd_alpha, forward_weight, log_prob_floor)
    dtype = compute_dtype(student_logprobs, teacher_logprobs)
    student, teacher = student_logprobs.to(dtype), teacher_logprobs.detach().to(dtype)
    counted = torch.isfinite(student) & torch.isfinite(teacher)
    if valid is not None:
        counted = counted & valid.bool()
    return divergence(build(student, teacher, counted, what), what)


def full_divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    kind: SetKind | str,
    *,
    jsd_alpha: float = 0.5,
    forward_weight: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    """Divergence per position over the whole vocabulary, in nats; kinds as in `set_divergence` except low_var_kl.

    Args:
        student_logits: [..., V]; differentiable.
        teacher_logits: [..., V']; detached. Where the vocabularies differ by padding, ids from the smaller V on count
            as −inf on both sides; so does an id that is −inf or NaN on either side.
        temperature: both logits are divided by it; no τ² factor.

    Returns:
        [...]; float64 for float64 inputs, else float32.

    Raises:
        ValueError: low_var_kl (it is an estimator for a set), unknown kind, or a parameter out of range.
    """
    what = objective(kind, TailMode.TRUNC, jsd_alpha, forward_weight, None)
    if what.kind is SetKind.LOW_VAR_KL:
        raise ValueError("low_var_kl is not a divergence of distributions: write forward_kl, reverse_kl, jsd or mixed")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    shared = min(student_logits.shape[-1], teacher_logits.shape[-1])
    dtype = compute_dtype(student_logits, teacher_logits)
    student = student_logits[..., :shared].to(dtype) / temperature
    teacher = teacher_logits[..., :shared].detach().to(dtype) / temperature
    return _normalised_divergence(student, teacher, what)


def _normalised_divergence(student: Tensor, teacher: Tensor, what: Objective) -> Tensor:
    """Over the ids finite on both sides: renormalising there is the softmax with −inf elsewhere."""
    finite = torch.isfinite(student) & torch.isfinite(teacher)
    everything = what._replace(tail=TailMode.NORM)
    return divergence(build(student, teacher, finite, everything), everything)


def select_tokens(student_ids: Tensor, teacher_ids: Tensor, mode: Selection | str) -> tuple[Tensor, Tensor]:
    """The token set of each position from the two top-k lists.

    Args:
        student_ids: [..., Ks] int64, without repetition.
        teacher_ids: [..., Kt] int64, without repetition.
        mode: student_topk, teacher_topk, union or intersection.

    Returns:
        (ids [..., K'], valid [..., K'] bool). union and intersection keep the layout "student ids, then teacher ids",
        K' = Ks + Kt, so that companion tensors concatenate in the same order; an id that both have is valid in the
        first half only.
    """
    mode = Selection(mode)
    if mode is Selection.STUDENT_TOPK:
        return student_ids, torch.ones_like(student_ids, dtype=torch.bool)
    if mode is Selection.TEACHER_TOPK:
        return teacher_ids, torch.ones_like(teacher_ids, dtype=torch.bool)
    same = student_ids.unsqueeze(-1) == teacher_ids.unsqueeze(-2)
    shared, repeated = same.any(dim=-1), same.any(dim=-2)
    if mode is Selection.UNION:
        valid = torch.cat([torch.ones_like(shared), ~repeated], dim=-1)
    else:
        valid = torch.cat([shared, torch.zeros_like(repeated)], dim=-1)
    return torch.cat([student_ids, teacher_ids], dim=-1), valid


def mixture_logprobs(teacher_logprobs: Tensor, weights: Tensor) -> Tensor:
    """Ensemble of M teachers in probability space: log Σᵢ wᵢ tᵢ / Σ w.

    Args:
        teacher_logprobs: [M, ...]; −inf is probability 0. All teachers must report the same ids.
        weights: [M], not negative, with a positive sum.

    Returns:
        [...], detached; −inf where every teacher with a weight has −inf.

    Raises:
        ValueError: weights of the wrong length, negative, or without a positive sum.
    """
    if weights.shape != teacher_logprobs.shape[:1]:
        raise ValueError(
            f"need one weight per teacher: {tuple(weights.shape)} for {teacher_logprobs.shape[0]} teachers"
        )
    if bool((weights < 0).any()) or not bool(weights.sum() > 0):
        raise ValueError("weights must not be negative and must have a positive sum")
    dtype = compute_dtype(teacher_logprobs)
    exact = weights.detach().to(teacher_logprobs.device).double()
    shares = (exact / exact.sum()).log().to(dtype)
    shaped = shares.reshape(-1, *[1] * (teacher_logprobs.dim() - 1))
    return (teacher_logprobs.detach().to(dtype) + shaped).logsumexp(dim=0)


def student_topk_surrogate(
    student_logits: Tensor,
    student_ids: Tensor,
    teacher_logprobs_at_student_ids: Tensor,
    sampled_ids: Tensor,
    teacher_sampled_logprobs: Tensor,
) -> Tensor:
    """Reverse KL on the student's top-k plus a score-function correction outside it (NeMo-RL).

    Σ_A s(log s − log t) + 1[y ∉ A](1 − sg(log t_y − log s_y)) log s_y. Over y ~ s the expected gradient is that of the
    full reverse KL; the value is not.

    Args:
        student_logits: [N, V]; differentiable.
        student_ids: A, [N, K].
        teacher_logprobs_at_student_ids: [N, K]; detached.
        sampled_ids: y, [N].
        teacher_sampled_logprobs: log t_y, [N]; detached.

    Returns:
        [N].
    """
    both = gather_logprobs(student_logits, torch.cat([student_ids, sampled_ids.unsqueeze(-1)], dim=-1))
    return student_topk_surrogate_from_logprobs(
        both[:, :-1], student_ids, teacher_logprobs_at_student_ids, both[:, -1], sampled_ids, teacher_sampled_logprobs
    )


def student_topk_surrogate_from_logprobs(
    student_logprobs: Tensor,
    student_ids: Tensor,
    teacher_logprobs_at_student_ids: Tensor,
    student_sampled_logprobs: Tensor,
    sampled_ids: Tensor,
    teacher_sampled_logprobs: Tensor,
) -> Tensor:
    """`student_topk_surrogate` on gathered log-probabilities: what the learner calls after `linear_gather_logprobs`.

    Args:
        student_logprobs: log s on A, [N, K]; differentiable.
        student_sampled_logprobs: log s_y, [N]; differentiable.

    Returns:
        [N].
    """
    inside = set_divergence(student_logprobs, teacher_logprobs_at_student_ids, SetKind.REVERSE_KL, tail=TailMode.TRUNC)
    outside = ~(student_ids == sampled_ids.unsqueeze(-1)).any(dim=-1)
    outside = outside & torch.isfinite(student_sampled_logprobs) & torch.isfinite(teacher_sampled_logprobs)
    own = torch.where(outside, student_sampled_logprobs, torch.zeros_like(student_sampled_logprobs))
    weight = 1 - (teacher_sampled_logprobs.detach().to(own.dtype) - own.detach())
    return inside + torch.where(outside, weight, torch.zeros_like(weight)) * own
