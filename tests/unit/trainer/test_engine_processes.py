"""Child processes of engines leave nothing behind, and ports are nobody else's."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from opd_trainer.rollout.engines.ports import BAND, hold_port
from opd_trainer.rollout.engines.processes import EngineProcess, kill_group, start_ticks, sweep

#: A server with a child of its own; prints both pids and sleeps. The child ignores SIGTERM.
TREE = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def launch(tmp_path: Path, program: str = TREE) -> EngineProcess:
    return EngineProcess.launch(
        [sys.executable, "-c", program], os.environ, tmp_path / "engine.log", tmp_path / "engine.pid"
    )


def pids_of(process: EngineProcess) -> list[int]:
    until(lambda: "pids" in process.tail())
    line = next(line for line in process.tail().splitlines() if line.startswith("pids"))
    return [int(word) for word in line.split()[1:]]


def all_gone(pids: list[int]) -> bool:
    return all(start_ticks(pid) is None for pid in pids)


def test_stop_ends_the_server_and_its_children_even_those_that_ignore_signals(tmp_path: Path) -> None:
    process = launch(tmp_path)
    pids = pids_of(process)
    asyncio.run(process.stop())
    until(lambda: all_gone([process.pid, *pids]))
    assert not (tmp_path / "engine.pid").exists()


def test_a_killed_server_takes_its_children_along_and_is_seen_dead(tmp_path: Path) -> None:
    process = launch(tmp_path)
    pids = pids_of(process)
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: not process.alive)
    until(lambda: all_gone(pids))
    assert "ended with code -9" in process.tail()


def test_a_killed_supervisor_takes_the_server_along(tmp_path: Path) -> None:
    process = launch(tmp_path)
    server, child = pids_of(process)
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: all_gone([server]))
    kill_group(process.pid)  # what the owner does when it stops: the rest of the group has the same leader
    until(lambda: all_gone([child]))


def test_a_server_that_an_earlier_owner_left_is_ended_by_its_recorded_pid(tmp_path: Path) -> None:
    process = launch(tmp_path)
    pids = pids_of(process)
    assert sweep(tmp_path / "engine.pid")
    until(lambda: all_gone(pids) and not process.alive)
    assert not sweep(tmp_path / "engine.pid"), "a reused or dead pid is left alone"


def test_a_record_of_another_node_or_a_broken_one_is_left_alone(tmp_path: Path) -> None:
    record = tmp_path / "engine.pid"
    ticks = start_ticks(os.getpid())
    record.write_text(f'{{"host": "elsewhere", "pid": {os.getpid()}, "ticks": {ticks}}}')
    assert not sweep(record)
    record.write_text("garbage")
    assert not sweep(record)
    assert not sweep(tmp_path / "missing")


def test_two_holders_never_get_the_same_port() -> None:
    with hold_port(first=100) as one, hold_port(first=100) as two:
        assert one.port != two.port
        assert {one.port, two.port} <= set(BAND)


def test_a_port_that_another_program_listens_on_is_passed_over() -> None:
    with hold_port(first=200) as free:
        port = free.port
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", port))
        busy.listen()
        with hold_port(first=BAND.index(port)) as held:
            assert held.port != port
    with hold_port(first=BAND.index(port)) as again:
        assert again.port == port


def test_ports_that_failed_before_are_not_tried_again() -> None:
    with hold_port(first=300) as one:
        tried = one.port
    with hold_port(first=BAND.index(tried), avoid=frozenset({tried})) as two:
        assert two.port != tried


@pytest.mark.parametrize("port", [8265, 10001, 10500, 19999, 30000, 32768])
def test_the_band_keeps_clear_of_ray_teachers_and_the_ephemeral_range(port: int) -> None:
    assert port not in BAND
