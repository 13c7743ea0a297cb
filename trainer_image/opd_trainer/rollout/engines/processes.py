"""The child process of an engine: started in a session of its own, recorded on disk, ended with everything it made."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

STOP_SECONDS = 10.0
TAIL_BYTES = 4096
SUPERVISOR = Path(__file__).with_name("supervise.py")


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is no such process. Tells a reused pid apart."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def kill_group(pid: int) -> None:
    """SIGKILL for a whole process group; nothing happens when it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


class EngineProcess:
    """A supervised server. `record` remembers it for a sweep by whoever comes next."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, log_start: int, record: Path) -> None:
        self._process = process
        self._log = log
        self._log_start = log_start
        self._record = record

    @classmethod
    def launch(cls, command: Sequence[str], env: Mapping[str, str], log: Path, record: Path) -> EngineProcess:
        """Start under a supervisor; output is appended to `log`. Call it from a thread that outlives the process."""
        log.parent.mkdir(parents=True, exist_ok=True)
        # By its path and not by its name: the package around it would be imported too, with torch.
        supervisor = [sys.executable, str(SUPERVISOR), "--parent", str(os.getpid()), "--"]
        with log.open("ab") as output:
            start = output.tell()
            process = subprocess.Popen(
                [*supervisor, *command],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        host = {"host": socket.gethostname(), "pid": process.pid, "ticks": start_ticks(process.pid)}
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(host))
        return cls(process, log, start, record)

    @property
    def alive(self) -> bool:
        """False once the supervisor, and with it the group, has ended."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the supervisor, which leads the process group."""
        return self._process.pid

    def tail(self) -> str:
        """The end of what this process wrote."""
        try:
            with self._log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - TAIL_BYTES))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""

    async def stop(self) -> None:
        """SIGTERM for the supervisor, SIGKILL for the group after a while; returns when it is gone."""
        if self.alive:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, STOP_SECONDS)
        kill_group(self._process.pid)
        await asyncio.to_thread(self._process.wait)
        self._record.unlink(missing_ok=True)


def sweep(record: Path) -> bool:
    """End a server that an earlier owner left on this node, by its recorded pid and start time. True when there was one."""
    try:
        left = json.loads(record.read_text())
    except (OSError, ValueError):
        return False
    if left["host"] != socket.gethostname() or left["ticks"] is None or start_ticks(left["pid"]) != left["ticks"]:
        return False
    kill_group(left["pid"])
    return True
