"""The operator on a real API server and etcd, on this machine: `python tests/bench/operator/run.py [--jobs 5000]`.

apply     2 jobs a second; every write of a job from its creation to its last teacher. Against a bare client that repeats the
          same writes in the same order with the same concurrency, in the same run.
cold      an operator is started on many ended jobs: time until it is ready, and memory. Against the usual kopf pattern (an
          index and an event handler) on the same objects, in the same run.
Bars are in tests/bench/bars.yaml; the exit code is 1 when one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import load_kube_config

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from operator_api import Api, NoCalls  # noqa: E402
from operator_jobs import document, eventually, free_port  # noqa: E402

from opd_cluster import cluster as clusters  # noqa: E402
from opd_operator.cluster import Cluster  # noqa: E402
from opd_operator.main import Operator  # noqa: E402
from opd_operator.metrics import Metrics  # noqa: E402
from opd_operator.settings import Settings  # noqa: E402

Manifest = dict[str, Any]
WRITES = frozenset({"create", "update", "patch", "delete"})
TOGETHER = 8
ENDED = "2026-01-01T00:00:00Z"
KOPF_INDEX = """
import kopf
seen = set()
@kopf.index("opd.dev", "v1alpha1", "opdjobs")
def by_name(name, **_):
    return {name: name}
@kopf.on.event("opd.dev", "v1alpha1", "opdjobs")
async def event(name, by_name, **_):
    seen.add(name)
    if len(seen) == COUNT:
        print("seen", flush=True)
