"""A wire between a client and a server that tests can cut, freeze and mend. TLS passes through unread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from enum import Enum


class State(Enum):
    """What the wire does with bytes."""

    WHOLE = "whole"
    #: Connections are closed and new ones refused at once.
    CUT = "cut"
    #: Connections stay open and nothing passes, as behind a firewall that forgot them.
    FROZEN = "frozen"


class Wire:
    """A TCP relay on the loopback."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._state = State.WHOLE
        self._whole = asyncio.Event()
        self._whole.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @contextlib.asynccontextmanager
    async def relaying(self) -> AsyncIterator[Wire]:
        """Relays while the block runs."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self._drop()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Ends every connection; new ones end at once."""
        self._set(State.CUT)
        self._drop()

    def freeze(self) -> None:
        """Lets nothing pass any more, without a word."""
        self._set(State.FROZEN)

    def mend(self) -> None:
        """New connections work; what was frozen stays dead, as it would."""
        self._drop()
        self._set(State.WHOLE)

    def _set(self, state: State) -> None:
        self._state = state
        if state is State.WHOLE:
            self._whole.set()
        else:
            self._whole.clear()

    def _drop(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        if self._state is State.CUT:
            writer.transport.abort()
            return
        try:
            await self._whole.wait()
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(far_writer)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(2**16):
                await self._whole.wait()
                sink.write(data)
                await sink.drain()
        sink.close()
