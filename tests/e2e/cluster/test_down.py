"""A whole cluster comes back after a crash, and leaves nothing when it goes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from opd_cluster import addons, cgroups, cluster, full
from opd_cluster.layout import Layout, open_layout

NAME = "e2e-down"
SHAPE = cluster.Shape(gpu_nodes=2, gpus=4)


@pytest.fixture
def layout() -> Iterator[Layout]:
    yield open_layout(NAME)
    cluster.down(NAME, purge=True)


def containerds() -> list[int]:
    def is_ours(pid: int) -> bool:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read().startswith("containerd\0")

    return [pid for pid in cgroups.members(f"opd-{NAME}") if is_ours(pid)]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_up_after_a_crash_and_down_with_running_pods_leave_nothing(layout: Layout) -> None:
    assert cluster.leftovers(layout) == []
    assert full.up(NAME, SHAPE) == layout
    nodes = cluster.kubectl(layout, "get", "nodes", "-L", "opd.dev/pool", "--no-headers")
    assert [line.split()[-1] for line in nodes.splitlines()] == ["cpu", "gpu", "gpu"]
    (layout.data / "kept").write_text("models, runs and reports outlive the cluster")
    for pid in containerds():
        os.kill(pid, signal.SIGKILL)
    assert not cluster.is_up(layout)
    assert full.up(NAME, SHAPE) == layout
    running = cluster.kubectl(layout, "get", "pods", "-n", addons.KUBERAY_NAMESPACE, "--no-headers")
    assert "Running" in running
    assert len(cluster.leftovers(layout)) > 10
    cluster.down(NAME)
    assert cluster.leftovers(layout) == []
    assert (layout.data / "kept").exists()
