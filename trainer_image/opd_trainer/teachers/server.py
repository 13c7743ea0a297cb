"""`opd-trainer serve`: a small teacher server for CPUs and for models that no engine serves.

It answers the scoring subset of SGLang's API, so that one client speaks to both.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import logging
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import orjson
import torch
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from transformers.utils.logging import disable_progress_bar

from opd_api.vocabulary import ExitCode, Port
from opd_trainer.teachers.batching import Batcher, QueueFullError
from opd_trainer.teachers.protocol import Request, RequestError, answer, parse_request
from opd_trainer.teachers.scoring import DTYPES, ScoreTask, TeacherModel

log = logging.getLogger(__name__)

API_KEY_ENV = "OPD_TEACHER_API_KEY"
#: Like SGLang: probes and scrapers need no key.
OPEN_PATHS = ("/health", "/metrics", "/ready")
#: How long a stopping server lets running requests end, in seconds; below the pod's grace of 10 s.
DRAIN_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What the command line says."""

    served_model: str
    context: int
    max_batch_tokens: int
    max_waiting: int
    api_key: str | None


class Metrics:
    """On a registry of its own, so that several servers can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "opd_teacher_server_requests_total", "Requests answered.", ["code"], registry=self.registry
        )
        self.tokens = Counter("opd_teacher_server_tokens_total", "Tokens of scored sequences.", registry=self.registry)
        self.seconds = Histogram(
            "opd_teacher_server_request_seconds", "Time of a request, waiting included.", registry=self.registry
        )
        self.waiting = Gauge("opd_teacher_server_waiting", "Requests in the queue.", registry=self.registry)


class TeacherServer:
    """The aiohttp application around one model."""

    def __init__(self, model: TeacherModel, settings: ServerSettings) -> None:
        self.model = model
        self.settings = settings
        self.metrics = Metrics()
        self.batcher = Batcher(model.score, max_tokens=settings.max_batch_tokens, max_waiting=settings.max_waiting)
        self.stopping = False

    def application(self) -> web.Application:
        """Routes, authentication, start and stop."""
        app = web.Application(middlewares=[self._guard], client_max_size=256 << 20)
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/health", self.health)
        app.router.add_get("/health_generate", self.health_generate)
        app.router.add_get("/metrics", self.scrape)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self.model_info)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self.server_info)
        app.router.add_get("/v1/models", self.models)
        app.on_startup.append(self._start)
        app.on_cleanup.append(self._stop)
        return app

    async def _start(self, _: web.Application) -> None:
        self.batcher.start()

    async def _stop(self, _: web.Application) -> None:
        await self.batcher.stop()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Key check and one count for each answer."""
        if self.settings.api_key and not request.path.startswith(OPEN_PATHS):
            given = request.headers.get("Authorization", "").encode("utf-8", "replace")
            if not hmac.compare_digest(given, f"Bearer {self.settings.api_key}".encode()):
                return self._error(401, "the API key is missing or wrong")
        try:
            response: web.StreamResponse = await handler(request)
        except web.HTTPException as error:
            self.metrics.requests.labels(str(error.status)).inc()
            raise
        if request.path == "/generate" and response.status < 400:
            self.metrics.requests.labels(str(response.status)).inc()
        return response

    def _error(self, status: int, message: str) -> web.Response:
        self.metrics.requests.labels(str(status)).inc()
        return _json({"error": {"message": message, "code": status}}, status)

    async def generate(self, request: web.Request) -> web.Response:
        """Score one sequence or several."""
        started = time.monotonic()
        try:
            body = orjson.loads(await request.read())
            parsed = parse_request(body, vocabulary=self.model.vocabulary, context=self.settings.context)
        except orjson.JSONDecodeError as error:
            return self._error(400, f"the body is not JSON: {error}")
        except RequestError as error:
            return self._error(400, str(error))
        if self.stopping:
            return self._error(503, "the server is stopping")
        try:
            results = await asyncio.gather(*(self.batcher.submit(task) for task in parsed.tasks))
        except QueueFullError as error:
            return self._error(503, str(error))
        except torch.OutOfMemoryError:
            return self._error(503, "out of accelerator memory; lower --max-batch-tokens")
        seconds = time.monotonic() - started
        self._count(parsed, seconds)
        return _json(answer(parsed, results, seconds, body), 200)

    def _count(self, request: Request, seconds: float) -> None:
        self.metrics.tokens.inc(sum(len(task.ids) for task in request.tasks))
        self.metrics.seconds.observe(seconds)

    async def health(self, _: web.Request) -> web.Response:
        """Liveness: the scoring loop runs. A long forward pass is no death."""
        if self.stopping or not self.batcher.alive:
            return _json({"status": "stopping" if self.stopping else "dead"}, 503)
        return _json({"status": "ok"}, 200)

    async def health_generate(self, request: web.Request) -> web.Response:
        """Readiness: a real forward pass, unless others are running and prove the same."""
        alive = await self.health(request)
        if alive.status != 200 or not self.batcher.idle:
            return alive
        task = parse_request(
            {
                "input_ids": [0, min(1, self.model.vocabulary - 1)],
                "sampling_params": {"max_new_tokens": 0},
                "return_logprob": True,
            },
            vocabulary=self.model.vocabulary,
            context=self.settings.context,
        ).tasks[0]
        return await self._try_forward(task)

    async def _try_forward(self, task: ScoreTask) -> web.Response:
        try:
            await self.batcher.submit(task)
        except QueueFullError:
            return _json({"status": "busy"}, 200)
        return _json({"status": "ok"}, 200)

    async def scrape(self, _: web.Request) -> web.Response:
        """Prometheus text."""
        self.metrics.waiting.set(self.batcher.waiting)
        return web.Response(body=generate_latest(self.metrics.registry), content_type="text/plain")

    async def model_info(self, _: web.Request) -> web.Response:
        """Served id and facts about the model."""
        return _json(
            {
                "model_path": self.settings.served_model,
                "served_model_name": self.settings.served_model,
                "is_generation": True,
                **self.model.describe(),
                "max_context_tokens": self.settings.context,
            },
            200,
        )

    async def server_info(self, _: web.Request) -> web.Response:
        """Limits and capabilities."""
        return _json(
            {
                "server": "opd-trainer",
                "max_context_tokens": self.settings.context,
                "max_batch_tokens": self.settings.max_batch_tokens,
                "max_waiting": self.settings.max_waiting,
                "capabilities": {"position_token_ids": True, "token_ids_logprob": True, "top_logprobs": True},
            },
            200,
        )

    async def models(self, _: web.Request) -> web.Response:
        """OpenAI's list, for people."""
        return _json({"object": "list", "data": [{"id": self.settings.served_model, "object": "model"}]}, 200)


