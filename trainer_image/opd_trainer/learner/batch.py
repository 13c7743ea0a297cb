"""From samples to the tensors of one micro-batch.

B sequences, T = the longest response among them, L = longest input or sum of inputs (see `Layout`), N rows: the positions
whose output is needed, in the order of `computed.nonzero()`. A quantity per response token is either flat [N] or on the grid
[B, T]; `to_grid` goes from one to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opd_trainer.alignment import prediction_positions
from opd_trainer.learner.packing import Layout
from opd_trainer.sample import Sample, TokenSet


@dataclass(slots=True)
class TokenSets:
    """K candidate tokens per row with the teacher's log-probabilities."""

    ids: Tensor  # [N, K] int64
    logprobs: Tensor  # [N, K], −inf where not valid
    valid: Tensor  # [N, K] bool


@dataclass(slots=True)
class MicroBatch:
    """One forward and backward pass of one rank. Fields below `teacher` are filled in by the stages of a step."""

    sample_ids: list[int]
    lengths: list[int]
    input_ids: Tensor  # [B, L] or [1, L]
    position_ids: Tensor
    rows: Tensor  # [N] into input_ids.flatten()
    labels: Tensor  # [N] the response tokens
    computed: Tensor  # [B, T] bool: rows exist for these
    trained: Tensor  # [B, T] bool: these reach the loss; a subset of `computed`
    rollout: Tensor | None  # [B, T] log-probabilities of the engine
    teacher: Tensor | None  # [B, T] log-probabilities of the sampled token
    selected: TokenSets | None
    student_top: TokenSets | None
    task: Tensor | None  # [B, T] task advantages
    token_rewards: Tensor  # [B, T] reward at the last trained token
    teacher_of: list[str]
    old: Tensor | None = None  # [B, T]
    divergence: Tensor | None = None  # [B, T] of the old policy, for divergences in advantage sign
    values: Tensor | None = None  # [B, T]
    returns: Tensor | None = None  # [B, T]
    advantages: Tensor | None = None  # [B, T]
    weights: Tensor | None = None  # [B, T] train/rollout correction

    @property
    def empty(self) -> bool:
        """True for the dummy pass of a rank without sequences."""
        return not self.sample_ids

    def to_grid(self, flat: Tensor) -> Tensor:
        """[N] -> [B, T], 0 elsewhere; differentiable."""
        grid = torch.zeros(self.computed.shape, dtype=flat.dtype, device=flat.device)
        return grid.masked_scatter(self.computed, flat)

    def flatten(self, grid: Tensor) -> Tensor:
        """[B, T] -> [N]."""
        return grid[self.computed]


def input_length(sample: Sample) -> int:
    """Tokens the model reads: the last response token predicts nothing that is needed."""
    return len(sample.prompt_ids) + sample.response_length - 1


