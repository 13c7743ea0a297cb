"""A cluster with two GPU pools, one node each, beside the one of all other tests; it goes when these tests are done."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opd_e2e import Cluster, embedded
from opd_jobs import ROOT, TRAINER_PYTHON, Watcher

from opd_cluster import addons, cluster

SHAPE = cluster.Shape(gpu_nodes=2, gpus=4, pools=("teachers", "students"))


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    if os.environ.get("CONTEXT"):
        pytest.skip("pools are made, and a kubelet is killed, in the embedded cluster only")
    with embedded(f"{os.environ.get('OPD_CLUSTER', 'e2e')}-pools", SHAPE) as started:
        yield started


@pytest.fixture(scope="session")
def operator(running_cluster: Cluster) -> Cluster:
    assert running_cluster.layout is not None
    addons.install_operator(running_cluster.layout)
    return running_cluster


@pytest.fixture
def submit(operator: Any, namespace: str) -> Callable[[dict[str, Any]], Watcher]:
    """Apply an OPDJob on tiny models in the test's namespace."""
    folder = Path(operator.data) / "tiny"
    if not (folder / "prompts.jsonl").exists():
        subprocess.run([TRAINER_PYTHON, ROOT / "tests/support/tiny_job_files.py", folder], check=True, timeout=300)

    def apply(manifest: dict[str, Any]) -> Watcher:
        operator.apply(namespace, manifest)
        return Watcher(operator, namespace, manifest["metadata"]["name"])

    return apply
