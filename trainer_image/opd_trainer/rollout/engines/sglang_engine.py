"""A student served by SGLang 0.5.23: the Ray actor owns the server's life and speaks to it over loopback."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from importlib.util import find_spec
from typing import Any

import aiohttp
import numpy as np
import orjson
from numpy.typing import NDArray

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import Failure
from opd_trainer.interfaces import GenerateResult
from opd_trainer.rollout.engines.ports import BAND, PortHold, hold_port
from opd_trainer.rollout.engines.processes import EngineProcess, sweep
from opd_trainer.rollout.engines.replica import ReplicaSettings, ReplicaStatus
from opd_trainer.rollout.engines.sglang_command import (
    AnswerError,
    generate_body,
    launch_command,
    parse_generation,
    server_environment,
)
from opd_trainer.rollout.engines.student_model import embedding_rows, end_tokens

log = logging.getLogger(__name__)

#: Ports that are tried before the start is given up: another program may be faster.
PORT_TRIES = 3
POLL_SECONDS = 0.5
HEALTH_SECONDS = 25.0
CONTROL_SECONDS = 120.0
LOAD_SECONDS = 1200.0
#: Without an answer to any request for this long, the probe asks for a token instead of a sign of life.
QUIET_SECONDS = 60.0
#: The trainer's image comes with and without it; the same image fails in the same way in every attempt.
NO_SGLANG = (
    "rollout.engine is sglang, and SGLang is not installed where the engine runs: build trainer_image/Dockerfile with"
    " --build-arg LOCK=trainer-sglang-image and name that image in runtime.image, or write rollout.engine: transformers"
)
IN_USE = ("address already in use", "EADDRINUSE", "Errno 98")


class ControlError(Exception):
    """A control request was refused or not answered."""


def _failure(message: str, failure_class: FailureClass = FailureClass.INFRASTRUCTURE) -> Failure:
    return Failure(failure_class, Reason.ENGINE_FAILED, message)


class SglangReplica:
    """pause -> flush -> load -> resume in one place; requests wait at a door while weights change."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        # Beside the attempts' folders, so that the next attempt finds what this one may leave.
        self._record = settings.log_directory.parent / f"engine-{settings.index}.pid"
        self._process: EngineProcess | None = None
        self._hold: PortHold | None = None
        self._session: aiohttp.ClientSession | None = None
        self._url = ""
        self._version: int | None = None
        self._end_ids: frozenset[int] = frozenset()
        self._vocabulary = 0
        self._open = asyncio.Event()
        self._running = 0
        self._closed = False
        self._last_answer = time.monotonic()
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self, weights: str, version: int) -> Failure | None:
        """Launch the server on a free port and wait until it really generates."""
        if sweep(self._record):
            log.warning("ended an engine server that an earlier owner had left")
        if find_spec("sglang") is None:
            return Failure(FailureClass.CONFIG, Reason.CONFIG_ERROR, NO_SGLANG)
        settings = self._settings
        try:
            self._end_ids = end_tokens(weights, trust_remote_code=settings.trust_remote_code)
            self._vocabulary = embedding_rows(weights, trust_remote_code=settings.trust_remote_code)
        except (OSError, ValueError) as error:
            return _failure(f"the student's configuration cannot be read from {weights}: {error}", FailureClass.CONFIG)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        )
        deadline = time.monotonic() + settings.start_deadline_seconds
        tried: set[int] = set()
        for _ in range(PORT_TRIES):
            failure = await self._launch(weights, version, deadline, tried)
            if failure is None:
                self._version = version
                self._open.set()
                return None
            text = self._process.tail() if self._process else ""
            await self._end()
            if not any(mark.lower() in text.lower() for mark in IN_USE):
                return failure
        return _failure(f"every one of {PORT_TRIES} ports ({sorted(tried)}) was taken by another program")

    async def _launch(self, weights: str, version: int, deadline: float, tried: set[int]) -> Failure | None:
        settings = self._settings
        try:
            first = (os.getpid() * 7 + settings.index) % len(BAND)
            self._hold = hold_port(first=first, avoid=frozenset(tried))
        except OSError as error:
            return _failure(str(error))
        tried.add(self._hold.port)
        self._url = f"http://127.0.0.1:{self._hold.port}"
        self._process = EngineProcess.launch(
            launch_command(settings, weights=weights, version=version, port=self._hold.port),
            server_environment(settings, os.environ),
            settings.log_directory / f"engine-{settings.index}.log",
            self._record,
        )
        while time.monotonic() < deadline:
            if not self._process.alive:
                return _failure(f"the server ended while it started: {_last_lines(self._process.tail())}")
            if await self._generates():
                return None
            await asyncio.sleep(POLL_SECONDS)
        return _failure(f"the server did not become ready in {settings.start_deadline_seconds:.0f} s")

    async def _generates(self) -> bool:
        try:
            status, _ = await self._request("GET", "/health_generate", seconds=HEALTH_SECONDS)
        except ControlError:
            return False
        return status == 200

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, seconds: float | None
    ) -> tuple[int, bytes]:
        """One request. Raises ControlError when there is no answer."""
        if self._session is None:
            raise ControlError("the engine is not started")
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=10.0)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, self._url + path, data=data, headers=headers, timeout=timeout
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ControlError(f"{path}: {type(error).__name__}: {error}"[:300]) from None

    async def generate(self, prompt_ids: NDArray[np.int32], max_tokens: int, top_k: int) -> GenerateResult | Failure:
        """One response. A request that the server refuses is a DATA failure."""
        if int(prompt_ids.max()) >= self._vocabulary or int(prompt_ids.min()) < 0:
            # One such id kills the whole server.
            message = f"the prompt has a token id outside 0..{self._vocabulary - 1}"
            return Failure(FailureClass.DATA, Reason.DATA_ERROR, message)
        body = generate_body(self._settings, prompt_ids, max_tokens, top_k, self._end_ids)
        while not self._open.is_set():
            await self._open.wait()
        if self._closed:
            return _failure("the engine is stopped")
        if not self._running:
            self._last_answer = time.monotonic()
        self._running += 1
        self._idle.clear()
        try:
            # Bounded by the probes: a server that hangs is found by them and replaced.
            status, data = await self._request("POST", "/generate", body, seconds=None)
        except ControlError as error:
            return _failure(f"the request broke: {error}")
        finally:
            self._running -= 1
            self._last_answer = time.monotonic()
            if not self._running:
                self._idle.set()
        if status in (400, 413, 422):
            text = data.decode("utf-8", "replace")[:300]
            return Failure(FailureClass.DATA, Reason.DATA_ERROR, f"the engine refuses the prompt: {text}")
        if status != 200:
            return _failure(f"/generate answers {status}: {data[:200].decode('utf-8', 'replace')}")
        try:
            return parse_generation(orjson.loads(data), top_k, self._version or 0)
        except (AnswerError, orjson.JSONDecodeError) as error:
            return _failure(str(error))

    async def load(self, weights: str, version: int, abort: bool) -> Failure | None:
        """pause -> flush -> load -> resume. `abort` ends running requests; otherwise they finish first."""
        self._open.clear()
        try:
            if not abort:
                await self._idle.wait()
            await self._control("/pause_generation", {"mode": "abort"}, seconds=CONTROL_SECONDS)
            await self._idle.wait()
            await self._control("/flush_cache?timeout=30", {}, seconds=CONTROL_SECONDS)
            body = {"model_path": weights, "weight_version": str(version), "flush_cache": True}
            await self._control("/update_weights_from_disk", body, seconds=LOAD_SECONDS)
            await self._verify(version)
            await self._control("/continue_generation", {}, seconds=CONTROL_SECONDS)
        except ControlError as error:
            return _failure(f"weights {version} cannot be loaded: {error}")
        self._version = version
        self._open.set()
        return None

    async def _control(self, path: str, body: dict[str, Any], *, seconds: float) -> None:
        """A control request that must succeed. Raises ControlError."""
        status, data = await self._request("POST", path, body, seconds=seconds)
        if status != 200:
            raise ControlError(f"{path} answers {status}: {data[:300].decode('utf-8', 'replace')}")

    async def _verify(self, version: int) -> None:
        """A success that was only reported is none: the server must name the version that it serves."""
        status, data = await self._request("GET", "/model_info", seconds=CONTROL_SECONDS)
        served = orjson.loads(data).get("weight_version") if status == 200 else None
        if served != str(version):
            raise ControlError(f"the server names version {served} after loading {version}")

    async def status(self) -> ReplicaStatus:
        """Process first, then /health; a server under load may be slow, which the caller counts as a strike."""
        if self._process is None or not self._process.alive:
            text = _last_lines(self._process.tail()) if self._process else "not started"
            return ReplicaStatus(False, None, f"the server has ended: {text}")
        if not self._open.is_set():
            return ReplicaStatus(True, self._version)
        # A wedged scheduler still answers /health; /health_generate waits for any token of it.
        quiet = self._running > 0 and time.monotonic() - self._last_answer > QUIET_SECONDS
        path = "/health_generate" if quiet else "/health"
        try:
            status, _ = await self._request("GET", path, seconds=HEALTH_SECONDS)
        except ControlError as error:
            return ReplicaStatus(True, self._version, str(error), answers=False)
        return ReplicaStatus(True, self._version, f"{path} answers {status}", answers=status == 200)

    async def _end(self) -> None:
        if self._process is not None:
            await self._process.stop()
            self._process = None
        if self._hold is not None:
            self._hold.release()
            self._hold = None

    async def stop(self) -> None:
        """End the server and everything it started; whoever waits at the door is told."""
        self._closed = True
        self._open.set()
        if self._session is not None:
            await self._session.close()
            self._session = None
        await self._end()


def _last_lines(text: str, count: int = 4) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-count:])[:600]
