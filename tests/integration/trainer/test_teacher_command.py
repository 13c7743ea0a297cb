"""`opd-trainer serve` as a process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest
from opd_testing.tiny_models import write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "teacher", seed=3)


async def test_the_command_serves_and_ends_on_sigterm_after_what_runs(model: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "opd_trainer.cli", "serve", "--model", str(model), "--dtype", "fp32", "--port", str(port)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--threads", "1", stderr=asyncio.subprocess.DEVNULL, env={**os.environ, "HOME": "/"}
    )
    try:
        async with asyncio.timeout(180), aiohttp.ClientSession() as session:
            while True:
                assert process.returncode is None
                try:
                    async with session.get(f"http://127.0.0.1:{port}/health_generate") as response:
                        assert response.status == 200
                        break
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
