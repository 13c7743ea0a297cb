"""What the fleet and an engine replica say to each other. A replica is a Ray actor; failures cross as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from opd_api.v1alpha1 import Device
from opd_trainer.errors import Failure
from opd_trainer.interfaces import GenerateResult
from opd_trainer.rollout.engines.sampling import SamplingSettings


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """All that a replica needs to know; built by the fleet from the TrainerConfig.

    No model and no tokenizer: the folder of published weights holds both, with configuration and generation config. A hub
    id beside it could mean another revision, or one that was never downloaded.
    """

    index: int
    device: Device
    #: fp32, bf16 or fp16.
    dtype: str
    tensor_parallel_size: int
    sampling: SamplingSettings
    max_prompt_tokens: int
    max_response_tokens: int
    max_batch: int
    seed: int
    trust_remote_code: bool
    log_directory: Path
    start_deadline_seconds: float

    @property
    def context(self) -> int:
        """Longest sequence that is ever generated, in tokens."""
        return self.max_prompt_tokens + self.max_response_tokens + 1


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """Answer to a liveness probe."""

    alive: bool
    version: int | None
    message: str = ""
    #: False when the process lives but its probe failed.
    answers: bool = True


class Replica(Protocol):
    """The methods of an engine actor."""

    async def start(self, weights: str, version: int) -> Failure | None:
        """Come up with these weights, within the start deadline."""

    async def generate(self, prompt_ids: NDArray[np.int32], max_tokens: int, top_k: int) -> GenerateResult | Failure:
        """One response."""

    async def load(self, weights: str, version: int, abort: bool) -> Failure | None:
        """Pause, flush, load, resume; verified."""

    async def status(self) -> ReplicaStatus:
        """Whether the engine lives, and with which weights."""

    async def stop(self) -> None:
        """End every process of the engine."""


class ReplicaHandle(Replica, Protocol):
    """A replica seen from the fleet: the same methods, which also raise ReplicaLostError."""

    async def placed(self, seconds: float) -> None:
        """Wait until the actor runs somewhere. Raises TimeoutError or ReplicaLostError."""

    def kill(self) -> None:
        """End it without asking; idempotent."""


class ReplicaLostError(Exception):
    """The actor or its node is gone, or does not answer."""
