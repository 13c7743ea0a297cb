"""Chunked passes over the vocabulary: the statistics of a row, and its gradient in closed form.

A row of logits is visited in chunks of rows that share two buffers, so the extra memory of a pass does not grow with N.
Logits come from a `Head`: either they exist ([N, V]) or they are the product of hidden states and lm_head, formed a chunk
at a time and formed again in the backward pass.

With shift = max + τ log Σ exp((z − max)/τ), the softmax of a row is exp((z − shift)/τ). For slopes G_k of a function of
the set's log-probabilities and G_r of the log tail mass, both taken as independent,

    ∂/∂z_j = (1/τ) · [ p_j (a + c) for j outside the set,  p_j a + G_j inside ],
    a = −ΣG − G_r,  c = G_r / (tail mass).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from opd_trainer.core._numeric import compute_dtype

_CPU_CHUNK_BYTES = 16 * 2**20
_CUDA_CHUNK_BYTES = 2**30

# Below this exp() is 0 in every dtype; keeps 0 · (−inf) out of the entropy.
_LOWEST_SHIFTED = -1e4


class Head(NamedTuple):
    """Where logits come from: `weight` is None when `inputs` are the logits [N, V], else inputs are hidden states [N, H]."""

    inputs: Tensor
    weight: Tensor | None  # [V, H]

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.inputs)

    @property
    def vocabulary(self) -> int:
        return int(self.inputs.shape[-1] if self.weight is None else self.weight.shape[0])

    def chunk_rows(self, requested: int | None) -> int:
        """Rows per chunk: as requested, or what 16 MiB of logits (1 GiB on CUDA) hold."""
        if requested is not None:
            return max(1, requested)
        budget = _CUDA_CHUNK_BYTES if self.inputs.is_cuda else _CPU_CHUNK_BYTES
        return max(1, budget // max(1, self.vocabulary * int(self.dtype.itemsize)))


class RowStats(NamedTuple):
    """Per row: what a pass over the vocabulary leaves behind; everything in the compute dtype."""

    shift: Tensor  # [N]
    gathered: Tensor  # [N, K] log-probabilities at the ids
    log_outside: Tensor  # [N] log of the mass outside the valid ids, −inf when there is none
    entropy: Tensor  # [N]


def row_stats(
    head: Head, ids: Tensor, valid: Tensor | None, temperature: float, chunk_rows: int | None, *, with_entropy: bool
) -> RowStats:
    """One pass over the vocabulary. `valid` marks the ids whose mass is not "outside"; None skips that sum."""
    rows, dtype, device = head.inputs.shape[0], head.dtype, head.inputs.device
    shift, outside, entropy = (torch.zeros(rows, dtype=dtype, device=device) for _ in range(3))
    gathered = torch.empty(ids.shape, dtype=dtype, device=device)
    weights = torch.empty(0, dtype=dtype, device=device)
    for part, logits in _chunks(head, chunk_rows):
        # A row of −inf (a rank that holds only padding) has mass 0, not NaN.
        top = logits.amax(dim=-1, keepdim=True).to(dtype).clamp_min(torch.finfo(dtype).min)
        if weights.shape[0] < logits.shape[0]:
            shifted_buffer, weights = (torch.empty(logits.shape, dtype=dtype, device=device) for _ in range(2))
        shifted = torch.sub(logits, top, out=shifted_buffer[: logits.shape[0]])
        if temperature != 1:
            shifted.div_(temperature)
        at_ids = shifted.gather(1, ids[part])
        exponentials = torch.exp(shifted, out=weights[: logits.shape[0]])
        if with_entropy:
            expected = _row_dot(exponentials, shifted.clamp_min_(_LOWEST_SHIFTED))
        if valid is None:
            total = exponentials.sum(dim=-1)
        else:
            # The outside mass is summed, not subtracted from 1: exact down to underflow, at the price of K writes.
            own = torch.where(valid[part], at_ids.exp(), torch.zeros_like(at_ids))
            exponentials.scatter_add_(1, ids[part], -own)
            rest = exponentials.sum(dim=-1).clamp_min_(0)
            total = rest + own.sum(dim=-1)
            outside[part] = rest.log() - total.log()
        log_total = total.log()
        shift[part] = top.squeeze(1) + temperature * log_total
        gathered[part] = at_ids - log_total.unsqueeze(1)
        if with_entropy:
            entropy[part] = log_total - expected / total
    return RowStats(shift, gathered, outside, entropy)


class RowSlopes(NamedTuple):
    """Upstream-weighted coefficients of a row's gradient; see the module docstring."""

    everywhere: Tensor  # [N], multiplies the softmax: a + c
    ids: Tensor  # [N, K]
    at_ids: Tensor  # [N, K]: added after the ids of `replaced` were set to 0
    replaced: Tensor | None  # [N, K] bool: ids whose whole gradient is in `at_ids`