"""


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


async def connect(kubeconfig: Path, kind: type[Cluster], observer: Any) -> Any:
    configuration = Configuration()
    await load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
    return kind(configuration, observer=observer)


def bench_document(namespace: str, name: str) -> Manifest:
    """Two teachers, no checks: all that can be made without a node."""
    names = ("code", "math")
    teachers = [{"name": one, "backend": "transformers", "model": {"source": f"/data/{one}"}} for one in names]
    routing = {"map": {"a": "code", "b": "math"}}
    return document(namespace, name, teachers=teachers, routing=routing, preflight={"enabled": False})


def of_job(call: Any, name: str) -> bool:
    """Whether a write belongs to the job."""
    text = f"{call.path} {(call.body or {}).get('metadata', {}).get('name', '')}"
    return f"{name}-" in text or f"/{name}/" in text or text.endswith(f" {name}") or f" {name}." in text


async def measure_apply(api: Api, kubeconfig: Path, ours: str, bare: str, count: int) -> dict[str, float]:
    metrics = Metrics()
    recording = await connect(kubeconfig, Recording, metrics)
    settings = Settings(watch_namespaces=(ours,), leader_election=False, workers=TOGETHER, http_port=free_port())
    operator = Operator(settings, recording, metrics)
    stop = asyncio.Event()
    running = asyncio.create_task(operator.run(stop))
    await asyncio.wait_for(operator.feed.synced.wait(), 60)
    names = [f"job{number:03d}x" for number in range(count)]
    born: dict[str, float] = {}
    for name in names:
        born[name] = time.perf_counter()
        await api.create(bench_document(ours, name))
        await asyncio.sleep(max(0.0, 0.5 - (time.perf_counter() - born[name])))
    paced = time.perf_counter()

    async def applied() -> bool:
        return sum(call.resource.plural == "deployments" for _, call in recording.writes) >= 2 * count

    await eventually("every teacher is applied", applied, seconds=120)
    latencies = []
    for name in names:
        ends = [at for at, call in recording.writes if call.resource.plural == "deployments" and of_job(call, name)]
        latencies.append(max(ends) - born[name])
    await _rest(recording)
    before, first = len(recording.writes), time.perf_counter()
    burst = [f"burst{number:03d}x" for number in range(count)]
    await _gather(burst, lambda name: api.create(bench_document(ours, name)))
    await _rest(recording)
    took = recording.writes[-1][0] - first
    lives = {name: [call for _, call in recording.writes[before:] if of_job(call, name)] for name in burst}
    stop.set()
    await running
    await recording.close()
    prepared = {name: [_moved(call, ours, bare) for call in calls] for name, calls in lives.items()}
    client = await connect(kubeconfig, Cluster, NoCalls())
    first = time.perf_counter()
    await _gather(burst, lambda name: _repeat(client, api, bare, name, prepared[name]))
    alone = time.perf_counter() - first
    await client.close()
    writes = statistics.mean(len(calls) for calls in lives.values())
    p99 = sorted(latencies)[max(0, int(len(latencies) * 0.99) - 1)]
    print(
        f"paced in {paced - born[names[0]]:.1f} s; {writes:.1f} writes a job; {took:.1f} s against {alone:.1f} s bare"
    )
    return {"of_bare_client": alone / took, "p99_seconds": p99}


async def _rest(recording: Recording) -> None:
    """Until nothing was written for two seconds."""
    while not recording.writes or time.perf_counter() - recording.writes[-1][0] < 2.0:
        await asyncio.sleep(0.1)


async def _gather(names: list[str], work: Any) -> None:
    gate = asyncio.Semaphore(TOGETHER)

    async def one(name: str) -> None:
        async with gate:
            await work(name)

    await asyncio.gather(*(one(name) for name in names))


def _moved(call: Any, ours: str, bare: str) -> Any:
    """The same write in another namespace, without preconditions."""
    body = json.loads(json.dumps(call.body).replace(f'"{ours}"', f'"{bare}"')) if call.body else None
    if body:
        for precondition in ("resourceVersion", "uid"):
            body.get("metadata", {}).pop(precondition, None)
    return replace(call, path=call.path.replace(f"/{ours}/", f"/{bare}/"), body=body)


async def _repeat(client: Cluster, api: Api, namespace: str, name: str, calls: list[Any]) -> None:
    """The writes of one job, in their order."""
    job = await api.create(bench_document(namespace, name))
    for call in calls:
        for owner in (call.body or {}).get("metadata", {}).get("ownerReferences", ()):
            owner["uid"] = job["metadata"]["uid"]
        await client._send(call)


async def measure_cold(api: Api, kubeconfig: Path, namespace: str, count: int) -> dict[str, float]:
    types = ["Accepted", "InputsChecked", "Succeeded", "ResourcesReleased"]
    names = [f"ended{number:05d}" for number in range(count)]

    async def make(name: str) -> None:
        job = await api.create(document(namespace, name))
        conditions = [
            {"type": kind, "status": "True", "reason": "Succeeded", "message": "", "lastTransitionTime": ENDED}
            for kind in types
        ]
        status = {"phase": "Succeeded", "attempt": 1, "startTime": ENDED, "completionTime": ENDED}
        await api.patch(job, {"status": {**status, "conditions": conditions}}, "status")

    await _gather(names, make)
    imported = subprocess.run(  # noqa: ASYNC221 - nothing else runs meanwhile
        [
            sys.executable,
            "-c",
            "import opd_operator.main, re; print(re.search(r'VmRSS:\\s+(\\d+)', open('/proc/self/status').read())[1])",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    bare_mib = int(imported.stdout) / 1024
    ready, mib = await _start_operator(kubeconfig, namespace)
    index = await asyncio.to_thread(_start_kopf, kubeconfig, namespace, count)
    print(f"ready after {ready:.1f} s, kopf index {index:.1f} s; {mib:.0f} MiB, {bare_mib:.0f} MiB after imports")
    return {"ready_seconds": ready, "of_kopf_index": ready / index, "memory": mib / (1.2 * bare_mib + 0.05 * count)}


async def _start_operator(kubeconfig: Path, namespace: str) -> tuple[float, float]:
    port = free_port()
    environment = os.environ | {
        "KUBECONFIG": str(kubeconfig),
        "OPD_OPERATOR_WATCH_NAMESPACES": namespace,
        "OPD_OPERATOR_LEADER_ELECTION": "false",
        "OPD_OPERATOR_HTTP_PORT": str(port),
    }
    started = time.perf_counter()
    process = subprocess.Popen(  # noqa: ASYNC220 - starts and returns at once
        [sys.executable, "-c", "from opd_operator.main import main; main()"], env=environment, stdout=subprocess.DEVNULL
    )
    try:
        async with aiohttp.ClientSession() as session:

            async def get(path: str) -> tuple[int, str]:
                try:
                    async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                        return answer.status, await answer.text()
                except aiohttp.ClientError:
                    return 0, ""

            async def ready() -> bool:
                return (await get("/readyz"))[0] == 200

            async def drained() -> bool:
                return "\nopd_operator_queue_depth 0.0" in (await get("/metrics"))[1]

            await eventually("ready", ready, seconds=300)
            took = time.perf_counter() - started
            await asyncio.sleep(5)
            await eventually("every job was looked at", drained, seconds=600)
        text = Path(f"/proc/{process.pid}/status").read_text()
        return took, int(text.partition("VmRSS:")[2].split()[0]) / 1024
    finally:
        process.terminate()
        process.wait(20)


def _start_kopf(kubeconfig: Path, namespace: str, count: int) -> float:
    """Seconds until the usual pattern has seen every object."""
    program = KOPF_INDEX.replace("COUNT", str(count)) + f"\nkopf.run(namespaces=[{namespace!r}], standalone=True)\n"
    environment = os.environ | {"KUBECONFIG": str(kubeconfig)}
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "seen":
                return time.perf_counter() - started
        raise RuntimeError("kopf ended before it had seen every object")
    finally:
        process.kill()
        process.wait(10)


def missed(case: str, measured: dict[str, float], bars: dict[str, float]) -> list[str]:
    """Bars that were missed, in words. `at_least_x` bounds x from below, `x` from above."""
    found = []
    for key, bar in bars.items():
        name = key.removeprefix("at_least_")
        value = measured[name]
        wrong = value < bar if key.startswith("at_least_") else value > bar
        print(f"{case}.{name}: {value:.2f} (bar {key}: {bar})")
        if wrong:
            found.append(f"{case}.{name} is {value:.2f}, the bar is {bar}")
    return found


async def bench(jobs: int, applied: int) -> int:
    bars = yaml.safe_load((ROOT / "tests" / "bench" / "bars.yaml").read_text())["operator"]
    name = f"bench-{os.getpid()}"
    layout = clusters.control_plane_up(name)
    try:
        for namespace in ("ours", "bare", "ended"):
            clusters.kubectl(layout, "create", "namespace", namespace)
        async with Api.connect(layout.kubeconfig) as api:
            apply = await measure_apply(api, layout.kubeconfig, "ours", "bare", applied)
            cold = await measure_cold(api, layout.kubeconfig, "ended", jobs)
        faults = missed("apply", apply, bars["apply"]) + missed("cold", cold, bars["cold"])
    finally:
        clusters.down(name, purge=True)
    print("\n".join(faults) or "every bar was reached")
    return 1 if faults else 0


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=5000, help="ended jobs of the cold start")
    parser.add_argument("--applied", type=int, default=30, help="jobs whose children are applied")
    chosen = parser.parse_args()
    return asyncio.run(bench(chosen.jobs, chosen.applied))


if __name__ == "__main__":
    sys.exit(main())
