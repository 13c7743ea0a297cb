"""Heartbeats and the final document against a small HTTP server that patches like the API server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from opd_api.progress import FinalDocument, ProgressDocument
from opd_api.vocabulary import Outcome, TrainerPhase
from opd_trainer.controller.state import RunState, StopSource
from opd_trainer.progress import ConfigMapSink, FileSink, Heartbeat

PATH = "/api/v1/namespaces/team/configmaps/job-progress"


class ApiServer:
    """One ConfigMap behind PATCH with merge semantics, a token, and outages on demand."""

    def __init__(self, token_file: Path) -> None:
        self.token_file = token_file
        self.object: dict[str, Any] = {"metadata": {"name": "job-progress", "annotations": {}}, "data": {"other": "x"}}
        self.requests = 0
        self.down = False
        self.received = asyncio.Event()

    async def patch(self, request: web.Request) -> web.Response:
        self.requests += 1
        if self.down:
            return web.Response(status=503, text="the server is overloaded")
        if request.headers["Authorization"] != f"Bearer {self.token_file.read_text()}":
            return web.Response(status=401)
        if request.content_type != "application/merge-patch+json":
            return web.Response(status=415)
        patch = await request.json()
        assert set(patch) == {"data"}, "only data may be touched: annotations belong to the operator"
        self.object["data"] |= patch["data"]
        self.received.set()
        return web.json_response(self.object)

    def document(self, key: str) -> dict[str, Any]:
        return dict(json.loads(self.object["data"][key]))


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[tuple[ApiServer, ConfigMapSink]]:
    token = tmp_path / "token"
    token.write_text("first")
    server = ApiServer(token)
    application = web.Application()
    application.router.add_patch(PATH, server.patch)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    sink = ConfigMapSink(url=f"http://127.0.0.1:{runner.addresses[0][1]}{PATH}", token_file=token, ca_file=None)
    yield server, sink
    await sink.close()
    await runner.cleanup()


def heartbeat(sink: Any, state: RunState, *, seconds: float = 3600.0) -> Heartbeat:
    def document(sequence: int) -> ProgressDocument:
        return ProgressDocument(attempt=state.attempt, sequence=sequence, phase=state.phase, step=state.step)

    return Heartbeat(sink, state, document, seconds=seconds)


async def test_a_heartbeat_patches_its_own_key_only(api: tuple[ApiServer, ConfigMapSink]) -> None:
    server, sink = api
    state = RunState(attempt=2)
    assert await heartbeat(sink, state).beat()
    assert server.object["data"]["other"] == "x"
    assert server.document("progress")["attempt"] == 2
    assert server.document("progress")["sequence"] == 1


async def test_a_rotated_token_is_used_at_once(api: tuple[ApiServer, ConfigMapSink]) -> None:
    server, sink = api
    beat = heartbeat(sink, RunState(attempt=1))
    assert await beat.beat()
    server.token_file.write_text("second")
    assert await beat.beat()


@pytest.mark.parametrize(("annotation", "stopped"), [("1", True), ("2", False), ("", False)])
async def test_the_stop_annotation_counts_for_its_own_attempt_only(
    api: tuple[ApiServer, ConfigMapSink], annotation: str, stopped: bool
) -> None:
    server, sink = api
    server.object["metadata"]["annotations"] = {"opd.dev/stop": annotation}
    state = RunState(attempt=1)
    await heartbeat(sink, state).beat()
    assert state.stop.is_set() is stopped
    assert state.stop_source is (StopSource.ANNOTATION if stopped else None)


async def test_a_change_of_phase_is_reported_without_waiting_for_the_period(
    api: tuple[ApiServer, ConfigMapSink],
) -> None:
    server, sink = api
    state = RunState(attempt=1)
    task = asyncio.create_task(heartbeat(sink, state).run())
    await asyncio.wait_for(server.received.wait(), 10)
    server.received.clear()
    state.set_phase(TrainerPhase.TRAINING)
    await asyncio.wait_for(server.received.wait(), 10)
    assert server.document("progress")["phase"] == "Training"
    task.cancel()


async def test_an_outage_delays_heartbeats_and_ends_nothing(api: tuple[ApiServer, ConfigMapSink]) -> None:
    server, sink = api
    server.down = True
    state = RunState(attempt=1)
    task = asyncio.create_task(heartbeat(sink, state).run())
    async with asyncio.timeout(20):
        while server.requests < 2:  # it tries again soon, not after the period of an hour
            await asyncio.sleep(0.05)
        server.down = False
        await server.received.wait()
    assert server.document("progress")["sequence"] >= 3
    assert not task.done()
    task.cancel()


async def test_the_final_document_is_retried_through_an_outage(api: tuple[ApiServer, ConfigMapSink]) -> None:
    server, sink = api
    server.down = True
    state = RunState(attempt=1)
    state.set_phase(TrainerPhase.FINISHED)
    final = FinalDocument(attempt=1, outcome=Outcome.SUCCEEDED, step=4)
    task = asyncio.create_task(heartbeat(sink, state).finish(final, seconds=30))
    async with asyncio.timeout(20):
        while server.requests < 2:
            await asyncio.sleep(0.05)
        server.down = False
        assert await task
    assert server.document("final")["outcome"] == "Succeeded"
    assert server.document("progress")["phase"] == "Finished"


async def test_a_final_document_that_cannot_be_written_is_given_up_at_the_deadline(
    api: tuple[ApiServer, ConfigMapSink],
) -> None:
    server, sink = api
    server.down = True
    final = FinalDocument(attempt=1, outcome=Outcome.SUCCEEDED)
    assert not await heartbeat(sink, RunState(attempt=1)).finish(final, seconds=0.6)


async def test_locally_documents_are_files(tmp_path: Path) -> None:
    beat = heartbeat(FileSink(tmp_path), RunState(attempt=3))
    assert await beat.beat()
    assert await beat.finish(FinalDocument(attempt=3, outcome=Outcome.PREEMPTED, step=7))
    assert json.loads((tmp_path / "progress.json").read_text())["sequence"] == 2
    assert json.loads((tmp_path / "final.json").read_text())["step"] == 7


async def test_in_a_pod_the_sink_finds_the_api_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    created: dict[str, Any] = {}
    monkeypatch.setattr(ConfigMapSink, "__init__", lambda self, **options: created.update(options))
    ConfigMapSink.in_cluster("team", "job-progress")
    assert created["url"] == f"https://[fd00::1]:6443{PATH}"
    assert created["token_file"].name == "token"
    assert created["ca_file"].name == "ca.crt"


async def test_a_document_that_cannot_be_built_does_not_end_the_heartbeats(
    api: tuple[ApiServer, ConfigMapSink],
) -> None:
    server, sink = api
    state = RunState(attempt=1)
    tries: list[int] = []

    def document(sequence: int) -> ProgressDocument:
        tries.append(sequence)
        if len(tries) == 1:
            raise ValueError("a metric with an impossible name")
        return ProgressDocument(attempt=1, sequence=sequence, phase=state.phase)

    task = asyncio.create_task(Heartbeat(sink, state, document).run())
    await asyncio.wait_for(server.received.wait(), 20)
    assert server.document("progress")["sequence"] == 2
    task.cancel()
