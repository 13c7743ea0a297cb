"""From logits to the next token of every row, with the log-probabilities that belong to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Temperature scales the distribution; nucleus and top-k only cut what is drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


@dataclass(frozen=True, slots=True)
class Draw:
    """The next token of B rows."""

    ids: Tensor  # [B]
    #: log softmax(logits / temperature) at the drawn token, before top-p and top-k: what the learner recomputes.
    logprobs: Tensor  # [B]
    top_ids: Tensor | None = None  # [B, K]
    top_logprobs: Tensor | None = None  # [B, K]


def draw(logits: Tensor, settings: SamplingSettings, generator: torch.Generator, top_k: int = 0) -> Draw:
    """Sample one token from each row of logits [B, V]; `top_k` also reports the K best."""
    logprobs = torch.log_softmax(logits.float() / settings.temperature, dim=-1)
    ids = _invert(_cut(logprobs, settings).exp_(), generator)
    chosen = logprobs.gather(1, ids)[:, 0]
    if not top_k:
        return Draw(ids[:, 0], chosen)
    values, indices = logprobs.topk(top_k, dim=-1)
    return Draw(ids[:, 0], chosen, indices, values)


def _invert(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Draw from weights [B, V] by inverting the cumulative sum: one random number a row instead of V. Returns [B, 1]."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    height = torch.rand(total.shape, generator=generator, device=total.device, dtype=total.dtype) * total
    # A step of width zero is never hit; rounding may put the height at the very top, which belongs to the last step.
    return torch.searchsorted(cumulative, torch.minimum(height, total.nextafter(torch.zeros_like(total))), right=True)


def _cut(logprobs: Tensor, settings: SamplingSettings) -> Tensor:
    """A copy of the log-probabilities with everything outside top-k and nucleus at −inf."""
    cut = logprobs.clone()
    if settings.top_k > 0:
        smallest = cut.topk(min(settings.top_k, cut.shape[-1]), dim=-1).values[:, -1:]
        cut.masked_fill_(cut < smallest, float("-inf"))
    if settings.top_p < 1.0:
        ordered, order = cut.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        outside = probabilities.cumsum(dim=-1) - probabilities >= settings.top_p
        cut.masked_fill_(torch.zeros_like(outside).scatter(1, order, outside), float("-inf"))
    return cut
