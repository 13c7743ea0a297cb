"""Watches kinds of one namespace from outside every operator, and tells each change with the time it arrived here.

All latencies of the benchmark lie between two such arrivals, or between a write of the benchmark's own and one: one process,
one clock, one API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
from operator_api import Api

from opd_operator.resources import RESOURCES, Resource

Manifest = dict[str, Any]
#: (when, in seconds of the performance counter; ADDED, MODIFIED or DELETED; the object)
Tell = Callable[[float, str, Manifest], None]
OPDJOB = RESOURCES["opd.dev/v1alpha1", "OPDJob"]
POD = RESOURCES["v1", "Pod"]
DEPLOYMENT = RESOURCES["apps/v1", "Deployment"]
JOB = RESOURCES["batch/v1", "Job"]
RAY_JOB = RESOURCES["ray.io/v1", "RayJob"]
RAY_CLUSTER = RESOURCES["ray.io/v1", "RayCluster"]
CONFIG_MAP = RESOURCES["v1", "ConfigMap"]


@contextlib.asynccontextmanager
async def watching(api: Api, namespace: str, kinds: tuple[Resource, ...], tell: Tell) -> AsyncIterator[None]:
    """Watches while the block runs; what exists at its start is told as ADDED. A watch that breaks ends the block."""
    connector = aiohttp.TCPConnector(ssl=api.cluster.ssl_context, limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=2**20) as session:
        opened = [asyncio.Event() for _ in kinds]
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_follow(api, session, namespace, kind, tell, event))
                for kind, event in zip(kinds, opened, strict=True)
            ]
            await asyncio.gather(*(event.wait() for event in opened))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()


async def _follow(
    api: Api, session: aiohttp.ClientSession, namespace: str, kind: Resource, tell: Tell, opened: asyncio.Event
) -> None:
    version = ""
    async for items, list_version in api.cluster.list_pages(kind, namespace):
        version = list_version
        for item in items:
            tell(time.perf_counter(), "ADDED", item)
    url = api.cluster.server + kind.path(namespace)
    headers = await api.cluster.authorization()
    while True:
        query = {"watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true"}
        async with session.get(url, params=query, headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as answer:
            answer.raise_for_status()
            opened.set()
            async for line in answer.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise RuntimeError(f"the benchmark's watch of {kind.plural} missed something: {event}")
                version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] != "BOOKMARK":
                    tell(time.perf_counter(), event["type"], event["object"])
