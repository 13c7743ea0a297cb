"""Child processes that cannot outlive this one.

Each child has a session of its own, so a Ctrl-C in the terminal reaches only us, and the kernel kills it when we die.
Descendants that lost their parent come back to us (child subreaper), so that at the end nothing is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from opd_trainer.process_tree import descendants

#: Below the ephemeral range (32768+) and above Ray's worker ports (10002-19999).
PORT_BAND = range(21000, 22000)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.05
TAIL_CHARACTERS = 2000

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Make this process the parent of every orphaned descendant."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def free_ports(count: int) -> list[int]:
    """Ports of the band that nobody listens on now. Raises OSError when there are not enough."""
    found: list[int] = []
    for port in PORT_BAND:
        if len(found) == count:
            return found
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    if len(found) < count:
        raise OSError(f"only {len(found)} of {count} ports are free in {PORT_BAND.start}-{PORT_BAND.stop - 1}")
    return found


class Child:
    """One child process with its output in a file."""

    def __init__(self, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """To the process itself; its children are its own affair."""
        if self.returncode() is None:
            self._process.send_signal(number)

    def wait(self, seconds: float) -> int | None:
        """Exit code, or None when it still runs after the deadline."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, seconds: float) -> None:
        """SIGTERM, then SIGKILL for the whole session."""
        self.signal(signal.SIGTERM)
        self.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def tail(self) -> str:
        """Last words, for an error message."""
        with contextlib.suppress(OSError):
            return self.log.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARACTERS:]
        return ""


def kill_descendants(seconds: float = 10.0) -> set[int]:
    """SIGKILL everything below this process and reap it; returns what survived the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        left = descendants()
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0] > 0:
                pass
        left = descendants()
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(POLL_SECONDS)
