"""From a job's creation to its last teacher, and the same writes by a bare client."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import load_kube_config
from operator_api import Api, NoCalls
from operator_jobs import eventually, free_port
from processes import WRITES
from stage import TOGETHER, Stage, paced, percentile, together, unchecked
from watching import DEPLOYMENT

from opd_operator.cluster import Cluster
from opd_operator.main import Operator
from opd_operator.metrics import Metrics
from opd_operator.settings import Settings

Manifest = dict[str, Any]
TEACHERS = 2
LATE_SECONDS = 300.0


class Recording(Cluster):
    """Keeps every write with the time of its answer."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.writes: list[tuple[float, Any]] = []

    async def _send_once(self, call: Any) -> Manifest:
        answer = await super()._send_once(call)
        if call.verb in WRITES:
            self.writes.append((time.perf_counter(), call))
        return answer

    async def teachers(self, count: int) -> list[tuple[float, Any]]:
        """The writes that made teachers, once there are so many."""
        made: list[tuple[float, Any]] = []

        async def applied() -> bool:
            made[:] = [(at, call) for at, call in self.writes if call.resource == DEPLOYMENT and call.verb == "patch"]
            return len(made) >= count

        await eventually(f"{count} teachers are applied", applied, seconds=LATE_SECONDS)
        return made

    async def rest(self) -> None:
        """Until nothing was written for two seconds."""
        while not self.writes or time.perf_counter() - self.writes[-1][0] < 2.0:
            await asyncio.sleep(0.1)


async def measure_apply(stage: Stage) -> dict[str, float]:
    """Jobs at two a second for the latency; then as many at once, and the bare client, for the rate."""
    ours, bare, count = stage.namespace("apply"), stage.namespace("bare"), stage.sizes.applied
    metrics = Metrics()
    recording = await _connect(stage.kubeconfig, Recording, metrics)
    settings = Settings(watch_namespaces=(ours,), leader_election=False, workers=TOGETHER, http_port=free_port())
    operator = Operator(settings, recording, metrics)
    stop = asyncio.Event()
    running = asyncio.create_task(operator.run(stop))
    await asyncio.wait_for(operator.feed.synced.wait(), 60)
    latencies = await _latencies(stage.api, recording, ours, count)
    await recording.rest()
    before, first = len(recording.writes), time.perf_counter()
    burst = [f"burst{number:03d}x" for number in range(count)]
    await together(burst, lambda name: stage.api.create(unchecked(ours, name)))
    await recording.teachers(2 * TEACHERS * count)
    await recording.rest()
    took = recording.writes[-1][0] - first
    lives = {name: [call for _, call in recording.writes[before:] if _of_job(call, name)] for name in burst}
    stop.set()
    await running
    await recording.close()
    prepared = {name: [_moved(call, ours, bare) for call in calls] for name, calls in lives.items()}
    client = await _connect(stage.kubeconfig, Cluster, NoCalls())
    first = time.perf_counter()
    await together(burst, lambda name: _repeat(client, stage.api, bare, name, prepared[name]))
    alone = time.perf_counter() - first
    await client.close()
    return {
        "of_bare_client": alone / took,
        "seconds": took,
        "bare_seconds": alone,
        "p99_seconds": percentile(latencies, 0.99),
        "p50_seconds": statistics.median(latencies),
        "writes_a_job": statistics.mean(len(calls) for calls in lives.values()),
        "jobs": count,
    }


async def _latencies(api: Api, recording: Recording, namespace: str, count: int) -> list[float]:
    names = [f"job{number:03d}x" for number in range(count)]
    born = await paced(names, lambda name: api.create(unchecked(namespace, name)))
    made = await recording.teachers(TEACHERS * count)
    return [max(at for at, call in made if _of_job(call, name)) - born[name] for name in names]


async def _connect(kubeconfig: Path, kind: type[Cluster], observer: Any) -> Any:
    configuration = Configuration()
    await load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
    return kind(configuration, observer=observer)


def _of_job(call: Any, name: str) -> bool:
    """Whether a write belongs to the job."""
    text = f"{call.path} {(call.body or {}).get('metadata', {}).get('name', '')}"
    return f"{name}-" in text or f"/{name}/" in text or text.endswith(f" {name}") or f" {name}." in text


def _moved(call: Any, ours: str, bare: str) -> Any:
    """The same write in another namespace, without preconditions."""
    body = json.loads(json.dumps(call.body).replace(f'"{ours}"', f'"{bare}"')) if call.body else None
    if body:
        for precondition in ("resourceVersion", "uid"):
            body.get("metadata", {}).pop(precondition, None)
    return replace(call, path=call.path.replace(f"/{ours}/", f"/{bare}/"), body=body)


async def _repeat(client: Cluster, api: Api, namespace: str, name: str, calls: list[Any]) -> None:
    """The writes of one job, in their order."""
    job = await api.create(unchecked(namespace, name))
    for call in calls:
        for owner in (call.body or {}).get("metadata", {}).get("ownerReferences", ()):
            owner["uid"] = job["metadata"]["uid"]
        await client._send(call)
