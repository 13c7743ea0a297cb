"""One real cluster per session (the embedded one, or CONTEXT=), one namespace with the shared claim per test."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from opd_cluster import addons, cluster, full
from opd_cluster.errors import ClusterError
from opd_cluster.layout import Layout, existing, open_layout
from opd_cluster.shell import find_kubectl, run, wait_for

REPORTS: pytest.StashKey[dict[str, pytest.CollectReport]] = pytest.StashKey()
SHAPE = cluster.Shape(gpu_nodes=1, gpus=8)


class Cluster:
    """A running cluster and the few verbs that tests use on it."""

    def __init__(self, layout: Layout | None, context: str = "") -> None:
        self.layout, self.context = layout, context

    @property
    def data(self) -> Path:
        """The host directory behind every claim opd-local (embedded cluster only)."""
        if self.layout is None:
            pytest.skip("needs the embedded cluster's host directory")
        return self.layout.data

    def kubectl(self, *arguments: str, input_text: str | None = None, check: bool = True, timeout: float = 120) -> str:
        """kubectl as administrator; its stdout. Raises ClusterError with its message when it fails and `check` is on."""
        where = ["--kubeconfig", str(self.layout.kubeconfig)] if self.layout else ["--context", self.context]
        return run([find_kubectl(), *where, *arguments], input_text=input_text, check=check, timeout=timeout).stdout

    def apply(self, namespace: str, *manifests: dict[str, Any]) -> None:
        document = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.kubectl("apply", "-n", namespace, "-f", "-", input_text=json.dumps(document))

    def get(self, namespace: str, kind: str, name: str = "", selector: str = "") -> Any:
        """The object, or the list of objects of a kind (optionally with a label selector)."""
        words = [kind, *([name] if name else []), *(["-l", selector] if selector else [])]
        answer = json.loads(self.kubectl("get", "-n", namespace, "-o", "json", *words))
        return answer if name else answer["items"]

    def wait(self, what: str, condition: Callable[[], object], seconds: float, namespace: str = "") -> None:
        """Poll until the condition holds; a timeout tells what the namespace looks like."""
        wait_for(what, condition, seconds=seconds, hint=lambda: self.describe(namespace) if namespace else "")

    def describe(self, namespace: str) -> str:
        """Objects, events and the last log lines of a namespace: what a person would look at first."""
        parts = [
            self.kubectl(
                "get", "opd,rayjobs,deployments,jobs,pods,configmaps", "-n", namespace, "-o", "wide", check=False
            )
        ]
        parts.append(self.kubectl("get", "events", "-n", namespace, "--sort-by=.lastTimestamp", check=False)[-6000:])
        for pod in self.get(namespace, "pods"):
            name = pod["metadata"]["name"]
            log = self.kubectl("logs", "-n", namespace, name, "--all-containers", "--tail=40", check=False)
            parts.append(f"--- {name}\n{log}")
        return "\n".join(parts)


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    """CONTEXT=<kubeconfig context> if given, else the embedded cluster: reused if it runs already, else started and removed."""
    if context := os.environ.get("CONTEXT"):
        yield Cluster(None, context)
        return
    name = os.environ.get("OPD_CLUSTER", "e2e")
    was_up = name in existing() and cluster.is_up(open_layout(name))
    try:
        layout = full.up(name, SHAPE)
        full.load(layout, ["opd-operator", "opd-trainer"])
    except ClusterError as error:
        pytest.fail(f"{error}\n{error.hint}", pytrace=False)
    yield Cluster(layout)
    if not was_up:
        cluster.down(name)


@pytest.fixture(scope="session")
def operator(running_cluster: Cluster) -> Cluster:
    """The cluster with our operator installed by Helm from this checkout."""
    if running_cluster.layout is not None:
        addons.install_operator(running_cluster.layout)
    return running_cluster


@pytest.fixture(scope="session")
def sglang_image(running_cluster: Cluster) -> str:
    """The name of the trainer image with SGLang in it, loaded on the GPU node."""
    if running_cluster.layout is None:
        pytest.skip("the embedded cluster's SGLang image is needed")
    return full.load(running_cluster.layout, ["opd-trainer-sglang"])[0].name


@pytest.fixture(scope="session")
def sgl_kernel_standin(running_cluster: Cluster) -> str:
    """PYTHONPATH (with the claim mounted at /data) that lets the real SGLang start without a GPU."""
    source = Path(__file__).resolve().parents[1] / "support" / "sgl_kernel_standin"
    shutil.copytree(
        source, running_cluster.data / source.name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    return f"/data/{source.name}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    item.stash.setdefault(REPORTS, {})[report.when] = report
    return report


@pytest.fixture
def make_namespace(running_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Callable[[], str]]:
    """Makes namespaces with the claim opd-local; a failed test's report shows what was in them."""
    made: list[str] = []

    def make() -> str:
        made.append(f"test-{uuid.uuid4().hex[:8]}")
        running_cluster.kubectl("create", "namespace", made[-1])
        if running_cluster.layout is not None:
            addons.create_claim(running_cluster.layout, made[-1])
        return made[-1]

    yield make
    report = request.node.stash.get(REPORTS, {}).get("call")
    for namespace in made:
        if report is not None and report.failed:
            report.sections.append((f"namespace {namespace}", running_cluster.describe(namespace)))
        running_cluster.kubectl("delete", "namespace", namespace, "--wait=false")
        # The next test may need its accelerators; the rest of the namespace can vanish in the background.
        running_cluster.wait(
            "pods are gone", lambda name=namespace: not running_cluster.get(name, "pods"), 120, namespace
        )
        if running_cluster.layout is not None:
            running_cluster.kubectl("delete", "pv", f"opd-local-{namespace}", "--ignore-not-found")


@pytest.fixture
def namespace(make_namespace: Callable[[], str]) -> str:
    """A fresh namespace with the claim opd-local; everything in it is gone after the test."""
    return make_namespace()
