"""Saving before a pod goes away.

The controller answers on a fixed port; `opd-trainer drain --wait`, the preStop hook of head and workers, asks it to save
and waits. The client uses the standard library only: a preStop hook has no seconds to spend on imports.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from typing import TYPE_CHECKING, Any

from opd_api.vocabulary import Port

if TYPE_CHECKING:
    from aiohttp import web

    from opd_trainer.controller.state import RunState

#: A controller that does not answer within this is gone.
ANSWER_SECONDS = 2.0
POLL_SECONDS = 0.3
#: Used when the controller does not say its grace.
DEFAULT_GRACE_SECONDS = 120.0


def controller_host() -> str:
    """The head's address: FQ_RAY_IP on workers (KubeRay sets it), loopback on the head."""
    return os.environ.get("FQ_RAY_IP") or "127.0.0.1"


def _ask(host: str, port: int, method: str) -> dict[str, Any] | None:
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
    try:
        connection.request(method, "/drain")
        answer = json.loads(connection.getresponse().read())
        return answer if isinstance(answer, dict) else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def drain(*, host: str | None = None, port: int = Port.DRAIN, wait: bool = True) -> str:
    """Ask for a checkpoint; with `wait` until it is saved, the controller is gone, or its grace is over.

    Returns what happened, for the pod's log.
    """
    host = host or controller_host()
    answer = _ask(host, port, "POST")
    if answer is None:
        return "no controller answers; nothing to save"
    deadline = time.monotonic() + float(answer.get("graceSeconds", DEFAULT_GRACE_SECONDS))
    while wait and not answer["saved"]:
        if time.monotonic() >= deadline:
            return "the grace is over"
        time.sleep(POLL_SECONDS)
        answer = _ask(host, port, "GET")
        if answer is None:
            return "the controller is gone"
    return "saved" if answer["saved"] else "asked to save"


class DrainServer:
    """POST /drain asks for a stop, GET /drain says whether everything is saved."""

    def __init__(self, state: RunState, *, grace_seconds: float, host: str = "0.0.0.0", port: int = Port.DRAIN) -> None:  # noqa: S104 - workers ask too
        self._state = state
        self._grace = grace_seconds
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        """Listen; returns the port."""
        from aiohttp import web

        application = web.Application()
        application.router.add_get("/drain", self._status)
        application.router.add_post("/drain", self._stop)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _status(self, _request: web.Request) -> web.Response:
        from aiohttp import web

        return web.json_response({"saved": self._state.saved.is_set(), "graceSeconds": self._grace})

    async def _stop(self, request: web.Request) -> web.Response:
        from opd_trainer.controller.state import StopSource

        self._state.request_stop(StopSource.DRAIN)
        return await self._status(request)
