"""The table of failures (docs/failures.md) on a real API server: the jobs of a group fail side by side, each in its own way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opd_failures import GROUPS
from opd_failures.at_api import AT_API, AT_API_TEST, Played
from opd_failures.live import PHASE, differences, follow, seen, wait_until_free
from opd_failures.row import Failure, Step
from operator_jobs import Job, eventually
from operator_player import Player, Script

DEADLINE_SECONDS = 400.0
AT_ONCE = {name: found for name, group in GROUPS.items() if (found := [row for row in group if row.id in AT_API])}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", [pytest.param(group, marks=pytest.mark.long) for group in AT_ONCE])
async def test_failures_are_told_answered_and_cleaned_up(
    start_operator: Any, create_job: Any, player: Player, group: str
) -> None:
    failures = AT_ONCE[group]
    await start_operator(leader_election="false", head_not_ready_seconds="3", settle_seconds="2")
    found = await asyncio.gather(*(_fail(failure, create_job, player) for failure in failures))
    wrong = [f"{failure.id}: {what}" for failure, what in zip(failures, found, strict=True) if what]
    assert not wrong, "\n".join(wrong)


async def _fail(failure: Failure, create_job: Any, player: Player) -> str:
    """Bring the failure about; what is wrong with the operator's answer, "" when nothing is."""
    played = AT_API[failure.id]
    script = player.scripts[failure.id] = Script(**{"hold_at_step": 1, **played.script})
    lifecycle = {"backoffLimit": 0, "preemptionGraceSeconds": 3, **played.lifecycle}
    job: Job = await create_job(failure.id, lifecycle=lifecycle)

    def heal() -> None:
        script.mute, script.idle, script.hold_at_step, script.no_room, script.kuberay = False, False, None, {}, True

    try:
        await _happens(failure, played, job, script)
        await follow(failure, job, heal=heal, seconds=DEADLINE_SECONDS)
        script.hands_off.clear()
        await wait_until_free(job, DEADLINE_SECONDS)
    except AssertionError as wrong:
        return str(wrong)[:1500]
    return "; ".join(differences(failure, await seen(failure, job, "API server", AT_API_TEST)))


async def _happens(failure: Failure, played: Played, job: Job, script: Script) -> None:
    if played.act is None:
        return
    await job.reaches(PHASE[failure.step], seconds=DEADLINE_SECONDS)
    if failure.step is Step.STUDENT:
        await eventually("the RayJob is there", lambda: job.children("ray.io/v1", "RayJob"), seconds=DEADLINE_SECONDS)
    await played.act(job, script)
