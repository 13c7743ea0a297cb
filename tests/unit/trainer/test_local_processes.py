"""Children of a local run: nothing outlives it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from opd_trainer.local import processes
from opd_trainer.local.processes import Child, free_ports

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
#: A process that starts a grandchild in a session of its own and leaves it alone.
ORPHAN_MAKER = (
    "import subprocess, sys; from subprocess import DEVNULL as no; command = [sys.executable, '-c', 'import time; time.sleep(600)']; "
    "p = subprocess.Popen(command, start_new_session=True, stdout=no, stderr=no); "
    "print(p.pid, flush=True)"
)


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_output_goes_to_the_log_and_its_end_can_be_shown(tmp_path: Path) -> None:
    child = Child("talker", [sys.executable, "-c", "print('last words')"], log=tmp_path / "a.log", environment={})
    assert child.wait(30) == 0
    assert child.tail() == "last words\n"


def test_stop_ends_a_child_that_ignores_sigterm(tmp_path: Path) -> None:
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    child = Child("deaf", [sys.executable, "-c", program], log=tmp_path / "a.log", environment={})
    wait_for(lambda: "up" in child.tail())
    child.stop(0.3)
    assert child.returncode() == -signal.SIGKILL


def test_a_child_has_a_session_of_its_own(tmp_path: Path) -> None:
    child = Child("own", SLEEP, log=tmp_path / "a.log", environment={})
    try:
        assert os.getsid(child.pid) == child.pid
    finally:
        child.stop(1)


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from opd_trainer.local.processes import Child; "
        f"c = Child('x', {SLEEP!r}, log=Path({str(tmp_path / 'a.log')!r}), environment={{}}); "
        "print(c.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    wait_for(lambda: not alive(pid))


def test_orphans_are_found_and_ended() -> None:
    program = (
        "import subprocess, sys; from opd_trainer.local import processes; processes.adopt_orphans(); "
        f"out = subprocess.run([sys.executable, '-c', {ORPHAN_MAKER!r}], capture_output=True, text=True).stdout; "
        "pid = int(out); assert pid in processes.descendants(); "
        "left = processes.kill_descendants(); print(pid, sorted(left))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    pid, left = done.stdout.split(maxsplit=1)
    assert left.strip() == "[]"
    assert not alive(int(pid))


def test_ports_that_are_taken_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = int(taken.getsockname()[1])
        monkeypatch.setattr(processes, "PORT_BAND", range(port, port + 1))
        with pytest.raises(OSError, match="only 0 of 1 ports are free"):
            free_ports(1)
    assert free_ports(1) == [port]


def test_the_band_avoids_ray_and_ephemeral_ports() -> None:
    assert processes.PORT_BAND.start > 19999
    assert processes.PORT_BAND.stop <= 32768
