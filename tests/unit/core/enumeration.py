"""What each combination of signal, estimator, selection and tail optimises, by exact enumeration over a small vocabulary.

The expected gradient over y ~ student is computed token by token with the functions that the trainer calls; nothing is
sampled. A combination is then followed by gradient descent on its expected gradient, to see where it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from opd_trainer import core

STUDENT = (0.28, 0.22, 0.18, 0.10, 0.08, 0.06, 0.05, 0.03)
TEACHER = (0.09, 0.33, 0.06, 0.25, 0.04, 0.13, 0.02, 0.08)
TOP_K = 3
SELECTIONS = ("teacher_topk", "student_topk", "union", "intersection")
ALPHA = 0.2

STEPS = 70
_ZERO = 1e-12

Field = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Student logits [R, V] of R copies of the problem → (expected values [R], expected gradients [R, V]).

R is 1, or one copy per selection: the descents of all selections run side by side."""


def student_logits() -> Tensor:
    return torch.tensor(STUDENT, dtype=torch.float64).log()


def teacher_logprobs() -> Tensor:
    return torch.tensor(TEACHER, dtype=torch.float64).log()


@dataclass(frozen=True)
class Row:
    """One combination: its expected value and gradient at the example, and where descent ends."""

    signal: str
    selection: str
    estimator: str
    tail: str
    value: float
    gradient: Tensor
    end_reverse_kl: float
    end_set_mass: float | None  # of the student on the set


# --- the expected gradients -----------------------------------------------------------------------------------------
def sampled_loss(kind: str, *, straight_through: bool = False) -> Field:
    """E over y ~ s of the gradient of the estimator of y, back-propagated."""

    def field(logits: Tensor) -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        logprobs = torch.log_softmax(leaf, -1)
        values = core.sampled_kl(logprobs, teacher_logprobs(), kind, straight_through=straight_through)
        return _expected(leaf, logprobs, values)

    return field


def sampled_advantage(kind: str, *, alpha: float = 1.0) -> Field:
    """E over y ~ s of −A ∇log s_y, with A = −estimator (for k1 log t − log s, or TROPD's)."""

    def field(logits: Tensor) -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        logprobs, everywhere = torch.log_softmax(leaf, -1), torch.ones_like(logits)
        if kind == "k1":
            advantage = core.distillation_advantage(logprobs, teacher_logprobs(), alpha=alpha)
        else:
            advantage = -core.sampled_kl(logprobs, teacher_logprobs(), kind).detach()
        combined = core.combine_advantages(None, advantage, everywhere, task_weight=0.0, coefficient=1.0)
        losses, _ = core.policy_loss("reinforce", logprobs, logprobs, combined, everywhere)
        _, gradient = _expected(leaf, logprobs, losses)
        return (logprobs.detach().exp() * -advantage).sum(-1), gradient

    return field


def _expected(leaf: Tensor, logprobs: Tensor, per_token: Tensor) -> tuple[Tensor, Tensor]:
    """Expectation over y ~ s of a quantity per token and of its gradient."""
    values = (logprobs.detach().exp() * per_token).sum(-1)
    return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]


def token_sets(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(ids, valid), both [selections, 2K]: the set of each selection for the student in its row.

    All share the layout of a union, student ids then teacher ids.
    """
    student_ids = logits.topk(TOP_K).indices
    teacher_ids = teacher_logprobs().topk(TOP_K).indices.expand_as(student_ids)
    ids, union = core.select_tokens(student_ids, teacher_ids, "union")
    _, intersection = core.select_tokens(student_ids, teacher_ids, "intersection")
    first = torch.arange(2 * TOP_K) < TOP_K
    by_name = {"student_topk": first, "teacher_topk": ~first, "union": union, "intersection": intersection}
    return ids, torch.stack([by_name[name].expand_as(union)[row] for row, name in enumerate(SELECTIONS)])


def set_loss(kind: str, tail: str) -> Field:
    """The gradient of the divergence on each selection's set, back-propagated; nothing is random."""

    def field(logits: Tensor) -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        ids, valid = token_sets(logits)
        values = core.topk_divergence(leaf, ids, teacher_logprobs()[ids], kind, tail=tail, valid=valid).divergence
        return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]

    return field


