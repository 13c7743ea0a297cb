"""Rule 21 on a real API server: what the claim allows is known before a pod exists."""

from __future__ import annotations

from typing import Any

from operator_api import Api
from operator_player import Player


def claim(namespace: str, mode: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data", "namespace": namespace},
        "spec": {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}},
    }


async def test_a_claim_for_one_pod_refuses_the_job(
    start_operator: Any, create_job: Any, api: Api, namespace: str
) -> None:
    await api.create(claim(namespace, "ReadWriteOncePod"))
    await start_operator()
    job = await create_job()
    await job.reaches("Failed")
    status = await job.status()
    assert [finding["code"] for finding in status["findings"] if finding["severity"] == "Error"] == ["ClaimAccessMode"]
    assert "ReadWriteMany" in (await job.condition("Accepted"))["message"]
    assert await job.names("batch/v1", "Job") == set()


async def test_a_claim_for_one_node_warns_to_the_end(
    start_operator: Any, create_job: Any, player: Player, api: Api, namespace: str
) -> None:
    await api.create(claim(namespace, "ReadWriteOnce"))
    await start_operator()
    job = await create_job()
    await job.reaches("Succeeded", seconds=60)
    assert ("ClaimAccessMode", "Warning") in [
        (finding["code"], finding["severity"]) for finding in (await job.status())["findings"]
    ]