def _json(document: Any, status: int) -> web.Response:
    return web.Response(body=orjson.dumps(document), status=status, content_type="application/json")


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `opd-trainer serve`."""
    parser.add_argument("--model", required=True, help="path or hub id of the teacher")
    parser.add_argument("--revision", help="hub revision")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")  # noqa: S104 - a pod's own network
    parser.add_argument("--port", type=int, default=Port.TEACHER, help="port to listen on")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16", help="type of the weights")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where the model runs")
    parser.add_argument("--max-context-tokens", type=int, help="longest sequence in tokens; default is the model's")
    parser.add_argument("--served-model-name", help="id that /model_info reports; default is --model")
    parser.add_argument("--max-batch-tokens", type=int, default=8192, help="padded tokens of one forward pass")
    parser.add_argument("--max-waiting", type=int, default=4096, help="requests that may wait; more get status 503")
    parser.add_argument("--threads", type=int, help="CPU threads; default is torch's")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code from the model's folder")


def build_server(args: argparse.Namespace) -> TeacherServer:
    """Load the model. Raises OSError when it cannot be read."""
    disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    model = TeacherModel(
        args.model,
        dtype=args.dtype,
        device=device,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
    )
    context = min(args.max_context_tokens or model.context or 1 << 30, model.context or 1 << 30)
    return TeacherServer(
        model,
        ServerSettings(
            served_model=args.served_model_name or args.model,
            context=context,
            max_batch_tokens=args.max_batch_tokens,
            max_waiting=args.max_waiting,
            api_key=os.environ.get(API_KEY_ENV) or None,
        ),
    )


async def serve(server: TeacherServer, host: str, port: int, *, stop: asyncio.Event | None = None) -> None:
    """Serve until SIGTERM, SIGINT or `stop`; running requests get `DRAIN_SECONDS` to end. Raises OSError (port in use)."""
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=DRAIN_SECONDS)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        log.info("serving %s on %s:%d", server.settings.served_model, host, port)
        await stop.wait()
        server.stopping = True
        log.info("stopping: %d requests wait", server.batcher.waiting)
        await server.batcher.drain(DRAIN_SECONDS)
    finally:
        await runner.cleanup()


def run_server(args: argparse.Namespace) -> int:
    """`opd-trainer serve`; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        server = build_server(args)
    except (OSError, ValueError) as error:
        log.error("the model %s cannot be loaded: %s", args.model, error)
        return ExitCode.CONFIG
    try:
        asyncio.run(serve(server, args.host, args.port))
    except OSError as error:
        log.error("port %d cannot be opened: %s", args.port, error)
        return ExitCode.INFRASTRUCTURE
    return ExitCode.OK
