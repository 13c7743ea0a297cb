"""A job that runs is edited into one that cannot start again: nothing is lost, and nothing is held until it is corrected."""

from __future__ import annotations

from typing import Any

import pytest
from operator_api import Api
from operator_jobs import eventually
from operator_player import Player

Manifest = dict[str, Any]


@pytest.mark.parametrize(
    ("wrong", "reason", "named"),
    [
        ({"args": ["--port", "9"]}, "InvalidSpec", "spec.teachers[0].args"),
        ({"template": {"spec": {"dnsPolicy": "Nowhere"}}}, "WriteRefused", "spec.template.spec.dnsPolicy"),
    ],
    ids=["by a rule", "by the API server"],
)
async def test_a_refused_edit_ends_no_attempt_and_starts_none(
    start_operator: Any, create_job: Any, player: Player, api: Api, wrong: Manifest, reason: str, named: str
) -> None:
    player.script.hold_at_step = 2
    await start_operator()
    job = await create_job()
    await job.reaches("Training")
    (teacher,) = (await job.manifest())["spec"]["teachers"]
    await job.patch({"teachers": [{**teacher, **wrong}]})
    (head,) = await api.list("v1", "Pod", job.namespace, "opd.dev/role=head")
    await api.delete(head, grace_seconds=0)

    async def waits() -> bool:
        return (await job.condition("Progressing"))["reason"] == reason

    async def holds_nothing() -> bool:
        return not await job.names("ray.io/v1", "RayJob") | await job.names("apps/v1", "Deployment")

    await eventually("a correction is waited for", waits, seconds=60, state=job.status)
    await eventually("nothing is held meanwhile", holds_nothing, state=job.status)
    accepted = await job.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", reason)
    assert named in accepted["message"]
    assert reason in await job.reasons()
    player.script.hold_at_step = None
    await job.patch({"teachers": [teacher]})
    await job.reaches("Succeeded", seconds=60)
    assert (await job.condition("Accepted"))["status"] == "True"
    assert ("step", "2:3") in player.log, "the second attempt went on from the saved step"
