"""One real cluster per session (the embedded one, or CONTEXT=), one namespace with the shared claim per test."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from opd_e2e import Cluster, embedded

from opd_cluster import addons, cluster, full

REPORTS: pytest.StashKey[dict[str, pytest.CollectReport]] = pytest.StashKey()
SHAPE = cluster.Shape(gpu_nodes=1, gpus=8)


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    """CONTEXT=<kubeconfig context> if given, else the embedded cluster: reused if it runs already, else started and removed."""
    if context := os.environ.get("CONTEXT"):
        yield Cluster(None, context)
        return
    with embedded(os.environ.get("OPD_CLUSTER", "e2e"), SHAPE) as started:
        yield started


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
