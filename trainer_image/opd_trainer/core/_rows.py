"""Tiled passes over the vocabulary: the statistics of a row, and its gradient in closed form.

Logits come from a `Head`: either they exist ([N, V]) or they are the product of hidden states and lm_head, formed a tile at a
time and formed again in the backward pass. A tile is some rows and a range of the vocabulary; all tiles share two buffers, so
the extra memory of a pass grows neither with N nor with V. Rows of existing logits are visited whole; a fused head is visited
in tiles that are nearly square, because that is the shape in which its matrix products are fast.

Maximum, mass and entropy of a row are accumulated over tiles (Milakov and Gimelshein 2018). With shift = max + τ log Σ exp((z −
max)/τ), the softmax of a row is exp((z − shift)/τ). For slopes G_k of a function of the set's log-probabilities and G_r of the
log tail mass, both taken as independent,

    ∂/∂z_j = (1/τ) · [ p_j (a + c) for j outside the set,  p_j a + G_j inside ],
    a = −ΣG − G_r,  c = G_r / (tail mass).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from opd_trainer.core._numeric import compute_dtype

# Bytes of a tile of logits in the compute dtype. Smaller tiles would stay in the processor's cache, but cost more barriers
# between threads, which a shared machine makes expensive.
_CPU_BYTES = 16 * 2**20
_CUDA_BYTES = 2**30
_CPU_HEAD_ROWS = 2048
_CUDA_HEAD_ROWS = 16384

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

    def tile_shape(self, chunk_rows: int | None) -> tuple[int, int]:
        """(rows, columns) of a tile; `chunk_rows` fixes the rows."""
        itemsize, on_cuda = int(self.dtype.itemsize), self.inputs.is_cuda
        if self.weight is None:
            budget = _CUDA_BYTES if on_cuda else _CPU_BYTES
            return chunk_rows or max(1, budget // max(1, self.vocabulary * itemsize)), max(1, self.vocabulary)
        budget, most = (_CUDA_BYTES, _CUDA_HEAD_ROWS) if on_cuda else (_CPU_BYTES, _CPU_HEAD_ROWS)
        rows = max(1, min(chunk_rows or most, self.inputs.shape[0]))
        return rows, max(1, min(self.vocabulary, budget // (rows * itemsize)))

    def hidden(self, part: slice) -> Tensor:
        """Hidden states of some rows as the matrix products take them."""
        return _operand(self.inputs[part], self.dtype)

    def columns(self, columns: slice) -> Tensor:
        """Rows of lm_head, one per token of the range, as the matrix products take them."""
        assert self.weight is not None
        return _operand(self.weight[columns], self.dtype)


class RowStats(NamedTuple):
    """Per row: what a pass over the vocabulary leaves behind; everything in the compute dtype."""

    shift: Tensor  # [N]
    gathered: Tensor  # [N, K] log-probabilities at the ids
    log_outside: Tensor  # [N] log of the mass outside the valid ids, −inf when there is none
    entropy: Tensor  # [N]


class RowSlopes(NamedTuple):
    """Upstream-weighted coefficients of a row's gradient; see the module docstring."""

    everywhere: Tensor  # [N], multiplies the softmax: a + c
    ids: Tensor  # [N, K]
    at_ids: Tensor  # [N, K]: added after the ids of `replaced` were set to 0
    replaced: Tensor | None  # [N, K] bool: ids whose whole gradient is in `at_ids`


# --- statistics -----------------------------------------------------------------------------------------------------
class _Running:
    """Accumulators of some rows over their tiles, all relative to the largest logit so far."""

    def __init__(self, rows: int, ids: Tensor, head: Head, temperature: float) -> None:
        dtype, device = head.dtype, head.inputs.device
        # Not −inf: a row of −inf (a rank that holds only padding) has mass 0, not NaN.
        self.top = torch.full((rows, 1), torch.finfo(dtype).min, dtype=dtype, device=device)
        self.mass = torch.zeros(rows, dtype=dtype, device=device)  # without the valid ids, when these are told apart
        self.expected = torch.zeros_like(self.mass)  # Σ e (z − top)/τ over all ids, for the entropy
        self.at_ids = torch.zeros(ids.shape, dtype=dtype, device=device)
        self.everything = torch.zeros_like(self.mass)
        self.temperature = temperature

    def rescale(self, tile_top: Tensor) -> None:
        """Make everything relative to the larger of the running and the tile's maximum."""
        top = torch.maximum(self.top, tile_top)
        lift = ((self.top - top) / self.temperature).squeeze(1)
        factor = lift.exp()
        self.expected = factor * (self.expected + self.everything * lift.clamp_min(_LOWEST_SHIFTED))
        self.mass, self.everything, self.top = self.mass * factor, self.everything * factor, top


