"""Ports for engine servers: from a band of our own, checked by binding, and held against other actors of the node."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

#: Outside Ray's worker ports (10002-19999), the teachers' 30000 and the ephemeral range (32768 and up).
BAND = range(21_000, 29_000)


class PortHold:
    """A port that no other holder on this node will choose while this one lives. Release closes the lock file."""

    def __init__(self, port: int, lock: IO[bytes]) -> None:
        self.port = port
        self._lock = lock

    def release(self) -> None:
        """Let others have it; idempotent."""
        self._lock.close()

    def __enter__(self) -> PortHold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def hold_port(*, first: int, avoid: frozenset[int] = frozenset()) -> PortHold:
    """The first free port of the band from offset `first` on. Raises OSError when the band is full."""
    folder = Path(tempfile.gettempdir()) / f"opd-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for offset in range(len(BAND)):
        port = BAND[(first + offset) % len(BAND)]
        if port in avoid:
            continue
        lock = (folder / str(port)).open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        if _free(port):
            return PortHold(port, lock)
        lock.close()
    raise OSError(f"no port between {BAND[0]} and {BAND[-1]} is free")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
