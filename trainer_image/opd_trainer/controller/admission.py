"""Which weights a request meets: the door between rollouts and weight updates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager


class Admission:
    """Counts requests in flight and closes while weights change.

    Closing and counting happen without an await between them, so no request slips in after the door is closed.
    """

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.generating = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[int]:
        """Hold a place in flight; yields the version of the weights that the engines serve now."""
        while not self._open.is_set():
            await self._open.wait()
        self.generating += 1
        self._idle.clear()
        try:
            yield self.version
        finally:
            self.generating -= 1
            if self.generating == 0:
                self._idle.set()

    async def update(self, version: int, load: Callable[[], Awaitable[None]], *, drain: bool) -> None:
        """Change weights. `drain` waits for running requests; otherwise `load` aborts them and they come back to the door."""
        self._open.clear()
        try:
            if drain:
                await self._idle.wait()
            await load()
            self.version = version
        finally:
            self._open.set()
