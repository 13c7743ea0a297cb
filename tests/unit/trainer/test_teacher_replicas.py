"""Limits, breaker and choice of a replica."""

from __future__ import annotations

import asyncio

import pytest

from opd_trainer.teachers.replicas import (
    BREAKER_SECONDS,
    BREAKER_STRIKES,
    Replica,
    ReplicaGoneError,
    choose,
    preferred,
)
from opd_trainer.teachers.resolver import Endpoint, resolve


def replica(name: str, *, requests: int = 100, tokens: int | None = None) -> Replica:
    return Replica(Endpoint(f"http://{name}", name, name, False), requests, tokens)


def test_samples_of_a_group_share_a_replica_and_groups_spread_over_all() -> None:
    fleet = [replica(str(index)) for index in range(4)]
    chosen = [choose(fleet, "t", group, 0.0) for group in range(200)]
    assert all(choose(fleet, "t", group, 0.0) is first for group, first in enumerate(chosen))
    assert {item.endpoint.url for item in chosen if item} == {item.endpoint.url for item in fleet}


def test_losing_one_replica_moves_only_its_own_groups() -> None:
    fleet = [replica(str(index)) for index in range(4)]
    before = {group: preferred(fleet, "t", group) for group in range(200)}
    lost = fleet[2]
    lost.lost()
    for group, home in before.items():
        now = choose(fleet, "t", group, 0.0)
        assert now is not lost
        assert home is lost or now is home


def test_a_group_leaves_a_replica_that_has_far_more_to_do_than_the_mean() -> None:
    fleet = [replica("a"), replica("b")]
    home = preferred(fleet, "t", 7)
    other = next(item for item in fleet if item is not home)
    home.requests, other.requests = 20, 2
    assert choose(fleet, "t", 7, 0.0) is other
    home.requests, other.requests = 20, 15
    assert choose(fleet, "t", 7, 0.0) is home
    home.requests, other.requests = 4, 0
    assert choose(fleet, "t", 7, 0.0) is home, "too little to do for balancing to be worth the prefix"


def test_a_breaker_opens_after_failures_in_a_row_and_closes_with_time_or_success() -> None:
    fleet = [replica("a"), replica("b")]
    home = preferred(fleet, "t", 1)
    for _ in range(BREAKER_STRIKES):
        home.failed(100.0)
    assert choose(fleet, "t", 1, 100.0) is not home
    assert choose(fleet, "t", 1, 100.0 + BREAKER_SECONDS) is home
    for _ in range(BREAKER_STRIKES):
        home.failed(200.0)
    home.succeeded()
    assert choose(fleet, "t", 1, 200.0) is home


def test_a_resting_replica_is_used_when_there_is_no_other() -> None:
    only = replica("a")
    for _ in range(BREAKER_STRIKES):
        only.failed(0.0)
    assert choose([only], "t", 1, 0.0) is only


def test_nothing_is_chosen_when_nothing_can_be_reached() -> None:
    only = replica("a")
    only.lost()
    assert choose([only], "t", 1, 0.0) is None


async def test_requests_in_flight_are_bounded_and_the_first_to_wait_is_the_first_to_go() -> None:
    item = replica("a", requests=1)
    await item.acquire(1)
    order: list[int] = []

    async def enter(number: int) -> None:
        await item.acquire(1)
        order.append(number)

    waiting = [asyncio.create_task(enter(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert (item.requests, item.load) == (1, 4)
    for _ in range(3):
        item.release(1)
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert order == [0, 1, 2]


async def test_tokens_in_flight_are_bounded_and_a_giant_goes_alone() -> None:
    item = replica("a", tokens=100)
    await item.acquire(80)
    giant = asyncio.create_task(item.acquire(500))
    small = asyncio.create_task(item.acquire(10))
    await asyncio.sleep(0)
    assert not giant.done()
    assert not small.done(), "nobody overtakes: a giant must not starve"
    item.release(80)
    await giant
    assert not small.done()
    item.release(500)
    await small
    assert item.tokens == 10


async def test_a_request_that_gives_up_waiting_leaves_no_trace() -> None:
    item = replica("a", requests=1)
    await item.acquire(5)
    waiting = asyncio.create_task(item.acquire(5))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    item.release(5)
    assert (item.requests, item.tokens, item.load) == (0, 0, 0)


async def test_whoever_waits_at_a_lost_replica_is_sent_elsewhere() -> None:
    item = replica("a", requests=1)
    await item.acquire(1)
    waiting = asyncio.create_task(item.acquire(1))
    await asyncio.sleep(0)
    item.lost()
    with pytest.raises(ReplicaGoneError):
        await waiting


async def test_an_address_stands_for_itself_and_keeps_its_path() -> None:
    (endpoint,) = await resolve("http://127.0.0.1:30000/teacher/")
    assert endpoint.url == "http://127.0.0.1:30000/teacher"
    assert endpoint.host == "127.0.0.1:30000"


async def test_a_dual_stack_name_counts_each_replica_once() -> None:
    endpoints = await resolve("http://localhost:30000")
    assert [endpoint.url for endpoint in endpoints] == ["http://127.0.0.1:30000"]
    assert endpoints[0].host == "localhost:30000"
