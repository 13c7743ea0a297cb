"""When checkpoints are written: every N steps in the background of the next rollouts, and at every kind of end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from opd_api.v1alpha1.status import CheckpointStatus
from opd_trainer.controller.state import RunState
from opd_trainer.interfaces import Learner
from opd_trainer.storage import RunDirectory

logger = logging.getLogger(__name__)
LEARNER_FOLDER = "learner"


class Store(Protocol):
    """Where checkpoints live (learner/checkpoints.py)."""

    def begin(self, step: int) -> Path:
        """A temporary folder for the checkpoint of `step`."""

    def commit(self, path: Path, controller_state: dict[str, Any]) -> Path:
        """Manifest, fsync, rename, prune; returns the final folder."""


class Checkpointer:
    """Saves learner and controller state of the same step. At most one save at a time."""

    def __init__(
        self,
        store: Store,
        *,
        learner: Learner,
        directory: RunDirectory,
        state: RunState,
        snapshot: Callable[[], dict[str, Any]],
        every_steps: int,
        background: bool,
        on_saved: Callable[[], None],
    ) -> None:
        self._store = store
        self._learner = learner
        self._directory = directory
        self._state = state
        self._snapshot = snapshot
        self._every = every_steps
        self._background = background
        self._on_saved = on_saved
        self._saving: asyncio.Task[None] | None = None

    def due(self, step: int) -> bool:
        """Every `everySteps`; the last step saves through `save_now`."""
        return step % self._every == 0 and step < self._state.total_steps

    async def save(self) -> None:
        """Start a save of the current step; in the background where the spec says so."""
        await self.finish()
        self._saving = asyncio.create_task(self._save(self._state.step, self._snapshot()))
        if not self._background:
            await self.finish()

    async def finish(self) -> None:
        """Wait for the save in progress. The weights must not change before it is done. Raises what the save raised."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            await saving

    async def save_now(self) -> None:
        """Make sure that a checkpoint of the current step exists."""
        await self.finish()
        if self._state.last_checkpoint is None or self._state.last_checkpoint.step != self._state.step:
            await self._save(self._state.step, self._snapshot())

    async def _save(self, step: int, controller_state: dict[str, Any]) -> None:
        await asyncio.to_thread(self._directory.check_fence)
        path = await asyncio.to_thread(self._store.begin, step)
        await self._learner.save(path / LEARNER_FOLDER)
        await asyncio.to_thread(self._directory.check_fence)
        final = await asyncio.to_thread(self._store.commit, path, controller_state)
        self._state.last_checkpoint = CheckpointStatus(step=step, path=str(final))
        self._state.activity.add(await asyncio.to_thread(_bytes_below, final))
        logger.info("checkpoint of step %d: %s", step, final)
        self._on_saved()


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
