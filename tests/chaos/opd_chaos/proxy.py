"""Stands between one operator and the API server: counts its writes, lets calls and watches go wrong, and cuts it off.

Faults happen on the wire, so that every client of the operator's process meets them: its own and kopf's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable

import aiohttp
from aiohttp import web
from operator_api import Api

from opd_chaos.schedule import Mood

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
#: The operator's own limit for a call; a `timeout` holds longer.
CALL_SECONDS = 3.0
#: Headers that belong to one connection.
HOP = frozenset({"host", "connection", "transfer-encoding", "content-length", "accept-encoding", "authorization"})
WATCH_FAULTS = frozenset({"cut watch", "gone watch", "mute watch"})


class Proxy:
    """One listening port for one operator. After `cut` nothing of it reaches the API server any more."""

    def __init__(self, api: Api, session: aiohttp.ClientSession, mood: Mood, dice: random.Random) -> None:
        self._api, self._session, self._mood, self._dice = api, session, mood, dice
        self._runner = web.AppRunner(self._application(), handle_signals=False, access_log=None, shutdown_timeout=0.1)
        self._dead = False
        self._late: set[asyncio.Task[None]] = set()
        self.url = ""
        self.writes = 0
        self.faults: Counter[str] = Counter()
        self.calls = 0
        #: Asked after every write was counted and before it is sent; True: this was the operator's last.
        self.fatal: Callable[[int], bool] = lambda writes: False
        #: What becomes of the last write: carried out, and after how many seconds.
        self.carried_out, self.late = False, 0.0

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=16 * 2**20)
        application.router.add_route("*", "/{path:.*}", self._handle)
        return application

    async def start(self) -> None:
        """Listens on a free port of the loopback."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]

    async def cut(self) -> None:
        """Drops every connection, and whatever was on its way, but for a write that was to arrive late."""
        self._dead = True
        await self._runner.cleanup()

    async def settle(self) -> None:
        """Waits for late writes."""
        await asyncio.gather(*self._late, return_exceptions=True)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if self._dead:
            return self._drop(request)
        self.calls += 1
        if request.query.get("watch") == "true":
            return await self._watch(request)
        counted = request.method in WRITES and "/leases" not in request.path and "/events" not in request.path
        if counted:
            self.writes += 1
            if self.fatal(self.writes):
                return await self._last(request, body)
        fault = self._draw(request)
        if fault in ("429", "500", "503"):
            return self._refusal(int(fault), "InternalError" if fault == "500" else "")
        if fault == "conflict":
            return self._refusal(409, "Conflict")
        if fault == "reset":
            return self._drop(request)
        if fault == "delay":
            await asyncio.sleep(self._dice.uniform(0.1, 1.0))
        elif fault == "timeout":
            await asyncio.sleep(CALL_SECONDS + 1.0)
            return self._drop(request)
        if self._dead:
            return self._drop(request)
        status, headers, answer = await self._send(request, body)
        if fault == "lost answer" or self._dead:
            return self._drop(request)
        return web.Response(status=status, headers=headers, body=answer)

    async def _last(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """The operator is dead from here on."""
        self._dead = True
        if self.carried_out and self.late:
            self._late.add(asyncio.create_task(self._send_late(request, body, self.late)))
        elif self.carried_out:
            await self._send(request, body)
        return self._drop(request)

    async def _send_late(self, request: web.Request, body: bytes, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._send(request, body)

    def _draw(self, request: web.Request) -> str:
        """The fault of a call, mostly none."""
        if self._dice.random() >= self._mood.share:
            return ""
        kinds = [kind for kind in self._mood.kinds if kind not in WATCH_FAULTS]
        if request.method not in ("PUT", "PATCH"):
            # To a POST or DELETE a conflict is an answer with a meaning, and this one would be a lie.
            kinds = [kind for kind in kinds if kind != "conflict"]
        if not kinds:
            return ""
        fault = self._dice.choice(kinds)
        self.faults[fault] += 1
        return fault

    def _refusal(self, code: int, reason: str) -> web.Response:
        status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "message": "chaos",
            "reason": reason,
            "code": code,
        }
        return web.json_response(status, status=code)

    def _drop(self, request: web.Request) -> web.StreamResponse:
        """A connection reset instead of an answer."""
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=500)

    async def _send(self, request: web.Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
        async with self._session.request(
            request.method, self._target(request), headers=await self._headers(request), data=body or None
        ) as answer:
            content = await answer.read()
            return answer.status, {"Content-Type": answer.headers.get("Content-Type", "application/json")}, content

    def _target(self, request: web.Request) -> str:
        return self._api.cluster.server + request.path_qs

    async def _headers(self, request: web.Request) -> dict[str, str]:
        headers = {key: value for key, value in request.headers.items() if key.lower() not in HOP}
        return headers | await self._api.cluster.authorization()

    # --- watches -----------------------------------------------------------------------------------------------------

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        kinds = [kind for kind in self._mood.kinds if kind in WATCH_FAULTS]
        fault = self._dice.choice(kinds) if kinds and self._dice.random() < self._mood.share * 2 else ""
        if fault:
            self.faults[fault] += 1
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        with contextlib.suppress(aiohttp.ClientError, ConnectionError, TimeoutError):
            async with self._session.get(
                self._target(request), headers=await self._headers(request), timeout=aiohttp.ClientTimeout(total=None)
            ) as answer:
                if answer.status != 200:
                    return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")
                await response.prepare(request)
                await self._stream(answer, response, fault)
        return self._drop(request) if self._dead else response

    async def _stream(self, answer: aiohttp.ClientResponse, response: web.StreamResponse, fault: str) -> None:
        limit = self._dice.uniform(0.5, 6.0) if fault in ("cut watch", "gone watch") else None
        mute_at = self._dice.randint(0, 5) if fault == "mute watch" else -1
        try:
            async with asyncio.timeout(limit):
                number = 0
                async for line in answer.content:
                    if number == mute_at:
                        await asyncio.sleep(self._dice.uniform(0.5, 4.0))
                    number += 1
                    await response.write(line)
        except TimeoutError:
            if fault == "gone watch":
                gone = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410}
                await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
