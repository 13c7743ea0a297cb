"""The API server tries the children before anything is made; and the rules about pods say what it says."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from opd_testing.jobs import job_document
from opd_testing.rule_examples_pods import POD_EXAMPLES
from operator_api import Api
from operator_jobs import eventually

from opd_operator.errors import ApiError
from opd_operator.model import Memory, Snapshot
from opd_operator.observe import observe
from opd_operator.plan.draft import Draft
from opd_operator.plan.rehearse import children
from opd_operator.settings import Settings

Manifest = dict[str, Any]
#: The API server takes an image with a space, a claim of no possible name and a number that is none; the pod then waits for ever.
ONLY_OURS = ("spec.runtime.image", "spec.storage.claimName")
PODS = [
    item
    for item in POD_EXAMPLES
    if item.code == "PodField" and item.path not in ONLY_OURS and "'Gt'" not in str(item.refused)
]


async def refusals(api: Api, namespace: str, changes: Manifest) -> list[str]:
    """What the API server says to the children of a job."""
    metadata = {"metadata.namespace": namespace, "metadata.uid": "0123abcd-0000-0000-0000-000000000000"}
    document = job_document(changes | metadata)
    draft = Draft.begin(observe(Snapshot(job=document), datetime.now(UTC), Memory()), datetime.now(UTC), Settings())

    async def refusal(manifest: Manifest) -> str:
        try:
            await api.cluster.create(manifest, dry_run=True)
        except ApiError as error:
            return f"{manifest['kind']}: {error}"
        return ""

    said = await asyncio.gather(*(refusal(item.manifest) for item in children(draft)))
    return [text for text in said if text]


@pytest.mark.parametrize("example", PODS, ids=lambda example: f"{example.path}")
async def test_the_rules_about_pods_agree_with_the_api_server(api: Api, namespace: str, example: Any) -> None:
    assert await refusals(api, namespace, example.refused)
    assert await refusals(api, namespace, example.accepted) == []


@pytest.mark.parametrize(
    ("section", "named"),
    [
        (
            {"ray": {"head": {"template": {"spec": {"volumes": [{"name": "x", "hostPath": {"path": ""}}]}}}}},
            ("RayJob", "hostPath.path"),
        ),
        (
            {"ray": {"workers": {"template": {"spec": {"dnsPolicy": "Nowhere"}}}}},
            ("RayJob", "dnsPolicy"),
        ),
        ({"ray": {"head": {"template": {"spec": {"nodeNaame": "x"}}}}}, ("RayJob", "unknown field", "nodeNaame")),
        (
            {"runtime": {"securityContext": {"runAsUser": -1}}},
            ("securityContext.runAsUser",),
        ),
        (
            {"networkPolicy": {"metricsFrom": [{"ipBlock": {"cidr": "everywhere"}}]}},
            ("NetworkPolicy", "ipBlock.cidr"),
        ),
    ],
    ids=["head", "workers", "typo", "all pods", "network policy"],
)
async def test_what_only_the_api_server_knows_fails_the_job_before_anything_is_made(
    start_operator: Any, create_job: Any, section: Manifest, named: tuple[str, ...]
) -> None:
    operator = await start_operator()
    job = await create_job(**section)
    await job.reaches("Failed")
    failed = await job.condition("Failed")
    assert failed["reason"] == "InvalidSpec"
    for word in named:
        assert word in failed["message"]
    assert "startTime" not in await job.status()
    assert not await job.names("batch/v1", "Job")
    assert not await job.names("v1", "ConfigMap")
    await job.patch(dict.fromkeys(section))

    async def checks() -> bool:
        return bool(await job.names("batch/v1", "Job"))

    await eventually("the corrected job goes on", checks, state=job.status)
    assert not [line for line in operator.logs() if line["level"] == "error"]
