"""What the parts of the trainer promise each other. The controller knows these and nothing behind them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from opd_trainer.sample import Sample, TokenSet, VersionSpan


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """What an engine returns for one request."""

    response_ids: NDArray[np.int32]  # [R]
    logprobs: NDArray[np.float32]  # [R]
    finish_reason: str  # stop | length | abort
    version_spans: tuple[VersionSpan, ...]
    topk: TokenSet | None = None


class RolloutEngine(Protocol):
    """A fleet of student servers behind one door. Raises TrainerError when the fleet cannot be kept running."""

    def prepare(self) -> None:
        """Let the replicas' processes come up while others load; returns at once. `start` does it when nobody did."""

    async def start(self, weights: Path, version: int) -> None:
        """Bring every replica up with the given weights; within a deadline."""

    async def generate(
        self, prompt_ids: NDArray[np.int32], *, group_id: int, max_tokens: int, top_k: int = 0
    ) -> GenerateResult:
        """One response. `top_k` > 0 also returns the student's K best tokens per position. Raises SampleError for DATA faults."""

    async def update_weights(self, weights: Path, version: int, *, abort: bool) -> None:
        """pause -> flush -> load -> resume on every replica; verified. Aborted requests return finish_reason "abort"."""

    async def stop(self) -> None:
        """End every process; idempotent."""

    @property
    def concurrency(self) -> int:
        """Requests that are useful in flight over the whole fleet."""


class Scorer(Protocol):
    """All teachers behind one door: routing, retries, limits, ensembles, token selection."""

    async def start(self) -> None:
        """Open sessions, resolve names."""

    async def score(self, sample: Sample) -> None:
        """Fill teacher, teacher_logprobs and (set selections) selected. Raises SampleError or TrainerError.

        When every replica of the teacher is unreachable it waits (the sample is held) and `unavailable` names the teacher;
        after lifecycle.teacherReadyDeadlineSeconds it raises TrainerError(Teacher)."""

    @property
    def unavailable(self) -> str | None:
        """Teacher without a reachable replica, or None."""

    async def stop(self) -> None:
        """Close sessions; idempotent."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step tells."""

    metrics: dict[str, float]
    #: sample_id -> [R] log-probabilities of the learner before the update (pass 1).
    old_logprobs: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    #: sample_id -> [R] log-probabilities of in-process teachers, which score in the learner.
    teacher_logprobs: dict[int, NDArray[np.float32]] = field(default_factory=dict)


class Learner(Protocol):
    """The learner group. Raises TrainerError when a rank is lost."""

    async def start(self, checkpoint: Path | None) -> None:
        """Create the ranks, load the model or a checkpoint's `learner` folder; within a deadline."""

    async def step(self, samples: list[Sample], step: int) -> StepResult:
        """One step (updatesPerStep optimizer updates) on the samples; packing, ranks and micro-batches are its own affair."""

    async def publish(self, directory: Path) -> None:
        """Write the current weights as a Hugging Face folder (complete when this returns; caller renames)."""

    async def save(self, directory: Path) -> None:
        """Write DCP shards of model, optimizer and schedule into `directory` (caller commits with a manifest)."""

    async def export(self, directory: Path) -> None:
        """Write the final student: safetensors in model.dtype, config, generation config, tokenizer."""

    async def stop(self) -> None:
        """End every rank; idempotent."""