def row_gradients(
    head: Head, shift: Tensor, slopes: RowSlopes, temperature: float, chunk_rows: int | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients with respect to (inputs, weight); weight's is None when the inputs are logits."""
    if head.weight is None:
        gradient = torch.empty_like(head.inputs)
        in_place = head.inputs.dtype == head.dtype
        scratch = _Scratch(head)
        for part, logits in _chunks(head, chunk_rows):
            out = gradient[part] if in_place else scratch.rows(logits.shape[0])
            _logit_gradient(logits, part, shift, slopes, temperature, out)
            if not in_place:
                gradient[part] = out
        return gradient, None
    return _linear_gradients(head, shift, slopes, temperature, chunk_rows)


def _linear_gradients(
    head: Head, shift: Tensor, slopes: RowSlopes, temperature: float, chunk_rows: int | None
) -> tuple[Tensor, Tensor]:
    assert head.weight is not None
    weight = _operand(head.weight, head.dtype)
    d_inputs = torch.empty_like(head.inputs)
    d_weight = torch.zeros(head.weight.shape, dtype=head.dtype, device=head.weight.device)
    for part, logits in _chunks(head, chunk_rows):
        _logit_gradient(logits, part, shift, slopes, temperature, logits)
        gradient = logits if weight.dtype == logits.dtype else logits.to(weight.dtype)
        d_inputs[part] = gradient @ weight
        # A masked row's hidden state may be NaN, and 0 · NaN would spread over the whole weight.
        used = (slopes.everywhere[part] != 0) | (slopes.at_ids[part] != 0).any(dim=-1)
        hidden = torch.where(used.unsqueeze(1), head.inputs[part], torch.zeros_like(head.inputs[part]))
        _accumulate(d_weight, gradient, hidden.to(weight.dtype))
    return d_inputs, d_weight.to(head.weight.dtype)


def _logit_gradient(
    logits: Tensor, part: slice, shift: Tensor, slopes: RowSlopes, temperature: float, out: Tensor
) -> None:
    """∂/∂z of a chunk, written into `out` (which may be `logits`)."""
    torch.sub(logits, shift[part].unsqueeze(1), out=out)
    if temperature != 1:
        out.div_(temperature)
    out.exp_()
    everywhere, ids, at_ids = slopes.everywhere[part], slopes.ids[part], slopes.at_ids[part]
    if slopes.replaced is not None:
        # Zeroed and rewritten, not corrected: with a tiny tail c is large, and p·(a + c) − p·c keeps no digit.
        own = torch.where(slopes.replaced[part], out.gather(1, ids), torch.zeros_like(at_ids))
        out.scatter_add_(1, ids, -own)
    out.mul_((everywhere / temperature).unsqueeze(1))
    out.scatter_add_(1, ids, at_ids / temperature)
    _drop_silent_rows(out, shift[part], (everywhere != 0) | (at_ids != 0).any(dim=-1))


def _drop_silent_rows(out: Tensor, shift: Tensor, used: Tensor) -> None:
    """A row nobody asks about has gradient 0 even when its logits are NaN."""
    healthy = torch.isfinite(shift)
    if out.is_cuda or not bool(healthy.all()):
        out.masked_fill_(~(used | healthy).unsqueeze(1), 0)


def _chunks(head: Head, chunk_rows: int | None) -> Iterator[tuple[slice, Tensor]]:
    """(row range, logits of these rows); the logits of a linear head live in one buffer that the caller may overwrite."""
    step, total = head.chunk_rows(chunk_rows), head.inputs.shape[0]
    if head.weight is None:
        for start in range(0, total, step):
            part = slice(start, min(start + step, total))
            yield part, head.inputs[part]
        return
    weight = _operand(head.weight, head.dtype)
    scratch = _Scratch(head, min(step, total))
    for start in range(0, total, step):
        part = slice(start, min(start + step, total))
        yield part, _project(head.inputs[part], weight, scratch.rows(part.stop - part.start))


class _Scratch:
    """One [rows, V] buffer in the compute dtype, allocated at first use."""

    def __init__(self, head: Head, rows: int = 0) -> None:
        self._head, self._rows = head, rows
        self._buffer: Tensor | None = None

    def rows(self, count: int) -> Tensor:
        if self._buffer is None or self._buffer.shape[0] < count:
            shape = (max(count, self._rows), self._head.vocabulary)
            self._buffer = torch.empty(shape, dtype=self._head.dtype, device=self._head.inputs.device)
        return self._buffer[:count]


def _operand(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight as the matrix product takes it: half precision stays so on CUDA, where the product accumulates in fp32."""
    return weight if weight.is_cuda else weight.to(dtype)


def _project(hidden: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    if hidden.dtype == out.dtype:
        return torch.mm(hidden, weight.t(), out=out)
    if weight.dtype == out.dtype:
        return torch.mm(hidden.to(out.dtype), weight.t(), out=out)
    return torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)


def _accumulate(d_weight: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    if gradient.dtype == d_weight.dtype:
        d_weight.addmm_(gradient.t(), hidden)
    else:
        d_weight.add_(torch.mm(gradient.t(), hidden, out_dtype=d_weight.dtype))


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Σⱼ aᵢⱼ bᵢⱼ without a product buffer."""
    return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).view(-1)
