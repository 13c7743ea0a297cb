"""Heartbeats and the final document: a ConfigMap in a cluster, files on a laptop.

The ConfigMap is patched over plain HTTPS with the pod's own token; no client library. The answer to each patch carries
the annotation with which the operator asks for a stop. An API outage delays documents and never ends the run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from opd_api.progress import FINAL_KEY, HEARTBEAT_SECONDS, PROGRESS_KEY, FinalDocument, ProgressDocument
from opd_api.vocabulary import Annotation
from opd_trainer.controller.state import RunState, StopSource
from opd_trainer.hiding import hide
from opd_trainer.storage import write_atomically

logger = logging.getLogger(__name__)
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REQUEST_SECONDS = 10.0
#: How long the final document is retried; without it the operator can only guess from the exit code.
FINAL_SECONDS = 600.0
FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 15.0


class Sink(Protocol):
    """Where documents go."""

    async def send(self, documents: dict[str, str]) -> dict[str, str]:
        """Write documents by key; returns annotations. Raises OSError (aiohttp.ClientError is turned into it)."""

    async def close(self) -> None:
        """Release connections."""


class FileSink:
    """progress.json and final.json in the run directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def send(self, documents: dict[str, str]) -> dict[str, str]:
        for key, text in documents.items():
            await asyncio.to_thread(write_atomically, self._directory / f"{key}.json", text)
        return {}

    async def close(self) -> None:
        return None


class ConfigMapSink:
    """Merge-patches one ConfigMap. The token is read for every request because the kubelet rotates it."""

    def __init__(self, *, url: str, token_file: Path, ca_file: Path | None) -> None:
        self._url = url
        self._token_file = token_file
        context = ssl.create_default_context(cafile=str(ca_file)) if ca_file is not None else True
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context, limit=2), timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        )

    @classmethod
    def in_cluster(cls, namespace: str, name: str) -> ConfigMapSink:
        """The API server as every pod sees it."""
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        host = f"[{host}]" if ":" in host else host
        return cls(
            url=f"https://{host}:{port}/api/v1/namespaces/{namespace}/configmaps/{name}",
            token_file=SERVICE_ACCOUNT / "token",
            ca_file=SERVICE_ACCOUNT / "ca.crt",
        )

    async def send(self, documents: dict[str, str]) -> dict[str, str]:
        token = await asyncio.to_thread(self._token_file.read_text)
        headers = {"Authorization": f"Bearer {token.strip()}", "Content-Type": "application/merge-patch+json"}
        body = json.dumps({"data": documents})
        try:
            async with self._session.patch(self._url, data=body, headers=headers) as response:
                if response.status >= 300:
                    raise OSError(
                        f"PATCH of the progress ConfigMap: HTTP {response.status} {(await response.text())[:200]}"
                    )
                answer: dict[str, Any] = await response.json()
        except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as error:
            raise OSError(f"PATCH of the progress ConfigMap: {type(error).__name__}: {error}") from error
        return dict(answer.get("metadata", {}).get("annotations") or {})

    async def close(self) -> None:
        await self._session.close()


class Heartbeat:
    """Sends a document every 15 s and at each change of phase, and hears the request to stop."""

    def __init__(
        self,
        sink: Sink,
        state: RunState,
        document: Callable[[int], ProgressDocument],
        *,
        seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._sink = sink
        self._state = state
        self._document = document
        self._seconds = seconds
        self._sequence = 0
        self._failures = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._state.phase_changed.clear()
            try:
                await self.beat()
            except Exception:  # a document that cannot be built must not silence all later ones
                self._failures += 1
                logger.exception("no heartbeat could be made")
            retry = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2**self._failures) if self._failures else None
            try:
                await asyncio.wait_for(self._state.phase_changed.wait(), retry or self._seconds)
            except TimeoutError:
                continue

    async def beat(self) -> bool:
        """One document. Returns whether it was written."""
        document = self._next()
        try:
            annotations = await self._sink.send({PROGRESS_KEY: hide(document.model_dump_json(by_alias=True))})
        except OSError as error:
            self._failures += 1
            logger.log(logging.WARNING if self._failures in (1, 10, 100) else logging.DEBUG, "heartbeat: %s", error)
            return False
        self._failures = 0
        if annotations.get(Annotation.STOP.value) == str(self._state.attempt):
            self._state.request_stop(StopSource.ANNOTATION)
        return True

    async def finish(self, final: FinalDocument, *, seconds: float = FINAL_SECONDS) -> bool:
        """Write the final document together with the last progress; retried within a deadline. Returns whether it stands."""
        documents = {
            PROGRESS_KEY: hide(self._next().model_dump_json(by_alias=True)),
            FINAL_KEY: hide(final.model_dump_json(by_alias=True)),
        }
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + seconds, FIRST_RETRY_SECONDS
        while True:
            try:
                await self._sink.send(documents)
            except OSError as error:
                logger.warning("final document: %s", error)
                if loop.time() + pause > deadline:
                    return False
                await asyncio.sleep(pause)
                pause = min(LONGEST_RETRY_SECONDS, pause * 2)
            else:
                return True

    def _next(self) -> ProgressDocument:
        self._sequence += 1
        return self._document(self._sequence)