def row_stats(
    head: Head, ids: Tensor, valid: Tensor | None, temperature: float, chunk_rows: int | None, *, with_entropy: bool
) -> RowStats:
    """One pass over the vocabulary. `valid` marks the ids whose mass is not "outside"; None skips that sum.

    Raises:
        IndexError: an id outside the vocabulary (on CUDA an asynchronous assertion).
    """
    _require_known(ids, head.vocabulary)
    rows, dtype, device = head.inputs.shape[0], head.dtype, head.inputs.device
    shift, outside, entropy = (torch.zeros(rows, dtype=dtype, device=device) for _ in range(3))
    gathered = torch.empty(ids.shape, dtype=dtype, device=device)
    tiles, powers = _Scratch(head, chunk_rows), _Scratch(head, chunk_rows)
    for part in _row_parts(head, chunk_rows):
        running = _Running(part.stop - part.start, ids[part], head, temperature)
        for columns in _column_parts(head, chunk_rows):
            logits = _tile(head, part, columns, tiles)
            _visit(
                running, logits, columns, ids[part], None if valid is None else valid[part], tiles, powers, with_entropy
            )
        shifted = (running.at_ids - running.top) / temperature
        total = running.mass
        if valid is not None:
            total = total + torch.where(valid[part], shifted.exp(), 0.0).sum(dim=-1)
            outside[part] = running.mass.log() - total.log()
        log_total = total.log()
        shift[part] = running.top.squeeze(1) + temperature * log_total
        gathered[part] = shifted - log_total.unsqueeze(1)
        if with_entropy:
            entropy[part] = log_total - running.expected / total
    return RowStats(shift, gathered, outside, entropy)


def _visit(
    running: _Running,
    logits: Tensor,
    columns: slice,
    ids: Tensor,
    valid: Tensor | None,
    tiles: _Scratch,
    powers: _Scratch,
    with_entropy: bool,
) -> None:
    """Add one tile to the accumulators."""
    local, mine = _within(ids, columns)
    running.at_ids = torch.where(mine, logits.gather(1, local).to(running.at_ids.dtype), running.at_ids)
    running.rescale(logits.amax(dim=-1, keepdim=True).to(running.top.dtype))
    shifted = torch.sub(logits, running.top, out=tiles.like(logits))
    if running.temperature != 1:
        shifted.div_(running.temperature)
    if with_entropy:
        exponentials = torch.exp(shifted, out=powers.like(logits))
        running.expected = running.expected + _expectation(exponentials, shifted)
    else:
        exponentials = shifted.exp_()
    if valid is None:
        tile_mass = exponentials.sum(dim=-1)
        running.everything, running.mass = running.everything + tile_mass, running.mass + tile_mass
        return
    # The outside mass is summed, not subtracted from 1: exact down to underflow, at the price of K writes.
    own = torch.where(mine & valid, exponentials.gather(1, local), 0.0)
    exponentials.scatter_add_(1, local, -own)
    tile_mass = exponentials.sum(dim=-1).clamp_min(0)
    running.mass = running.mass + tile_mass
    running.everything = running.everything + tile_mass + own.sum(dim=-1)


def _expectation(exponentials: Tensor, shifted: Tensor) -> Tensor:
    """Σⱼ e x, overwriting `shifted`; logits of −inf count as 0. (A batched matrix product of this shape takes three times as
    long.)"""
    bounded = shifted.clamp_min_(_LOWEST_SHIFTED)
    return torch.mul(exponentials, bounded, out=bounded).sum(dim=-1)


