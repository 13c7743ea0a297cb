"""The operator's real process under the service account that its chart makes, against a real API server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import pytest
import yaml
from operator_api import Api
from operator_jobs import Job, document, eventually, free_port
from operator_player import NODE, Player, Script
from prometheus_client.parser import text_string_to_metric_families

from opd_cluster import parts

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "opd-operator"
Manifest = dict[str, Any]
START = "from opd_operator.main import main; main()"


class ControlPlane(Protocol):
    """The fixture of tests/integration/conftest.py."""

    kubeconfig: Path

    def kubectl(self, *arguments: str, input_text: str | None = None) -> str: ...


class OperatorProcess:
    """One operator in a process of its own."""

    def __init__(self, kubeconfig: Path, namespace: str, identity: str, log: Path, settings: dict[str, str]) -> None:
        self.port = free_port()
        self.identity = identity
        self.log = log
        environment = {
            "KUBECONFIG": str(kubeconfig),
            "PATH": os.environ["PATH"],
            "HOME": os.environ["HOME"],
            "OPD_OPERATOR_WATCH_NAMESPACES": namespace,
            "OPD_OPERATOR_LEASE_NAMESPACE": namespace,
            "OPD_OPERATOR_IDENTITY": identity,
            "OPD_OPERATOR_HTTP_PORT": str(self.port),
            "OPD_OPERATOR_RETRY_BACKOFF_SECONDS": "1",
            "OPD_OPERATOR_RETRY_BACKOFF_MAX_SECONDS": "2",
            "OPD_OPERATOR_CAPACITY_BACKOFF_MIN_SECONDS": "2",
            "OPD_OPERATOR_CAPACITY_BACKOFF_MAX_SECONDS": "4",
            "OPD_OPERATOR_OLD_PODS_EXTRA_SECONDS": "5",
            "OPD_OPERATOR_TRAINING_STATUS_SECONDS": "1",
            **settings,
        }
        with log.open("ab") as sink:
            self.process = subprocess.Popen([sys.executable, "-c", START], env=environment, stdout=sink, stderr=sink)

    async def get(self, path: str) -> tuple[int, str]:
        """An endpoint; status 0 while nothing answers."""
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{self.port}{path}", timeout=aiohttp.ClientTimeout(total=5)) as answer,
            ):
                return answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            return 0, ""

    async def ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        return (await self.get("/readyz"))[0] == 200

    async def metric(self, metric: str, /, **labels: str) -> float:
        """Sum of the samples of that name and labels."""
        _, text = await self.get("/metrics")
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == metric and labels.items() <= sample.labels.items()
        )

    async def calls(self) -> dict[tuple[str, str], float]:
        """API calls by verb and kind that were answered with success."""
        _, text = await self.get("/metrics")
        found: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "opd_operator_api_calls_total" and sample.labels["code"][0] in "24":
                    key = (sample.labels["verb"], sample.labels["kind"])
                    found[key] = found.get(key, 0.0) + sample.value
        return found

    async def leads(self) -> bool:
        return await self.metric("opd_operator_leader") == 1

    def kill(self) -> None:
        """As a node does that loses its power."""
        self.process.kill()
        self.process.wait(10)

    def terminate(self) -> int:
        """As a kubelet does; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def logs(self) -> list[Manifest]:
        """All lines; fails on one that is no JSON."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


StartOperator = Callable[..., Awaitable[OperatorProcess]]


@pytest.fixture(scope="session")
def rendered_rbac() -> Callable[[str], list[Manifest]]:
    """The chart's account, roles and bindings for one namespace."""

    def render(namespace: str) -> list[Manifest]:
        command = [parts.binary(parts.HELM), "template", "opd-operator", CHART, "--namespace", namespace]
        command += ["--set", f"watchNamespaces={{{namespace}}}", "--set", "rbac.aggregate=false"]
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
        kinds = {"ServiceAccount", "Role", "RoleBinding"}
        return [manifest for manifest in yaml.safe_load_all(text) if manifest and manifest["kind"] in kinds]

    return render


@pytest.fixture
def operator_kubeconfig(
    control_plane: ControlPlane, namespace: str, tmp_path: Path, rendered_rbac: Callable[[str], list[Manifest]]
) -> Path:
    """A kubeconfig with a token of the chart's service account and nothing else."""
    manifests = yaml.safe_dump_all(rendered_rbac(namespace))
    control_plane.kubectl("apply", "-f", "-", input_text=manifests)
    token = control_plane.kubectl("-n", namespace, "create", "token", "opd-operator", "--duration=1h").strip()
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
async def start_operator(operator_kubeconfig: Path, namespace: str, tmp_path: Path) -> AsyncIterator[StartOperator]:
    """Starts operators of this test; whatever still runs at its end is killed."""
    started: list[OperatorProcess] = []

    async def start(identity: str = "operator-a", *, wait: bool = True, **settings: str) -> OperatorProcess:
        overrides = {f"OPD_OPERATOR_{name.upper()}": value for name, value in settings.items()}
        log = tmp_path / f"{identity}-{len(started)}.log"
        operator = OperatorProcess(operator_kubeconfig, namespace, identity, log, overrides)
        started.append(operator)
        if wait:
            await eventually(f"{identity} ready", operator.ready)
        return operator

    yield start
    for operator in started:
        if operator.process.poll() is None:
            operator.kill()
        print(f"--- {operator.identity}\n{operator.log.read_text()[-6000:]}")


@pytest.fixture
async def api(control_plane: ControlPlane) -> AsyncIterator[Api]:
    async with Api.connect(control_plane.kubeconfig) as connected:
        yield connected


@pytest.fixture(scope="session")
def played_node(control_plane: ControlPlane) -> Iterator[None]:
    """A Node object, or the pod garbage collector would remove the pods that are bound to it."""
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
    control_plane.kubectl("apply", "-f", "-", input_text=json.dumps(node))
    with contextlib.suppress(Exception):
        yield
    control_plane.kubectl("delete", "node", NODE, "--wait=false")


@pytest.fixture
async def player(api: Api, namespace: str, played_node: None) -> AsyncIterator[Player]:
    async with Player(api, namespace, Script()).playing() as playing:
        yield playing


CreateJob = Callable[..., Awaitable[Job]]


@pytest.fixture
def create_job(api: Api, namespace: str) -> CreateJob:
    """Creates OPDJobs of this test."""

    async def create(name: str = "math", **sections: Any) -> Job:
        await api.create(document(namespace, name, **sections))
        return Job(api, namespace, name)

    return create


@pytest.fixture
def settle() -> Callable[[float], Awaitable[None]]:
    """Lets time pass where the point is that nothing happens in it."""
    return asyncio.sleep
