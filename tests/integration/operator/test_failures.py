"""The table of failures (docs/failures.md) on a real API server: the jobs of a group fail side by side, each in its own way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opd_failures import GROUPS
from opd_failures.at_api import AT_API, Played
from opd_failures.row import Failure, Step, Then
from operator_jobs import Job, eventually
from operator_player import Player, Script

DEADLINE_SECONDS = 400.0
#: Steps at which a failure is done to a job that stands there; others are there from the start.
PHASE = {Step.STUDENT: "StartingStudent", Step.TRAINING: "Training"}
#: What the table's answer leads to when the fault happens once and no retries are allowed.
ENDS_FAILED = {Then.FAILS, Then.RETRIES, Then.RETRIES_STEP, Then.WAITS}
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
    try:
        await _happens(failure, played, job, script)
        await _is_answered(failure, job, script)
        script.hands_off.clear()
        await eventually("everything is freed", lambda: _is_free(job), seconds=DEADLINE_SECONDS, state=job.status)
    except AssertionError as wrong:
        return str(wrong)[:1500]
    return ""


async def _happens(failure: Failure, played: Played, job: Job, script: Script) -> None:
    if played.act is None:
        return
    await job.reaches(PHASE[failure.step], seconds=DEADLINE_SECONDS)
    if failure.step is Step.STUDENT:
        await eventually("the RayJob is there", lambda: job.children("ray.io/v1", "RayJob"), seconds=DEADLINE_SECONDS)
    await played.act(job, script)


async def _is_answered(failure: Failure, job: Job, script: Script) -> None:
    if failure.step in PHASE and failure.then is not Then.WAITS:
        await eventually("attempt 1 has ended", lambda: _first_end(job), seconds=DEADLINE_SECONDS, state=job.status)
        entry = await _first_end(job)
        released = failure.then is Then.RELEASES
        assert entry["reason"] == ("CapacityReleased" if released else failure.reason), entry
        assert entry.get("failureClass") == failure.failure_class, entry
        # From here on all is well, so that a job that may go on does.
        script.mute, script.idle, script.hold_at_step, script.no_room = False, False, None, {}
    if failure.then in ENDS_FAILED or failure.step not in PHASE:
        await job.reaches("Failed", seconds=DEADLINE_SECONDS)
        failed = await job.condition("Failed")
        exhausted = failure.then is Then.RETRIES
        assert failed["reason"] == ("BackoffLimitExceeded" if exhausted else failure.reason), failed
        assert failed["message"]
        restarts = (await job.status()).get("teacherRestarts", 0)
        assert restarts == (failure.then is Then.RESTARTS), f"{restarts} restarts"
    else:
        await job.reaches("Succeeded", seconds=DEADLINE_SECONDS)
        assert (await job.status())["attempt"] == 2


async def _first_end(job: Job) -> Any:
    attempts = (await job.status()).get("attempts") or []
    return next((entry for entry in attempts if entry["number"] == 1 and entry.get("endTime")), None)


async def _is_free(job: Job) -> bool:
    kinds = [("apps/v1", "Deployment"), ("v1", "Service"), ("ray.io/v1", "RayJob"), ("ray.io/v1", "RayCluster")]
    left = [name for kind in kinds for name in await job.names(*kind)]
    pods = [pod["metadata"]["labels"]["opd.dev/role"] for pod in await job.children("v1", "Pod")]
    released = (await job.condition("ResourcesReleased")).get("status") == "True"
    return not left and not {"teacher", "head", "worker"} & set(pods) and released
