"""Publishing weights through the disk: temporary name -> complete -> rename -> every engine loads and verifies it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from opd_trainer.controller.admission import Admission
from opd_trainer.interfaces import Learner, RolloutEngine
from opd_trainer.storage import RunDirectory


class Publisher:
    """Brings the learner's weights to the engines as a new version."""

    def __init__(
        self, directory: RunDirectory, *, learner: Learner, engine: RolloutEngine, admission: Admission, drain: bool
    ) -> None:
        self._directory = directory
        self._learner = learner
        self._engine = engine
        self._admission = admission
        self._drain = drain

    async def write(self, version: int) -> Path:
        """Write the weights under their final name; refuses when a higher attempt owns the run directory."""
        await asyncio.to_thread(self._directory.check_fence)
        target = self._directory.weights_of(version)
        temporary = target.with_name(f"{target.name}.tmp")
        await asyncio.to_thread(self._clear, target, temporary)
        await self._learner.publish(temporary)
        await asyncio.to_thread(self._directory.check_fence)
        await asyncio.to_thread(temporary.rename, target)
        return target

    @staticmethod
    def _clear(target: Path, temporary: Path) -> None:
        for folder in (target, temporary):
            shutil.rmtree(folder, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)

    async def start_engines(self, version: int) -> None:
        """First weights of the attempt, and the engines up with them."""
        target = await self.write(version)
        await self._engine.start(target, version)
        self._admission.version = version

    async def publish(self, version: int) -> None:
        """New weights everywhere; returns when every engine serves them. Old versions are pruned to the last two."""
        target = await self.write(version)

        async def load() -> None:
            await self._engine.update_weights(target, version, abort=not self._drain)

        await self._admission.update(version, load, drain=self._drain)
        await asyncio.to_thread(self._directory.prune_weights)
