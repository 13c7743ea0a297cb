"""The processes that are measured: our operator, the kopf baseline, KubeRay; each alone with its kubeconfig."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from operator_jobs import free_port
from prometheus_client.parser import text_string_to_metric_families

from opd_cluster import parts

HERE = Path(__file__).resolve().parent
OURS = (sys.executable, "-c", "from opd_operator.main import main; main()")
#: Not a job's: one a few seconds, whatever the number of jobs.
LEASES = "leases"
WRITES = frozenset({"create", "update", "patch", "delete"})
READS = frozenset({"get", "list"})
STOP_SECONDS = 20.0


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def imports_mib() -> float:
    """Resident memory of a process that has imported the operator and does nothing."""
    program = "import os, opd_operator.main; print(open('/proc/self/status').read().partition('VmRSS:')[2].split()[0])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return int(answer.stdout) / 1024


@contextlib.contextmanager
def process(command: tuple[str, ...], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process while the block runs; asked to end, then killed."""
    told = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ} | environment
    with log.open("ab") as sink:
        running = subprocess.Popen(command, env=told, stdout=sink, stderr=sink)
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait(10)


@dataclass
class Calls:
    """API calls by (verb, kind with subresource), whatever the answer; without the Lease."""

    by_kind: dict[tuple[str, str], float] = field(default_factory=dict)

    def _sum(self, verbs: frozenset[str]) -> float:
        return sum(count for (verb, _), count in self.by_kind.items() if verb in verbs)

    @property
    def writes(self) -> float:
        """Calls that change something."""
        return self._sum(WRITES)

    @property
    def reads(self) -> float:
        """Gets and lists; a watch is none."""
        return self._sum(READS)

    def __sub__(self, before: Calls) -> Calls:
        found = {key: count - before.by_kind.get(key, 0.0) for key, count in self.by_kind.items()}
        return Calls({key: count for key, count in found.items() if count})


@dataclass
class OurOperator:
    """A running operator process of ours."""

    pid: int
    port: int
    started: float

    async def get(self, path: str) -> tuple[int, str]:
        """An endpoint; status 0 while nothing answers."""
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{self.port}{path}", timeout=aiohttp.ClientTimeout(total=30)) as answer,
            ):
                return answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            return 0, ""

    async def ready(self) -> bool:
        """Whether /readyz says so."""
        return (await self.get("/readyz"))[0] == 200

    async def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Samples of a metric with their labels."""
        _, text = await self.get("/metrics")
        return [
            (sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        ]

    async def value(self, name: str) -> float:
        """Sum of a metric's samples."""
        return sum(value for _, value in await self.samples(name))

    async def calls(self) -> Calls:
        """API calls so far."""
        found: dict[tuple[str, str], float] = {}
        for labels, value in await self.samples("opd_operator_api_calls_total"):
            if labels["kind"] != LEASES:
                key = (labels["verb"], labels["kind"])
                found[key] = found.get(key, 0.0) + value
        return Calls(found)

    async def rest(self, seconds: float, *, limit: float = 120.0) -> None:
        """Until it has not written for that long. It is asked seldom: an answer costs it as much as a pass."""
        written = -1.0
        async with asyncio.timeout(limit):
            while (now := (await self.calls()).writes) != written:
                written = now
                await asyncio.sleep(seconds)


@contextlib.contextmanager
def our_operator(
    kubeconfig: Path, namespace: str, log: Path, command: tuple[str, ...] = OURS, **settings: str
) -> Iterator[OurOperator]:
    """Our operator as it is shipped, for one namespace; `settings` by their names."""
    port = free_port()
    environment = {
        "KUBECONFIG": str(kubeconfig),
        "OPD_OPERATOR_WATCH_NAMESPACES": namespace,
        "OPD_OPERATOR_LEASE_NAMESPACE": namespace,
        "OPD_OPERATOR_HTTP_PORT": str(port),
        **{f"OPD_OPERATOR_{name.upper()}": value for name, value in settings.items()},
    }
    started = time.perf_counter()
    with process(command, environment, log) as running:
        yield OurOperator(running.pid, port, started)


@contextlib.contextmanager
def kopf_baseline(kubeconfig: Path, namespace: str, log: Path) -> Iterator[int]:
    """The plain kopf operator of baseline_kopf.py; its pid."""
    command = (sys.executable, "-m", "kopf", "run", "--standalone", "-n", namespace, str(HERE / "baseline_kopf.py"))
    with process(command, {"KUBECONFIG": str(kubeconfig)}, log) as running:
        yield running.pid


@contextlib.contextmanager
def kuberay(kubeconfig: Path, namespace: str, log: Path, concurrency: int) -> Iterator[int]:
    """KubeRay's own operator, built by tools/cluster; its pid."""
    command = [str(parts.binary(parts.KUBERAY)), "-kubeconfig", str(kubeconfig), "-watch-namespace", namespace]
    command += ["-enable-leader-election=false", "-reconcile-concurrency", str(concurrency)]
    command += ["-metrics-addr", f"127.0.0.1:{free_port()}", "-health-probe-bind-address", f"127.0.0.1:{free_port()}"]
    with process(tuple(command), {}, log) as running:
        yield running.pid
