"""A newer CRD under a running operator, and operators of other versions under a running job."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from operator_api import Api
from operator_jobs import eventually
from operator_player import Player

from opd_cluster import cluster

Manifest = dict[str, Any]
CHILDREN = (("apps/v1", "Deployment"), ("v1", "Service"), ("ray.io/v1", "RayJob"))


def schema(crd: Manifest, part: str) -> Manifest:
    """Properties of spec or status."""
    properties: Manifest = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"][part]["properties"]
    return properties


@pytest.fixture
def newer_crd(control_plane: Any) -> Iterator[str]:
    """Our CRD as a later version has it: a field more in spec and in status. Other tests get this version's back."""
    crd = json.loads(control_plane.kubectl("get", "crd", "opdjobs.opd.dev", "-o", "json"))
    newer = copy.deepcopy(crd)
    for key in ("resourceVersion", "uid", "creationTimestamp", "managedFields", "generation"):
        newer["metadata"].pop(key, None)
    newer.pop("status", None)
    for part in ("spec", "status"):
        schema(newer, part)["novelty"] = {"type": "string"}
    yield json.dumps(newer)
    cluster.install_crds(control_plane.layout, ours=True)


async def identities(job: Any) -> dict[str, tuple[str, int]]:
    """UID and generation of every child that a running job rests on."""
    found = {}
    for kind in CHILDREN:
        for child in await job.children(*kind):
            metadata = child["metadata"]
            found[f"{kind[1]}/{metadata['name']}"] = (metadata["uid"], metadata.get("generation", 0))
    return found


async def test_a_newer_crd_and_other_operators_touch_no_running_job(
    start_operator: Any, create_job: Any, player: Player, api: Api, control_plane: Any, newer_crd: str
) -> None:
    player.script.hold_at_step = 1
    operator = await start_operator("this-version")
    job = await create_job()
    await job.reaches("Training")
    before = await identities(job)
    assert {name.partition("/")[0] for name in before} == {kind for _, kind in CHILDREN}

    # The chart's new CRD comes first, and the old operator still runs.
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input_text=newer_crd)
    other = await create_job("other")
    await other.reaches("Training")

    # The new operator has other images, and writes what this version does not know.
    assert operator.terminate() == 0
    newer = await start_operator("newer", trainer_image="opd-trainer:9.9.9")
    await eventually("the newer one leads", newer.leads)
    manifest = await job.manifest()
    assert manifest is not None
    conditions = [*manifest["status"]["conditions"], {**manifest["status"]["conditions"][0], "type": "Novelty"}]
    told = {"status": {"novelty": "of a later version", "conditions": conditions}}
    assert await api.patch(manifest, told, subresource="status") is not None
    player.script.hold_at_step = 2
    await eventually("step 2 is told", lambda: _step(job, 2), state=job.status)
    assert await identities(job) == before

    # And back again.
    assert newer.terminate() == 0
    await start_operator("this-version-again")
    player.script.hold_at_step = 3
    await eventually("step 3 is told", lambda: _step(job, 3), state=job.status)
    assert await identities(job) == before
    player.script.hold_at_step = None
    for each in (job, other):
        await each.reaches("Succeeded", seconds=60)
        assert (await each.status())["attempt"] == 1
    assert [what for what, _ in player.log].count("rayjob seen") == 2


async def test_an_option_of_a_newer_crd_is_refused_and_never_ignored(
    start_operator: Any, create_job: Any, player: Player, control_plane: Any, newer_crd: str
) -> None:
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input_text=newer_crd)
    await start_operator()
    job = await create_job(novelty="please")
    await job.reaches("Failed")
    assert "spec.novelty" in (await job.condition("Failed"))["message"]
    for kind in CHILDREN:
        assert not await job.children(*kind)


async def _step(job: Any, step: int) -> bool:
    return bool((await job.status()).get("training", {}).get("step", 0) >= step)
