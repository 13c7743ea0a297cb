"""An engine's process tree ends with its owner, however that ends. Importing the engines takes the owner seconds."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from opd_trainer.rollout.engines.processes import start_ticks

#: A server with a child that ignores SIGTERM; prints both pids and sleeps.
TREE = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def test_nothing_survives_an_owner_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\nfrom pathlib import Path\n"
        "from opd_trainer.rollout.engines.processes import EngineProcess\n"
        f"root = Path({str(tmp_path)!r})\n"
        f"EngineProcess.launch([sys.executable, '-c', {TREE!r}], os.environ, root / 'engine.log', root / 'engine.pid')\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program])
    log = tmp_path / "engine.log"
    try:
        until(lambda: log.exists() and "pids" in log.read_text())
        pids = [int(word) for word in log.read_text().split()[1:3]]
    finally:
        owner.kill()
        owner.wait()
    until(lambda: all(start_ticks(pid) is None for pid in pids))