def build(
    samples: Sequence[Sample],
    layout: Layout,
    *,
    task: dict[int, np.ndarray] | None,
    device: torch.device,
    dtype: torch.dtype,
) -> MicroBatch:
    """Tensors of one micro-batch on `device`; floats in `dtype`. No samples: a dummy that trains nothing."""
    if not samples:
        return _dummy(device, dtype)
    inputs = [np.concatenate([s.prompt_ids, _response(s)])[:-1].astype(np.int64) for s in samples]
    width = max(s.response_length for s in samples)
    computed = np.zeros((len(samples), width), dtype=bool)
    for row, sample in enumerate(samples):
        computed[row, : sample.response_length] = _mask(sample)
    trained = computed.copy()
    if not computed.any():
        computed[0, 0] = True
    input_ids, position_ids, offsets = _lay_out(inputs, layout)
    rows, labels = [], []
    for row, sample in enumerate(samples):
        at = np.flatnonzero(computed[row])
        positions = prediction_positions(len(sample.prompt_ids), sample.response_length)
        rows.append(offsets[row] + np.asarray(positions, dtype=np.int64)[at])
        labels.append(_response(sample)[at].astype(np.int64))
    batch = MicroBatch(
        sample_ids=[s.sample_id for s in samples],
        lengths=[s.response_length for s in samples],
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        rows=torch.from_numpy(np.concatenate(rows)),
        labels=torch.from_numpy(np.concatenate(labels)),
        computed=torch.from_numpy(computed),
        trained=torch.from_numpy(trained),
        rollout=_grid([s.rollout_logprobs for s in samples], width, dtype),
        teacher=_grid([s.teacher_logprobs for s in samples], width, dtype),
        selected=_sets([s.selected for s in samples], computed, dtype),
        student_top=_sets([s.student_topk for s in samples], computed, dtype),
        task=None if task is None else _grid([task[s.sample_id] for s in samples], width, dtype),
        token_rewards=torch.from_numpy(_last_token_rewards(samples, trained)).to(dtype),
        teacher_of=[s.teacher or "" for s in samples],
    )
    return to_device(batch, device)


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Move every tensor; the batch is changed in place."""
    for name in MicroBatch.__slots__:
        value = getattr(batch, name)
        if isinstance(value, Tensor):
            setattr(batch, name, value.to(device))
        elif isinstance(value, TokenSets):
            setattr(batch, name, TokenSets(value.ids.to(device), value.logprobs.to(device), value.valid.to(device)))
    return batch


def _dummy(device: torch.device, dtype: torch.dtype) -> MicroBatch:
    one = torch.ones(1, 1, dtype=torch.bool)
    zero = torch.zeros(1, 1, dtype=dtype)
    sets = TokenSets(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=dtype), one)
    batch = MicroBatch(
        sample_ids=[],
        lengths=[],
        input_ids=torch.zeros(1, 2, dtype=torch.long),
        position_ids=torch.arange(2).unsqueeze(0),
        rows=torch.zeros(1, dtype=torch.long),
        labels=torch.zeros(1, dtype=torch.long),
        computed=one,
        trained=~one,
        rollout=zero.clone(),
        teacher=zero.clone(),
        selected=sets,
        student_top=sets,
        task=zero.clone(),
        token_rewards=zero.clone(),
        teacher_of=[],
    )
    return to_device(batch, device)


def _response(sample: Sample) -> np.ndarray:
    if sample.response_ids is None:
        raise ValueError(f"sample {sample.sample_id} has no response")
    return sample.response_ids


def _mask(sample: Sample) -> np.ndarray:
    if sample.loss_mask is None:
        return np.ones(sample.response_length, dtype=bool)
    return np.asarray(sample.loss_mask) > 0


def _lay_out(inputs: list[np.ndarray], layout: Layout) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """(input ids, position ids, where each sequence begins in the flattened input)."""
    if layout is Layout.PACKED:
        ids = np.concatenate(inputs)[None, :]
        positions = np.concatenate([np.arange(len(x)) for x in inputs])[None, :]
        offsets = np.cumsum([0] + [len(x) for x in inputs])[:-1].tolist()
        return ids, positions, offsets
    length = max(len(x) for x in inputs)
    ids = np.zeros((len(inputs), length), dtype=np.int64)
    for row, tokens in enumerate(inputs):
        ids[row, : len(tokens)] = tokens
    positions = np.broadcast_to(np.arange(length), ids.shape).copy()
    return ids, positions, [row * length for row in range(len(inputs))]


def _grid(values: list[np.ndarray | None], width: int, dtype: torch.dtype) -> Tensor | None:
    """[B, T] of per-token values; rows of samples that lack them hold NaN, which reaches nothing that is trained."""
    if all(value is None for value in values):
        return None
    grid = np.zeros((len(values), width), dtype=np.float64)
    for row, value in enumerate(values):
        if value is None:
            grid[row] = np.nan
        else:
            grid[row, : len(value)] = value
    return torch.from_numpy(grid).to(dtype)


def _sets(values: list[TokenSet | None], computed: np.ndarray, dtype: torch.dtype) -> TokenSets | None:
    """Token sets at the computed rows; sets of different sizes are filled up with entries that are not valid."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    size = max(value.ids.shape[1] for value in present)
    ids, logprobs, valid = [], [], []
    for row, value in enumerate(values):
        at = np.flatnonzero(computed[row])
        row_ids = np.zeros((len(at), size), dtype=np.int64)
        row_logprobs = np.full((len(at), size), -np.inf)
        row_valid = np.zeros((len(at), size), dtype=bool)
        if value is not None:
            own = value.ids.shape[1]
            row_ids[:, :own], row_logprobs[:, :own], row_valid[:, :own] = (
                value.ids[at],
                value.logprobs[at],
                value.valid[at],
            )
        ids.append(row_ids)
        logprobs.append(row_logprobs)
        valid.append(row_valid)
    return TokenSets(
        torch.from_numpy(np.concatenate(ids)),
        torch.from_numpy(np.concatenate(logprobs)).to(dtype),
        torch.from_numpy(np.concatenate(valid)),
    )


def _last_token_rewards(samples: Sequence[Sample], trained: np.ndarray) -> np.ndarray:
    rewards = np.zeros(trained.shape)
    for row, sample in enumerate(samples):
        at = np.flatnonzero(trained[row])
        if len(at) and sample.reward is not None:
            rewards[row, at[-1]] = sample.reward
    return rewards
