"""The teacher pool against real servers that hang, die, cut connections and come back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opd_testing.fake_teacher import fake_teachers, right_answer
from opd_testing.pool import config_for, once, pool_of, reset, sample, until

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import SampleError, TrainerError
from opd_trainer.teachers import client as client_module


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BACKOFF_SECONDS", (0.001, 0.01))


async def test_a_cut_connection_is_tried_again_without_using_up_retries(tmp_path: Path) -> None:
    async with fake_teachers(1) as (teacher,), pool_of(config_for(tmp_path, [teacher.url], retries=0)) as pool:
        teacher.behaviour = once(reset, times=3)
        item = sample()
        async with asyncio.timeout(30):
            await pool.score(item)
        assert item.teacher_logprobs is not None


async def test_a_sample_that_cuts_every_connection_fails_instead_of_circling_for_ever(tmp_path: Path) -> None:
    async with fake_teachers(1) as (teacher,), pool_of(config_for(tmp_path, [teacher.url], retries=0)) as pool:
        teacher.behaviour = once(reset, times=99)
        with pytest.raises(SampleError, match="broke 5 times"):
            async with asyncio.timeout(60):
                await pool.score(sample())


async def test_a_hanging_replica_is_left_after_the_timeout(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def hang(_: web.Request, body: dict[str, Any]) -> Any:
        await release.wait()
        return right_answer(body)

    async with (
        fake_teachers(2) as teachers,
        pool_of(config_for(tmp_path, [t.url for t in teachers], timeout=1)) as pool,
    ):
        teachers[0].behaviour = hang
        async with asyncio.timeout(30):
            for group in range(4):
                await pool.score(sample(group))
        release.set()


async def test_samples_are_held_while_no_replica_can_be_reached_and_go_on_when_one_is_back(tmp_path: Path) -> None:
    async with fake_teachers(1) as (teacher,), pool_of(config_for(tmp_path, [teacher.url], retries=0)) as pool:
        await teacher.stop()
        scoring = [asyncio.create_task(pool.score(sample(group))) for group in range(8)]
        await until(lambda: pool.unavailable == "teacher")
        assert not any(task.done() for task in scoring)
        await teacher.start()
        async with asyncio.timeout(30):
            await asyncio.gather(*scoring)
        assert pool.unavailable is None


async def test_a_server_that_still_loads_is_not_back_yet(tmp_path: Path) -> None:
    async with fake_teachers(1) as (teacher,), pool_of(config_for(tmp_path, [teacher.url], retries=0)) as pool:
        await teacher.stop()
        scoring = asyncio.create_task(pool.score(sample()))
        await until(lambda: pool.unavailable == "teacher")
        teacher.healthy = False
        await teacher.start()
        client = pool.clients["teacher"]
        await client._look(client.replicas[0])
        assert not client.replicas[0].reachable
        teacher.healthy = True
        async with asyncio.timeout(30):
            await scoring


async def test_a_held_sample_goes_on_when_another_request_shows_that_the_replica_is_there(tmp_path: Path) -> None:
    answering = asyncio.Event()

    async def behave(request: web.Request, body: dict[str, Any]) -> Any:
        if len(teacher.bodies) == 1:  # in flight while the other one's connection breaks
            await answering.wait()
            return right_answer(body)
        return cut_once(request, body)

    cut_once = once(reset)
    async with fake_teachers(1) as (teacher,), pool_of(config_for(tmp_path, [teacher.url], retries=0)) as pool:
        teacher.behaviour = behave
        teacher.healthy = False  # no probe finds the replica back: only the answer can tell
        first = asyncio.create_task(pool.score(sample(1)))
        await until(lambda: teacher.running == 1)
        held = asyncio.create_task(pool.score(sample(2)))
        await until(lambda: pool.unavailable == "teacher")
        answering.set()
        async with asyncio.timeout(15):
            await asyncio.gather(first, held)
        assert pool.unavailable is None


async def test_a_killed_teacher_loses_no_sample_in_flight(tmp_path: Path) -> None:
    started = asyncio.Event()

    async def slow(_: web.Request, body: dict[str, Any]) -> Any:
        started.set()
        await asyncio.sleep(30)
        return right_answer(body)

    async with (
        fake_teachers(2) as teachers,
        pool_of(config_for(tmp_path, [t.url for t in teachers], retries=0)) as pool,
    ):
        teachers[0].behaviour = slow
        items = [sample(group) for group in range(16)]
        scoring = [asyncio.create_task(pool.score(item)) for item in items]
        await asyncio.wait_for(started.wait(), 10)
        await teachers[0].stop()
        async with asyncio.timeout(30):
            await asyncio.gather(*scoring)
    assert all(item.teacher_logprobs is not None for item in items)


async def test_a_teacher_that_stays_away_ends_the_run_after_the_deadline(tmp_path: Path) -> None:
    config = config_for(tmp_path, ["http://127.0.0.1:1"], lifecycle={"teacherReadyDeadlineSeconds": 1})
    async with pool_of(config) as pool:
        with pytest.raises(TrainerError, match="could be reached for 1 s") as caught:
            async with asyncio.timeout(30):
                await pool.score(sample())
    assert caught.value.failure.reason is Reason.TEACHER_UNREACHABLE
    assert caught.value.failure.failure_class is FailureClass.TEACHER


async def test_new_addresses_of_a_name_are_found_when_the_old_ones_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_teachers(2) as (old, new):
        current = [old]

        async def resolve(url: str) -> list[Any]:
            from opd_trainer.teachers.resolver import Endpoint

            return [Endpoint(teacher.url, "teacher.svc", "teacher.svc", False) for teacher in current]

        monkeypatch.setattr(client_module, "resolve", resolve)
        async with pool_of(config_for(tmp_path, ["http://teacher.svc"], retries=0)) as pool:
            await pool.score(sample())
            await old.stop()
            current[:] = [new]
            async with asyncio.timeout(30):
                await pool.score(sample())
    assert (len(old.bodies), len(new.bodies)) == (1, 1)
