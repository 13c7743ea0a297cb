"""Seconds that this machine had for us: where others take the processors, waits grow and so must the patience.

A deadline in wall time breaks on a busy machine and proves nothing there. Here a tick that comes late counts as a tick.
"""

from __future__ import annotations

import asyncio
import time

TICK_SECONDS = 0.05
#: What a late tick counts at most: an idle machine's ticks are a few milliseconds late.
LATE_SECONDS = 0.07


class Clock:
    """`run` must be a task; `seconds` never runs faster than the wall's clock."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def run(self) -> None:
        """Ticks for ever."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)
            self.seconds += min(time.monotonic() - before, LATE_SECONDS)
