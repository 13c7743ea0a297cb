"""A teacher on a real socket that answers as SGLang does, or misbehaves as it is told to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

Behaviour = Callable[[web.Request, dict[str, Any]], Any]


def right_answer(body: dict[str, Any]) -> dict[str, Any]:
    """Log-probability −(id + 1) / 100 for every token, in SGLang's shape."""
    ids = body["input_ids"][body["logprob_start_len"] :]
    rows = [[None, ids[0], None], *([-(token + 1) / 100, token, None] for token in ids[1:])]
    return {"meta_info": {"finish_reason": {"type": "length"}, "input_token_logprobs": rows}}


class FakeTeacher:
    """`behaviour` may return a dict (answered with 200), a Response, or raise; None answers rightly."""

    def __init__(self) -> None:
        self.behaviour: Behaviour | None = None
        self.bodies: list[dict[str, Any]] = []
        self.healthy = True
        #: What /v1/models names; None answers 404, as a server without that endpoint.
        self.served: str | None = None
        self.running = 0
        self.most_running = 0
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen; on the same port as before when it was started before."""
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def stop(self) -> None:
        """Stop listening and cut every connection."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, _: web.Request) -> web.Response:
        if self.served is None:
            return web.Response(status=404)
        return web.json_response({"data": [{"id": self.served}]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            result = right_answer(body) if self.behaviour is None else self.behaviour(request, body)
            if asyncio.iscoroutine(result):
                result = await result
        finally:
            self.running -= 1
        return result if isinstance(result, web.StreamResponse) else web.json_response(result)


@contextlib.asynccontextmanager
async def fake_teachers(count: int) -> AsyncIterator[list[FakeTeacher]]:
    """Several of them, all stopped at the end."""
    teachers = [FakeTeacher() for _ in range(count)]
    try:
        for teacher in teachers:
            await teacher.start()
        yield teachers
    finally:
        for teacher in teachers:
            await teacher.stop()
