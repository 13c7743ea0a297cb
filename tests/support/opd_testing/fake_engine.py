"""An engine replica in this process, for tests of the fleet."""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray

from opd_trainer.errors import Failure
from opd_trainer.interfaces import GenerateResult
from opd_trainer.rollout.engines.replica import ReplicaLostError, ReplicaStatus
from opd_trainer.sample import VersionSpan


class FakeReplica:
    """Answers with its version as the only token. Flags make it misbehave."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.version: int | None = None
        self.weights = ""
        self.lost = False
        self.killed = False
        self.alive = True
        self.answers = True
        self.start_failure: Failure | None = None
        self.load_failure: Failure | None = None
        self.reported_version: int | None = None
        self.failures: list[Failure] = []
        self.prompts: list[int] = []
        self.gate: asyncio.Event | None = None
        self.start_gate: asyncio.Event | None = None
        self.stopped = False

    def _check(self) -> None:
        if self.lost or self.killed:
            raise ReplicaLostError("the actor died")

    async def placed(self, seconds: float) -> None:
        self._check()

    async def start(self, weights: str, version: int) -> Failure | None:
        if self.start_gate is not None:
            await self.start_gate.wait()
        self._check()
        if self.start_failure is None:
            self.version, self.weights = version, weights
        return self.start_failure

    async def generate(self, prompt_ids: NDArray[np.int32], max_tokens: int, top_k: int) -> GenerateResult | Failure:
        self._check()
        self.prompts.append(int(prompt_ids[0]))
        if self.gate is not None:
            await self.gate.wait()
        self._check()
        if self.failures:
            return self.failures.pop(0)
        version = self.version or 0
        return GenerateResult(
            np.array([version], np.int32), np.zeros(1, np.float32), "stop", (VersionSpan(version, 0, 1),)
        )

    async def load(self, weights: str, version: int, abort: bool) -> Failure | None:
        self._check()
        if self.load_failure is None:
            self.version, self.weights = version, weights
        return self.load_failure

    async def status(self) -> ReplicaStatus:
        self._check()
        version = self.version if self.reported_version is None else self.reported_version
        return ReplicaStatus(self.alive, version, "flag", self.answers)

    async def stop(self) -> None:
        self._check()
        self.stopped = True

    def kill(self) -> None:
        self.killed = True