def surrogate_loss() -> Field:
    """student_topk with tail `sampled`: the set's reverse KL plus the score-function correction, expected over y."""

    def field(logits: Tensor) -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        size = logits.shape[1]
        ids = logits.topk(TOP_K).indices.expand(size, -1)
        values = core.student_topk_surrogate(
            leaf.expand(size, -1), ids, teacher_logprobs()[ids], torch.arange(size), teacher_logprobs()
        )
        return _expected(leaf, torch.log_softmax(logits, -1), values)

    return field


def full_loss(kind: str) -> Field:
    """A divergence over the whole vocabulary, back-propagated."""

    def field(logits: Tensor) -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        values = core.full_divergence(leaf, teacher_logprobs().expand_as(leaf), kind)
        return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]

    return field


def divergence_as_advantage(loss: Field) -> Field:
    """E over y ~ s of D ∇log s_y, D being the same for every y."""

    def field(logits: Tensor) -> tuple[Tensor, Tensor]:
        values, _ = loss(logits)
        leaf = logits.clone().requires_grad_()
        logprobs = torch.log_softmax(leaf, -1)
        everywhere = torch.ones_like(logits)
        advantages = core.combine_advantages(
            None, -values.unsqueeze(1).expand_as(logits), everywhere, task_weight=0.0, coefficient=1.0
        )
        losses, _ = core.policy_loss("reinforce", logprobs, logprobs, advantages, everywhere)
        return values, _expected(leaf, logprobs, losses)[1]

    return field


# --- references -----------------------------------------------------------------------------------------------------
@cache
def references() -> dict[str, Tensor]:
    """Gradients that a combination may turn out to have, at the example, by name; none of them from the core."""
    s = torch.softmax(student_logits(), -1)
    log_ratio = s.log() - teacher_logprobs()
    t = teacher_logprobs().exp()

    def through_softmax(slope: Tensor) -> Tensor:
        """∂/∂logits from ∂/∂s."""
        return s * (slope - (s * slope).sum())

    log_ratio_to_mixture = s.log() - (ALPHA * t + (1 - ALPHA) * s).log()
    half = s.log() - (0.5 * (s + t)).log()
    reverse, forward = through_softmax(log_ratio), s - t
    return {
        "0": torch.zeros_like(s),
        "∇KL(s‖t)": reverse,
        "∇KL(t‖s)": forward,
        "∇KL(s‖t) − ∇KL(t‖s)": reverse - forward,
        "½∇KL(s‖t) + ½∇KL(t‖s)": 0.5 * (reverse + forward),
        "∇JSD(s, t)": through_softmax(0.5 * half),
        "2∇TV(s, t)": through_softmax(torch.sign(s - t)),
        f"∇KL(s‖sg[{ALPHA:g}t + {1 - ALPHA:g}s])": through_softmax(log_ratio_to_mixture),
    }


def named(gradient: Tensor) -> str | None:
    """The reference that a gradient equals, or None."""
    for name, reference in references().items():
        if torch.allclose(gradient, reference, rtol=0, atol=_ZERO):
            return name
    return None


def cosine(gradient: Tensor, name: str) -> float | None:
    """Cosine with a reference gradient; None for a zero gradient."""
    if float(gradient.abs().max()) < _ZERO:
        return None
    return float(torch.cosine_similarity(gradient, references()[name], dim=0))


def evaluate(signal: str, estimator: str, tail: str, field: Field, selections: tuple[str, ...]) -> list[Row]:
    """The rows of a combination, one per selection (which must be as many as the field has copies)."""
    start = student_logits().expand(len(selections), -1)
    values, gradients = field(start)
    end = _descend(field, start)
    reverse = core.full_divergence(end, teacher_logprobs().expand_as(end), "reverse_kl")
    masses: list[float | None] = [None] * len(selections)
    if selections == SELECTIONS:
        ids, valid = token_sets(end)
        masses = torch.where(valid, torch.softmax(end, -1).gather(1, ids), 0.0).sum(-1).tolist()
    return [
        Row(signal, selection, estimator, tail, float(values[i]), gradients[i], float(reverse[i]), masses[i])
        for i, selection in enumerate(selections)
    ]


def _descend(field: Field, start: Tensor) -> Tensor:
    """Gradient descent with steps that are long where the gradient is small and bounded where it is steep."""
    logits = start
    for _ in range(STEPS):
        logits = step(logits, field(logits)[1])
    return logits


def step(logits: Tensor, gradient: Tensor) -> Tensor:
    """One step of descent on logits [..., V]."""
    steepest = gradient.abs().amax(-1, keepdim=True)
    return torch.log_softmax(logits - 4 * gradient / (1 + 8 * steepest), -1).clamp_min(-60)
