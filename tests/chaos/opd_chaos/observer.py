"""Watches the API server directly, as an administrator, and keeps the record of everything in the order of its versions.

One etcd holds all kinds, so their resourceVersions are one order: what came before what is read off, not guessed. Nothing is
asked of the operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
from operator_api import Api

from opd_chaos.clock import Clock
from opd_chaos.record import Entry
from opd_operator.errors import ApiError, Unreachable
from opd_operator.resources import RESOURCES, Resource

Manifest = dict[str, Any]
JOB_LABEL = "opd.dev/job"
#: Until a type that was just installed is served.
SERVED_SECONDS = 60.0
_REPLICA_SET = Resource("apps", "v1", "replicasets", "ReplicaSet")
#: Everything that a job may own, and what stands between it and its pods.
OBSERVED = (
    RESOURCES["opd.dev/v1alpha1", "OPDJob"],
    RESOURCES["v1", "Pod"],
    RESOURCES["apps/v1", "Deployment"],
    _REPLICA_SET,
    RESOURCES["batch/v1", "Job"],
    RESOURCES["ray.io/v1", "RayJob"],
    RESOURCES["ray.io/v1", "RayCluster"],
    RESOURCES["v1", "ConfigMap"],
    RESOURCES["v1", "Service"],
    RESOURCES["v1", "Secret"],
    RESOURCES["v1", "ServiceAccount"],
    RESOURCES["networking.k8s.io/v1", "NetworkPolicy"],
    RESOURCES["rbac.authorization.k8s.io/v1", "Role"],
    RESOURCES["rbac.authorization.k8s.io/v1", "RoleBinding"],
)


def trimmed(resource: Resource, found: Manifest) -> Manifest:
    """Without what nobody reads."""
    metadata = {key: value for key, value in found["metadata"].items() if key != "managedFields"}
    kept = {**found, "apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}
    if resource.kind in ("Secret", "ReplicaSet", "RayCluster", "Role", "NetworkPolicy"):
        kept = {key: kept[key] for key in ("apiVersion", "kind", "metadata", "status") if key in kept}
    return kept


class Observer:
    """The record and the present state, by namespace and job."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.clock = Clock()
        self.record: dict[tuple[str, str], list[Entry]] = defaultdict(list)
        self.present: dict[tuple[str, str], dict[tuple[str, str], Manifest]] = defaultdict(dict)
        self._versions: dict[Resource, str] = {}

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[Observer]:
        """Watches while the block runs."""
        connector = aiohttp.TCPConnector(ssl=self._api.cluster.ssl_context, limit=0)
        async with aiohttp.ClientSession(connector=connector, read_bufsize=2**20) as session:
            await asyncio.gather(*(self._list(resource) for resource in OBSERVED))
            tasks = [asyncio.create_task(self._follow(session, resource)) for resource in OBSERVED]
            tasks.append(asyncio.create_task(self.clock.run()))
            # Who is blind sees violations everywhere: nothing goes on without one of the watches.
            playing = asyncio.current_task()
            assert playing is not None
            for task in tasks:
                task.add_done_callback(lambda ended: ended.cancelled() or playing.cancel())
            try:
                yield self
            except asyncio.CancelledError as cancelled:
                if broken := [task for task in tasks if task.done()]:
                    raise AssertionError(f"a watch of the observer ended: {broken}") from cancelled
                raise
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def job(self, namespace: str, name: str) -> Manifest | None:
        """The OPDJob as it is now."""
        return self.present[namespace, name].get(("OPDJob", name))

    def objects(self, namespace: str, name: str, kind: str) -> list[Manifest]:
        """Objects of a job as they are now."""
        return [found for (its_kind, _), found in list(self.present[namespace, name].items()) if its_kind == kind]

    def left(self, namespace: str) -> list[str]:
        """Everything that is there in a namespace."""
        return sorted(
            f"{kind}/{name}"
            for (its_namespace, _), found in self.present.items()
            if its_namespace == namespace
            for kind, name in found
        )

    def forget(self, namespace: str) -> None:
        """Drops the record of a namespace."""
        for key in [key for key in self.record if key[0] == namespace]:
            del self.record[key]
        for key in [key for key in self.present if key[0] == namespace]:
            del self.present[key]

    async def _list(self, resource: Resource) -> None:
        """The first look. A type that was just installed is served a moment later."""
        deadline = time.monotonic() + SERVED_SECONDS
        while True:
            try:
                async for items, version in self._api.cluster.list_pages(
                    resource, None, label_selector=self._selector(resource)
                ):
                    for item in items:
                        self._take(resource, "ADDED", item)
                    self._versions[resource] = version
                return
            except (ApiError, Unreachable):
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.2)

    async def _follow(self, session: aiohttp.ClientSession, resource: Resource) -> None:
        """Watches from the last version that was seen: nothing is missed."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                await self._watch(session, resource)
            await asyncio.sleep(0.05)

    def _selector(self, resource: Resource) -> str:
        return "" if resource.kind == "OPDJob" else JOB_LABEL

    async def _watch(self, session: aiohttp.ClientSession, resource: Resource) -> None:
        query = {"watch": "true", "resourceVersion": self._versions[resource], "allowWatchBookmarks": "true"}
        if selector := self._selector(resource):
            query["labelSelector"] = selector
        url = self._api.cluster.server + resource.path(None)
        headers = await self._api.cluster.authorization()
        async with session.get(url, params=query, headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                event = json.loads(line)
                assert event["type"] != "ERROR", f"the observer missed something: {event}"
                self._versions[resource] = event["object"]["metadata"]["resourceVersion"]
                if event["type"] != "BOOKMARK":
                    self._take(resource, event["type"], event["object"])

    def _take(self, resource: Resource, change: str, found: Manifest) -> None:
        kept = trimmed(resource, found)
        metadata = kept["metadata"]
        labels = metadata.get("labels") or {}
        job = metadata["name"] if resource.kind == "OPDJob" else labels.get(JOB_LABEL, "")
        key = (metadata["namespace"], job)
        self.record[key].append(
            Entry(int(metadata["resourceVersion"]), time.monotonic(), change, kept, self.clock.seconds)
        )
        if change == "DELETED":
            self.present[key].pop((resource.kind, metadata["name"]), None)
        else:
            self.present[key][resource.kind, metadata["name"]] = kept


async def until(what: str, look: Callable[[], bool], seconds: float, clock: Clock) -> str:
    """Waits for a condition of the observer's state; empty when it came, otherwise what did not come."""
    deadline = clock.seconds + seconds
    while not look():
        if clock.seconds > deadline:
            return f"{what}: not within {seconds:.0f} s"
        await asyncio.sleep(0.1)
    return ""
