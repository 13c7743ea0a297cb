"""OPDJobs in tests against a real API server: making them, looking at them, waiting for them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

from operator_api import Api
from operator_player import PERIOD_SECONDS

Manifest = dict[str, Any]


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def eventually(
    what: str, look: Callable[[], Any], *, seconds: float = 40.0, state: Callable[[], Any] | None = None
) -> Any:
    """The first true value of `look`; fails with the last state after the deadline."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        found = await look()
        if found:
            return found
        if loop.time() > deadline:
            last = await state() if state is not None else None
            raise AssertionError(f"{what}: not within {seconds} s; last state: {json.dumps(last, default=str)[:4000]}")
        await asyncio.sleep(PERIOD_SECONDS)


class Job:
    """One OPDJob of a test."""

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self.api, self.namespace, self.name = api, namespace, name
        #: What conditions said whenever somebody looked: `type=status (reason)` -> message, in order.
        self.told: dict[str, str] = {}

    async def manifest(self) -> Manifest | None:
        return await self.api.get("opd.dev/v1alpha1", "OPDJob", self.namespace, self.name)

    async def status(self) -> Manifest:
        status: Manifest = (await self.manifest() or {}).get("status") or {}
        for entry in status.get("conditions") or []:
            self.told[f"{entry['type']}={entry['status']} ({entry['reason']})"] = entry.get("message", "")
        return status

    async def phase(self) -> str:
        return str((await self.status()).get("phase", ""))

    async def condition(self, kind: str) -> Manifest:
        conditions = (await self.status()).get("conditions") or []
        return next((entry for entry in conditions if entry["type"] == kind), {})

    async def reaches(self, *phases: str, seconds: float = 40.0) -> None:
        async def there() -> bool:
            return await self.phase() in phases

        await eventually(f"{self.name} is {' or '.join(phases)}", there, seconds=seconds, state=self.status)

    async def patch(self, spec: Manifest) -> None:
        found = await self.manifest()
        assert found is not None
        await self.api.patch(found, {"spec": spec})

    async def delete(self) -> None:
        found = await self.manifest()
        assert found is not None
        await self.api.delete(found)

    async def children(self, api_version: str, kind: str) -> list[Manifest]:
        return await self.api.list(api_version, kind, self.namespace, f"opd.dev/job={self.name}")

    async def names(self, api_version: str, kind: str) -> set[str]:
        return {child["metadata"]["name"] for child in await self.children(api_version, kind)}

    async def reasons(self) -> list[str]:
        """Reasons of the Events about it."""
        events = await self.api.list("v1", "Event", self.namespace)
        return [event["reason"] for event in events if event["involvedObject"].get("name") == self.name]


def document(namespace: str, name: str = "math", **sections: Any) -> Manifest:
    """A small valid OPDJob; keyword sections are merged over its spec."""
    spec: Manifest = {
        "runtime": {"device": "cpu", "acceleratorResource": "nvidia.com/gpu"},
        "storage": {"claimName": "data"},
        "student": {"model": {"source": "/data/student"}},
        "teachers": [{"name": "big", "backend": "transformers", "model": {"source": "/data/teacher"}}],
        "data": {"source": "/data/prompts.jsonl"},
        "rollout": {"engine": "transformers"},
        "training": {"steps": 4},
        "lifecycle": {"preemptionGraceSeconds": 10},
    }
    for key, value in sections.items():
        old = spec.get(key)
        spec[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "opd.dev/v1alpha1", "kind": "OPDJob", "metadata": metadata, "spec": spec}
