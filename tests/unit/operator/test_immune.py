"""Mistakes that other operators made (docs/immune.md), where one look at a child or a plan shows that we do not make them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from opd_world import World, job_document

from opd_api.v1alpha1 import OPDJob
from opd_operator.children import render
from opd_operator.model import Manifest
from opd_operator.settings import Settings

QUEUE = "kueue.x-k8s.io/queue-name"


def children(document: Manifest) -> list[Manifest]:
    return render(OPDJob.parse(document), Settings())


def the(kind: str, document: Manifest | None = None) -> Manifest:
    return next(child for child in children(document or job_document()) if child["kind"] == kind)


def containers(node: Any) -> Iterator[Manifest]:
    """Every container of a manifest, wherever it is nested."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inner:
        if key in ("containers", "initContainers"):
            yield from value
        yield from containers(value)


def test_the_number_of_workers_is_fixed_and_nothing_scales_them() -> None:
    cluster = the("RayJob", job_document(training={"steps": 10, "gpus": 4}))["spec"]["rayClusterSpec"]
    assert not cluster.get("enableInTreeAutoscaling")
    (group,) = cluster["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] > 0


def test_every_attempt_has_a_ray_cluster_of_its_own() -> None:
    spec = the("RayJob")["spec"]
    assert "rayClusterSpec" in spec
    assert not {"clusterSelector", "jobId", "submitterPodTemplate"} & set(spec)


def test_no_container_gets_a_memory_limit_that_nobody_asked_for() -> None:
    found = [container for child in children(job_document()) for container in containers(child)]
    assert len(found) >= 4
    for container in found:
        assert "memory" not in container.get("resources", {}).get("limits", {}), container["name"]


def test_a_queue_label_of_the_job_does_not_reach_its_children() -> None:
    world = World()
    world.job["metadata"]["labels"] = {QUEUE: "team-queue"}
    world.job["metadata"]["annotations"] = {QUEUE: "team-queue"}
    world.training()
    assert len(world.created) > 8
    assert QUEUE not in json.dumps([world.objects[key] for key in world.objects])


@pytest.mark.parametrize("reach", ["settle", "ready", "training"])
def test_a_suspended_job_is_not_looked_at_again(reach: str) -> None:
    world = World()
    getattr(world, reach)()
    world.edit(suspend=True)
    world.settle()
    if world.phase == "Suspending":
        world.final("Preempted")
        world.settle()
    assert world.phase == "Suspended"
    made = world.step()
    assert (made.requeue_after, made.status, made.events) == (None, None, ())


def test_a_change_of_replicas_by_a_scaler_is_left_alone() -> None:
    world = World().training()
    world.get("Deployment", "math-teacher-big")["spec"]["replicas"] = 3
    world.settle()
    world.heartbeat(2)
    world.after(60)
    assert world.get("Deployment", "math-teacher-big")["spec"]["replicas"] == 3
