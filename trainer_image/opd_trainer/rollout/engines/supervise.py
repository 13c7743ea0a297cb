"""Runs one engine server so that nothing of it survives its owner: `python supervise.py --parent PID -- COMMAND…`.

The supervisor leads a session of its own. It asks the kernel for a signal when its owner (the Ray actor) dies, adopts
orphans of the server, and kills the whole process group when the server ends, when it is told to stop, or when the owner
is gone. The server in turn gets SIGKILL from the kernel when the supervisor dies. Standard library only: it starts fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS = 5.0


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(argv: list[str]) -> int:
    """Arguments: --parent PID -- COMMAND…"""
    parent, command = int(argv[1]), argv[argv.index("--") + 1 :]
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = subprocess.Popen(command, preexec_fn=_die_with_parent)
    while server.poll() is None and not stopping:
        time.sleep(0.2)
    if server.poll() is None:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(GRACE_SECONDS)
    print(f"engine server ended with code {server.poll()}", flush=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
