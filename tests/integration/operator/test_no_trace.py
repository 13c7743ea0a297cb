"""An OPDJob carries nothing of the operator but its status: nothing that grows, and nothing that keeps it from going away."""

from __future__ import annotations

from typing import Any

from operator_player import Player


async def test_the_operator_writes_neither_finalizers_nor_annotations_nor_labels_into_a_job(
    start_operator: Any, create_job: Any, player: Player
) -> None:
    await start_operator()
    job = await create_job()
    await job.reaches("Succeeded", seconds=60)
    found = await job.manifest()
    assert found is not None
    assert not set(found["metadata"]) & {"finalizers", "annotations", "labels", "ownerReferences"}
    writers = {(entry["manager"], entry.get("subresource", "")) for entry in found["metadata"]["managedFields"]}
    assert len(writers) == 2, "one wrote the spec, one the status"
    assert [subresource for _, subresource in writers if subresource] == ["status"]


async def test_no_child_has_a_finalizer_of_ours(start_operator: Any, create_job: Any, player: Player) -> None:
    player.script.hold_at_step = 1
    await start_operator()
    job = await create_job()
    await job.reaches("Training")
    kinds = [
        ("v1", "ConfigMap"),
        ("v1", "Secret"),
        ("v1", "Service"),
        ("apps/v1", "Deployment"),
        ("ray.io/v1", "RayJob"),
    ]
    children = [child for kind in kinds for child in await job.children(*kind)]
    assert len(children) >= 6
    assert [child["metadata"]["name"] for child in children if child["metadata"].get("finalizers")] == []
