"""/healthz, /readyz and /metrics on one port.

Alive means that watches deliver and that no pass hangs; a loop that is stuck answers nothing at all, which fails the probe
as well. Ready means that the cache is filled, on followers too: a rolling update would wait for ever for a new replica that
can only lead once the old one is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from opd_operator.metrics import CONTENT_TYPE, Metrics

#: A pass that takes longer hangs: each of its calls has a deadline of its own.
STUCK_SECONDS = 300.0


@dataclass(frozen=True)
class Vital:
    """What health is judged by."""

    synced: bool
    oldest_watch_seconds: float
    longest_pass_seconds: float


def complaint(vital: Vital, *, watch_stale_seconds: float) -> str | None:
    """Why the process should be restarted, or None."""
    if vital.oldest_watch_seconds > watch_stale_seconds:
        return f"a watch has been silent for {vital.oldest_watch_seconds:.0f} s"
    if vital.longest_pass_seconds > STUCK_SECONDS:
        return f"a pass has been running for {vital.longest_pass_seconds:.0f} s"
    return None


class HealthServer:
    """Serves the three endpoints."""

    def __init__(
        self,
        *,
        metrics: Metrics,
        vital: Callable[[], Vital],
        watch_ages: Callable[[], dict[str, float]],
        watch_stale_seconds: float,
        port: int,
    ) -> None:
        self._metrics = metrics
        self._vital = vital
        self._watch_ages = watch_ages
        self._stale = watch_stale_seconds
        self._port = port
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        """Listens on all addresses; with port 0 on a free port of the loopback only. Returns the port."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._serve_metrics)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host=None if self._port else "127.0.0.1", port=self._port)
        await site.start()
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        """Stops listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        fault = complaint(self._vital(), watch_stale_seconds=self._stale)
        return web.Response(text=fault or "ok", status=503 if fault else 200)

    async def _readyz(self, _: web.Request) -> web.Response:
        ready = self._vital().synced
        return web.Response(text="ok" if ready else "the first list is not complete", status=200 if ready else 503)

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        ages: dict[str, float] = {}
        for name, age in self._watch_ages().items():
            kind = name.partition("@")[0]
            ages[kind] = max(age, ages.get(kind, 0.0))
        self._metrics.watch_ages(ages)
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})
