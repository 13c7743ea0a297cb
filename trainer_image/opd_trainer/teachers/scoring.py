"""The model side of the teacher server: log-probabilities of given sequences, in bounded memory.

The head is applied to chunks of rows, so that no [tokens, vocabulary] matrix of a whole batch ever exists. Models whose
logits are more than `head(hidden)` (soft caps, scales, biases unknown to us) are found by comparing both ways once at the
start, and then go through the model's own forward one sequence at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

log = logging.getLogger(__name__)

#: Bytes of fp32 logits that one chunk of rows may take.
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
#: Largest difference between the chunked head and the model's own logits that is rounding.
HEAD_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class ScoreTask:
    """One sequence of L ids; scores are wanted for the tokens start+1 .. L-1 (rows of the answer)."""

    ids: NDArray[np.int64]  # [L]
    start: int
    top_k: int = 0
    #: The same ids at every position (SGLang's token_ids_logprob).
    broadcast_ids: NDArray[np.int64] | None = None  # [M]
    #: Ids per position.
    position_ids: NDArray[np.int64] | None = None  # [rows, K]

    @property
    def rows(self) -> int:
        """Number of scored tokens, L - 1 - start."""
        return len(self.ids) - 1 - self.start


@dataclass(slots=True)
class ScoreRows:
    """Natural log-probabilities of one task."""

    sampled: NDArray[np.float32]  # [rows]
    top_ids: NDArray[np.int32] | None = None  # [rows, K]
    top_logprobs: NDArray[np.float32] | None = None  # [rows, K]
    broadcast: NDArray[np.float32] | None = None  # [rows, M]
    position: NDArray[np.float32] | None = None  # [rows, K]


class TeacherModel:
    """A frozen causal model. Not thread-safe: one thread scores."""

    def __init__(
        self, source: str, *, dtype: str, device: str, revision: str | None = None, trust_remote_code: bool = False
    ) -> None:
        started = time.monotonic()
        self.device = torch.device(device)
        options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        self.config = AutoConfig.from_pretrained(source, **options)
        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[dtype], **options)
        self.model.to(self.device).eval().requires_grad_(False)
        head = self.model.get_output_embeddings()
        #: Ids below this are legal: both the embedding and the head have a row for them.
        self.vocabulary = int(min(self.model.get_input_embeddings().weight.shape[0], head.weight.shape[0]))
        self.context = int(getattr(self.config.get_text_config(), "max_position_embeddings", 0) or 0)
        self._head = head if self._head_is_all(head) else None
        log.info("loaded %s in %.1f s: %d tokens", Path(source).name, time.monotonic() - started, self.vocabulary)

    def _head_is_all(self, head: torch.nn.Module) -> bool:
        """True when `head(hidden)` are the model's logits; tried on 32 tokens."""
        ids = torch.arange(32, device=self.device).remainder(self.vocabulary).unsqueeze(0)
        with torch.inference_mode():
            whole = self.model(input_ids=ids, use_cache=False).logits.float()
            parts = head(self._hidden(ids, torch.ones_like(ids))).float()
        gap: float = (torch.log_softmax(whole, -1) - torch.log_softmax(parts, -1)).abs().max().item()
        limit = HEAD_TOLERANCE[self.model.dtype]
        if not gap <= limit:
            log.warning("this model's logits are not head(hidden) (gap %.3g nats): its own forward is used", gap)
        return gap <= limit

    def _hidden(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Final hidden states [B, T, H]."""
        hidden: torch.Tensor = self.model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
        return hidden

    def score(self, tasks: Sequence[ScoreTask]) -> list[ScoreRows]:
        """Score a batch: one forward of the right-padded sequences, then the head by chunks of rows."""
        with torch.inference_mode():
            return self._score(tasks)

    def _score(self, tasks: Sequence[ScoreTask]) -> list[ScoreRows]:
        if self._head is None:
            return [self._reduce(self._own_logits(task), task) for task in tasks]
        longest = max(len(task.ids) for task in tasks)
        ids = torch.zeros(len(tasks), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, task in enumerate(tasks):
            ids[row, : len(task.ids)] = torch.from_numpy(task.ids)
            mask[row, : len(task.ids)] = 1
        hidden = self._hidden(ids.to(self.device), mask.to(self.device))
        return [self._reduce(hidden[row, task.start : len(task.ids) - 1], task) for row, task in enumerate(tasks)]

    def _own_logits(self, task: ScoreTask) -> torch.Tensor:
        ids = torch.from_numpy(task.ids).unsqueeze(0).to(self.device)
        logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits[0, task.start : len(task.ids) - 1]
        return logits

    def _reduce(self, states: torch.Tensor, task: ScoreTask) -> ScoreRows:
        """From hidden states [rows, H] (or logits [rows, V]) to the numbers that were asked for."""
        rows = task.rows
        chunk = max(1, CHUNK_BYTES.get(self.device.type, 1 << 30) // (4 * self.vocabulary))
        labels = torch.from_numpy(task.ids[task.start + 1 :]).to(self.device)
        out = ScoreRows(np.empty(rows, np.float32))
        if task.top_k:
            out.top_ids = np.empty((rows, task.top_k), np.int32)
            out.top_logprobs = np.empty((rows, task.top_k), np.float32)
        if task.broadcast_ids is not None:
            out.broadcast = np.empty((rows, len(task.broadcast_ids)), np.float32)
        if task.position_ids is not None:
            out.position = np.empty(task.position_ids.shape, np.float32)
        for begin in range(0, rows, chunk):
            part = slice(begin, min(begin + chunk, rows))
            logits = (states[part] if self._head is None else self._head(states[part])).float()
            self._fill(out, part, logits, torch.logsumexp(logits, dim=-1, keepdim=True), labels[part], task)
        return out

    def _fill(
        self,
        out: ScoreRows,
        part: slice,
        logits: torch.Tensor,
        normalizer: torch.Tensor,
        labels: torch.Tensor,
        task: ScoreTask,
    ) -> None:
        out.sampled[part] = (logits.gather(1, labels[:, None]) - normalizer)[:, 0].cpu().numpy()
        if out.top_ids is not None and out.top_logprobs is not None:
            values, indices = logits.topk(task.top_k, dim=-1)
            out.top_logprobs[part] = (values - normalizer).cpu().numpy()
            out.top_ids[part] = indices.cpu().numpy()
        if out.broadcast is not None and task.broadcast_ids is not None:
            columns = torch.from_numpy(task.broadcast_ids).to(self.device)
            out.broadcast[part] = (logits.index_select(1, columns) - normalizer).cpu().numpy()
        if out.position is not None and task.position_ids is not None:
            indices = torch.from_numpy(np.ascontiguousarray(task.position_ids[part])).to(self.device)
            out.position[part] = (logits.gather(1, indices) - normalizer).cpu().numpy()

    def describe(self) -> dict[str, Any]:
        """What a client may know about the model."""
        return {
            "vocab_size": self.vocabulary,
            "max_context_tokens": self.context or None,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "architectures": self.config.architectures,
            "model_type": self.config.model_type,
        }
