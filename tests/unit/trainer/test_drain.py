"""preStop: ask for a checkpoint and wait for it, never longer than needed."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time

import pytest

from opd_trainer.controller.state import RunState, StopSource
from opd_trainer.drain import DrainServer, controller_host, drain


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def serve(state: RunState, grace: float = 30.0) -> tuple[DrainServer, int]:
    server = DrainServer(state, grace_seconds=grace, host="127.0.0.1", port=0)
    return server, await server.start()


async def test_drain_waits_until_the_controller_has_saved() -> None:
    state = RunState(attempt=1)
    server, port = await serve(state)
    waiting = asyncio.create_task(asyncio.to_thread(drain, host="127.0.0.1", port=port))
    await asyncio.wait_for(state.stop.wait(), 10)
    assert state.stop_source is StopSource.DRAIN
    assert not waiting.done()
    state.saved.set()
    assert await asyncio.wait_for(waiting, 10) == "saved"
    await server.close()


async def test_drain_ends_when_the_controller_goes_away() -> None:
    state = RunState(attempt=1)
    server, port = await serve(state)
    waiting = asyncio.create_task(asyncio.to_thread(drain, host="127.0.0.1", port=port))
    await asyncio.wait_for(state.stop.wait(), 10)
    await server.close()
    assert await asyncio.wait_for(waiting, 10) == "the controller is gone"


async def test_drain_gives_up_when_the_grace_is_over() -> None:
    server, port = await serve(RunState(attempt=1), grace=0.5)
    started = time.monotonic()
    assert await asyncio.to_thread(drain, host="127.0.0.1", port=port) == "the grace is over"
    assert time.monotonic() - started < 5
    await server.close()


async def test_without_wait_drain_only_asks() -> None:
    state = RunState(attempt=1)
    server, port = await serve(state)
    assert await asyncio.to_thread(drain, host="127.0.0.1", port=port, wait=False) == "asked to save"
    assert state.stop.is_set()
    await server.close()


def test_nothing_to_drain_returns_at_once() -> None:
    started = time.monotonic()
    assert drain(host="127.0.0.1", port=unused_port()) == "no controller answers; nothing to save"
    assert time.monotonic() - started < 2


def test_a_host_that_swallows_packets_costs_two_seconds() -> None:
    with socket.socket() as silent:  # accepts nothing: the answer never comes
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        started = time.monotonic()
        assert "no controller" in drain(host="127.0.0.1", port=silent.getsockname()[1])
        assert 1.5 < time.monotonic() - started < 5


def test_workers_find_the_controller_at_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FQ_RAY_IP", raising=False)
    assert controller_host() == "127.0.0.1"
    monkeypatch.setenv("FQ_RAY_IP", "job-head-svc.team.svc.cluster.local")
    assert controller_host() == "job-head-svc.team.svc.cluster.local"


def test_the_command_loads_no_heavy_library() -> None:
    program = (
        "import sys; from opd_trainer.cli import main; "
        f"code = main(['drain', '--host', '127.0.0.1', '--port', '{unused_port()}']); "
        "heavy = {'torch', 'ray', 'aiohttp', 'numpy', 'pydantic', 'transformers'} & set(sys.modules); "
        "sys.exit(str(sorted(heavy)) if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "nothing to save" in done.stdout
