"""Ends a run that does nothing: no activity for stallTimeoutSeconds, except while a teacher is unavailable."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
from collections.abc import Callable
from pathlib import Path

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.controller.state import RunState
from opd_trainer.errors import TrainerError

logger = logging.getLogger(__name__)
TICK_SECONDS = 1.0


class StallWatchdog:
    """Counts seconds in which `activity` stood still while every teacher was reachable."""

    def __init__(
        self,
        state: RunState,
        *,
        seconds: float,
        unavailable: Callable[[], str | None],
        describe: Callable[[], dict[str, object]],
        dump_to: Path,
        tick: float = TICK_SECONDS,
    ) -> None:
        self._state = state
        self._seconds = seconds
        self._unavailable = unavailable
        self._describe = describe
        self._dump_to = dump_to
        self._tick = tick

    async def run(self) -> None:
        """Raises TrainerError(Stall); never returns."""
        idle, seen, held = 0.0, self._state.activity.value, None
        while True:
            await asyncio.sleep(self._tick)
            unavailable = self._unavailable()
            if unavailable != held:
                held = unavailable
                self._state.phase_changed.set()  # the operator must hear of it at once
            if self._state.activity.value != seen:
                idle, seen = 0.0, self._state.activity.value
            elif held is None:
                idle += self._tick
            if idle >= self._seconds:
                dump = await asyncio.to_thread(self._dump)
                raise TrainerError(
                    FailureClass.STALL,
                    Reason.STALLED,
                    f"no activity for {self._seconds:.0f} s (lifecycle.stallTimeoutSeconds) in phase {self._state.phase} "
                    f"at step {self._state.step}; what everything was waiting for: {dump}",
                )

    def _dump(self) -> Path:
        """State of the pumps and the stack of every thread."""
        self._dump_to.mkdir(parents=True, exist_ok=True)
        path = self._dump_to / f"stall-step-{self._state.step}.txt"
        with path.open("w", encoding="utf-8") as file:
            file.write(json.dumps(self._describe(), indent=1, default=str) + "\n\n")
            file.flush()
            faulthandler.dump_traceback(file=file, all_threads=True)
        logger.error("stalled; state dump: %s", path)
        return path