# --- gradients ------------------------------------------------------------------------------------------------------
def row_gradients(
    head: Head, shift: Tensor, slopes: RowSlopes, temperature: float, chunk_rows: int | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients with respect to (inputs, weight); weight's is None when the inputs are logits."""
    if head.weight is not None:
        return _linear_gradients(head, shift, slopes, temperature, chunk_rows)
    gradient, everything = torch.empty_like(head.inputs), slice(0, head.vocabulary)
    in_place = head.inputs.dtype == head.dtype
    scratch = _Scratch(head, chunk_rows)
    for part in _row_parts(head, chunk_rows):
        logits = head.inputs[part]
        out = gradient[part] if in_place else scratch.like(logits)
        _logit_gradient(logits, part, everything, shift, slopes, temperature, out)
        if not in_place:
            gradient[part] = out
    return gradient, None


def _linear_gradients(
    head: Head, shift: Tensor, slopes: RowSlopes, temperature: float, chunk_rows: int | None
) -> tuple[Tensor, Tensor]:
    assert head.weight is not None
    d_inputs = torch.empty_like(head.inputs)
    d_weight = torch.zeros(head.weight.shape, dtype=head.dtype, device=head.weight.device)
    scratch = _Scratch(head, chunk_rows)
    for part in _row_parts(head, chunk_rows):
        # A masked row's hidden state may be NaN, and 0 · NaN would spread over the whole weight.
        used = (slopes.everywhere[part] != 0) | (slopes.at_ids[part] != 0).any(dim=-1)
        hidden = torch.where(used.unsqueeze(1), head.hidden(part), 0)
        d_hidden = torch.zeros(hidden.shape, dtype=head.dtype, device=hidden.device)
        for columns in _column_parts(head, chunk_rows):
            logits = _tile(head, part, columns, scratch)
            _logit_gradient(logits, part, columns, shift, slopes, temperature, logits)
            gradient = logits.to(hidden.dtype)
            _accumulate(d_hidden, gradient, head.columns(columns))
            _accumulate(d_weight[columns], gradient.t(), hidden)
        d_inputs[part] = d_hidden
    return d_inputs, d_weight.to(head.weight.dtype)


def _logit_gradient(
    logits: Tensor, part: slice, columns: slice, shift: Tensor, slopes: RowSlopes, temperature: float, out: Tensor
) -> None:
    """∂/∂z of a tile, written into `out` (which may be `logits`)."""
    torch.sub(logits, shift[part].unsqueeze(1), out=out)
    if temperature != 1:
        out.div_(temperature)
    out.exp_()
    everywhere, at_ids = slopes.everywhere[part], slopes.at_ids[part]
    local, mine = _within(slopes.ids[part], columns)
    if slopes.replaced is not None:
        # Zeroed and rewritten, not corrected: with a tiny tail c is large, and p·(a + c) − p·c keeps no digit.
        own = torch.where(slopes.replaced[part] & mine, out.gather(1, local), 0.0)
        out.scatter_add_(1, local, -own)
    out.mul_((everywhere / temperature).unsqueeze(1))
    out.scatter_add_(1, local, torch.where(mine, at_ids / temperature, 0.0))
    _drop_silent_rows(out, shift[part], (everywhere != 0) | (at_ids != 0).any(dim=-1))


def _drop_silent_rows(out: Tensor, shift: Tensor, used: Tensor) -> None:
    """A row nobody asks about has gradient 0 even when its logits are NaN."""
    healthy = torch.isfinite(shift)
    if out.is_cuda or not bool(healthy.all()):
        out.masked_fill_(~(used | healthy).unsqueeze(1), 0)


# --- tiles ----------------------------------------------------------------------------------------------------------
def _row_parts(head: Head, chunk_rows: int | None) -> Iterator[slice]:
    return _parts(head.inputs.shape[0], head.tile_shape(chunk_rows)[0])


def _column_parts(head: Head, chunk_rows: int | None) -> Iterator[slice]:
    return _parts(head.vocabulary, head.tile_shape(chunk_rows)[1])


def _parts(total: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


def _within(ids: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """(position in the range, or 0; whether the id lies in it)."""
    local = ids - columns.start
    mine = (local >= 0) & (local < columns.stop - columns.start)
    return torch.where(mine, local, 0), mine


def _tile(head: Head, part: slice, columns: slice, scratch: _Scratch) -> Tensor:
    """Logits of a tile: a view of existing ones, or formed in the scratch buffer."""
    if head.weight is None:
        return head.inputs[part]
    hidden, weight = head.hidden(part), head.columns(columns)
    out = scratch.shaped(hidden.shape[0], weight.shape[0])
    if hidden.dtype == out.dtype:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)


def _require_known(ids: Tensor, vocabulary: int) -> None:
    known = ((ids >= 0) & (ids < vocabulary)).all()
    if ids.is_cuda:  # without waiting for the device
        torch._assert_async(known)
    elif not bool(known):
        raise IndexError(f"token ids must lie in [0, {vocabulary}), got {int(ids.min())} to {int(ids.max())}")


class _Scratch:
    """A buffer of one tile in the compute dtype, allocated at first use."""

    def __init__(self, head: Head, chunk_rows: int | None) -> None:
        self._head, self._chunk_rows = head, chunk_rows
        self._buffer: Tensor | None = None

    def like(self, tile: Tensor) -> Tensor:
        return self.shaped(tile.shape[0], tile.shape[1])

    def shaped(self, rows: int, columns: int) -> Tensor:
        if self._buffer is None:
            most_rows, most_columns = self._head.tile_shape(self._chunk_rows)
            size = min(most_rows, self._head.inputs.shape[0]) * most_columns
            self._buffer = torch.empty(size, dtype=self._head.dtype, device=self._head.inputs.device)
        return self._buffer[: rows * columns].view(rows, columns)


def _operand(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """A factor as the matrix product takes it: half precision stays so on CUDA, where the product accumulates in fp32."""
    return matrix if matrix.is_cuda else matrix.to(dtype)


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, accumulated in total's dtype."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right, out_dtype=total.dtype))
