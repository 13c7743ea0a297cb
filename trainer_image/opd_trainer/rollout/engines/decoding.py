"""A batch of responses that grow together: left-padded, one KV cache, rows leave when they end and join when they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from opd_trainer.rollout.engines.sampling import SamplingSettings, draw


@dataclass(slots=True, eq=False)
class Row:
    """One request while it is decoded."""

    prompt: NDArray[np.int64]  # [P]
    max_tokens: int
    top_k: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[NDArray[np.int32]] = field(default_factory=list)
    top_logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    finish_reason: str = ""

    def append(self, token: int, logprob: float, end_ids: frozenset[int]) -> None:
        """Take the next token; sets `finish_reason` when it is the last."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in end_ids:
            self.finish_reason = "stop"
        elif len(self.ids) >= self.max_tokens:
            self.finish_reason = "length"


@dataclass(slots=True)
class Batch:
    """B rows of width T. `pending` are the tokens that were drawn but not yet fed to the model."""

    rows: list[Row]
    cache: Any
    mask: Tensor  # [B, T] of 0 and 1; pads are on the left
    pending: Tensor  # [B]


class Decoder:
    """Prefill, step, drop and join over one model. Used by one thread."""

    def __init__(
        self, model: Any, *, settings: SamplingSettings, end_ids: frozenset[int], pad_id: int, seed: int
    ) -> None:
        self.model = model
        self._settings = settings
        self._end_ids = end_ids
        self._pad_id = pad_id
        self._generator = torch.Generator(device=model.device).manual_seed(seed)

    def prefill(self, rows: Sequence[Row]) -> Batch:
        """Run the prompts and draw each row's first token. Equal prompts (samples of one group) are run once."""
        unique: dict[bytes, int] = {}
        places = [unique.setdefault(row.prompt.tobytes(), len(unique)) for row in rows]
        prompts = [np.frombuffer(key, dtype=np.int64) for key in unique]
        width = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), width), self._pad_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for index, prompt in enumerate(prompts):
            ids[index, width - len(prompt) :] = torch.from_numpy(prompt.copy())
            mask[index, width - len(prompt) :] = 1
        ids, mask = ids.to(self.model.device), mask.to(self.model.device)
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp_(min=0),
            past_key_values=DynamicCache(config=self.model.config),
            use_cache=True,
            logits_to_keep=1,
        )
        order = torch.tensor(places, device=self.model.device)
        cache, logits = output.past_key_values, output.logits[:, -1]
        if len(prompts) < len(rows) or places != sorted(places):
            cache.batch_select_indices(order)
            mask, logits = mask[order], logits[order]
        batch = Batch(list(rows), cache, mask, torch.zeros(len(rows), dtype=torch.long, device=self.model.device))
        self._take(batch, logits)
        return batch

    def step(self, batch: Batch) -> None:
        """Feed the pending tokens and draw the next ones."""
        batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(batch.rows), 1)], dim=1)
        output = self.model(
            input_ids=batch.pending[:, None],
            attention_mask=batch.mask,
            position_ids=batch.mask.sum(-1, keepdim=True) - 1,
            past_key_values=batch.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._take(batch, output.logits[:, -1])

    def _take(self, batch: Batch, logits: Tensor) -> None:
        top_k = max(row.top_k for row in batch.rows)
        drawn = draw(logits, self._settings, self._generator, top_k)
        batch.pending = drawn.ids
        for row, token, logprob in zip(batch.rows, drawn.ids.tolist(), drawn.logprobs.tolist(), strict=True):
            row.append(token, logprob, self._end_ids)
        if drawn.top_ids is None or drawn.top_logprobs is None:
            return
        ids, values = drawn.top_ids.cpu().numpy().astype(np.int32), drawn.top_logprobs.cpu().numpy()
        for index, row in enumerate(batch.rows):
            if row.top_k:
                row.top_ids.append(ids[index, : row.top_k])
                row.top_logprobs.append(values[index, : row.top_k])

    @staticmethod
    def drop(batch: Batch, gone: Sequence[Row]) -> Batch | None:
        """The batch without these rows (None when empty), its cache cut to what the others still need."""
        leaving = set(map(id, gone))
        keep = [index for index, row in enumerate(batch.rows) if id(row) not in leaving]
        if not keep:
            return None
        if len(keep) == len(batch.rows):
            return batch
        order = torch.tensor(keep, device=batch.mask.device)
        batch.cache.batch_select_indices(order)
        mask = batch.mask[order]
        if mergeable(batch.cache):
            unused = int(mask.any(dim=0).to(torch.long).argmax())
            for layer in batch.cache.layers if unused else ():
                layer.keys, layer.values = layer.keys[:, :, unused:], layer.values[:, :, unused:]
            mask = mask[:, unused:]
        return Batch([batch.rows[index] for index in keep], batch.cache, mask, batch.pending[order])

    @staticmethod
    def join(left: Batch | None, right: Batch) -> Batch:
        """Both batches as one: the narrower one is padded on the left."""
        if left is None:
            return right
        width = max(left.mask.shape[1], right.mask.shape[1])
        for layer, other in zip(left.cache.layers, right.cache.layers, strict=True):
            layer.keys = torch.cat([_widen(layer.keys, width), _widen(other.keys, width)])
            layer.values = torch.cat([_widen(layer.values, width), _widen(other.values, width)])
        mask = torch.cat([_pad_left(left.mask, width), _pad_left(right.mask, width)])
        return Batch([*left.rows, *right.rows], left.cache, mask, torch.cat([left.pending, right.pending]))


def mergeable(cache: Any) -> bool:
    """Whether every layer keeps plain keys and values for all positions: then batches can be cut and joined."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def _widen(states: Tensor, width: int) -> Tensor:
    """[B, heads, T, D] -> [B, heads, width, D], zeros on the left."""
    return torch.nn.functional.pad(states, (0, 0, width - states.shape[2], 0))


def _pad_left(mask: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(mask, (width - mask.shape[1], 0))
