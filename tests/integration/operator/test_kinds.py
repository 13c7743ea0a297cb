"""A cluster without KubeRay, which then gets it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from operator_jobs import eventually
from operator_player import Player

from opd_cluster import cluster


@pytest.fixture
def without_kuberay(control_plane: Any) -> Iterator[None]:
    """Other tests of the session get it back."""
    control_plane.kubectl("delete", "crd", "--ignore-not-found", "rayjobs.ray.io", "rayclusters.ray.io")
    yield
    cluster.install_crds(control_plane.layout, ours=False)


async def test_without_kuberay_no_teacher_starts_and_with_it_the_job_goes_on(
    without_kuberay: None, start_operator: Any, create_job: Any, player: Player, control_plane: Any
) -> None:
    operator = await start_operator()
    job = await create_job()

    async def told() -> bool:
        return (await job.condition("Progressing")).get("reason") == "KubeRayMissing"

    await eventually("KubeRayMissing", told, state=job.status)
    assert "Install KubeRay" in (await job.condition("Progressing"))["message"]
    assert not await job.names("apps/v1", "Deployment")
    complaints = [line for line in operator.logs() if "does not serve this kind" in line["message"]]
    assert {line["kind"] for line in complaints} == {"RayJob", "RayCluster"}
    assert len(complaints) == 2, "said once, not for ever"
    cluster.install_crds(control_plane.layout, ours=False)
    await job.reaches("Succeeded", seconds=90)
    assert operator.process.poll() is None
