"""The learner's weights: steps that are whole and booked, and the way to the engines.

Publishing goes through the disk: temporary name -> complete -> rename -> every engine loads and verifies it.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Protocol, runtime_checkable

from opd_trainer.controller.admission import Admission
from opd_trainer.controller.state import RunState
from opd_trainer.interfaces import Learner, RolloutEngine, StepResult
from opd_trainer.rollout.buffer import GroupBuffer
from opd_trainer.sample import Sample
from opd_trainer.storage import RunDirectory

logger = logging.getLogger(__name__)


class WholeSteps:
    """`interfaces.Learner` around a learner, for a run whose pumps may be cut off in the middle of a step.

    The ranks compute a step to its end, whoever has stopped waiting for it. A checkpoint taken then holds the weights after
    the step, so the books have to hold the step too, or the next attempt trains its samples a second time.
    """

    def __init__(self, learner: Learner, *, buffer: GroupBuffer, state: RunState) -> None:
        self._learner = learner
        self._buffer = buffer
        self._state = state
        #: The step that nobody waits for any more, and its samples.
        self._cut_off: tuple[asyncio.Task[StepResult], list[Sample]] | None = None

    async def start(self, checkpoint: Path | None) -> None:
        """As the learner."""
        await self._learner.start(checkpoint)

    async def step(self, samples: list[Sample], step: int) -> StepResult:
        """As the learner; when the caller is cancelled the step goes on, for `book_what_was_cut_off`."""
        task = asyncio.create_task(self._learner.step(samples, step), name="learner step")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._cut_off = task, samples
            raise

    async def book_what_was_cut_off(self) -> None:
        """Wait for the step that was cut off, if there is one, and enter it in the books as its pump would have done."""
        if self._cut_off is None:
            return
        task, samples = self._cut_off
        await asyncio.wait({task})
        self._cut_off = None
        if task.cancelled() or task.exception() is not None:
            why = "cancelled" if task.cancelled() else task.exception()
            logger.warning("the step that was under way did not end well either: %s", why)
            return
        taken = {sample.group_id for sample in samples}
        self._buffer.consume([group for group in self._buffer.open_groups() if group.group_id in taken])
        self._buffer.check()
        self._state.step += 1
        logger.info("step %d was under way when the run failed; it is done and counts", self._state.step)

    async def publish(self, directory: Path) -> None:
        """As the learner."""
        await self._learner.publish(directory)

    async def save(self, directory: Path) -> None:
        """As the learner."""
        await self._learner.save(directory)

    async def export(self, directory: Path) -> None:
        """As the learner."""
        await self._learner.export(directory)

    async def stop(self) -> None:
        """As the learner; gives up the step that was cut off."""
        if self._cut_off is not None:
            self._cut_off[0].cancel()
        await self._learner.stop()


@runtime_checkable
class ReadsOnItsOwn(Protocol):
    """An engine that may read published weights while others are published, because its replicas restart one by one."""

    @property
    def reading(self) -> frozenset[int]:
        """Versions that some replica reads from the disk now."""


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
        """New weights everywhere; returns when every engine serves them. Old versions that nobody reads are pruned."""
        target = await self.write(version)

        async def load() -> None:
            await self._engine.update_weights(target, version, abort=not self._drain)

        await self._admission.update(version, load, drain=self._drain)
        # Who begins to read from here on takes the newest version, which is kept.
        in_use = self._engine.reading if isinstance(self._engine, ReadsOnItsOwn) else frozenset()
        await asyncio.to_thread(self._directory.prune_weights, in_use)
