"""The work queue, with a clock turned by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from opd_operator.workqueue import IDLE_TURN, Backoff, QueueClosed, WorkQueue


class HandClock:
    """An event loop's clock and timers that move only when told."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[HandTimer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., object], *args: object) -> HandTimer:
        timer = HandTimer(when, callback, args)
        self.timers.append(timer)
        return timer

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [timer for timer in self.timers if timer.due <= self.now]
        self.timers = [timer for timer in self.timers if timer.due > self.now]
        for timer in due:
            if not timer.cancelled:
                timer.callback(*timer.args)


class HandTimer:
    def __init__(self, due: float, callback: Callable[..., object], args: tuple[object, ...]) -> None:
        self.due, self.callback, self.args, self.cancelled = due, callback, args, False

    def when(self) -> float:
        return self.due

    def cancel(self) -> None:
        self.cancelled = True


class Seen:
    def __init__(self) -> None:
        self.depth = 0
        self.latencies: list[float] = []
        self.retries = 0

    def queue_depth(self, depth: int) -> None:
        self.depth = depth

    def queue_latency(self, seconds: float) -> None:
        self.latencies.append(seconds)

    def queue_retry(self) -> None:
        self.retries += 1


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def queue(clock: HandClock, seen: Seen) -> WorkQueue[str]:
    return WorkQueue(observer=seen, clock=clock, backoff=Backoff(base_seconds=1.0, limit_seconds=8.0))  # type: ignore[arg-type]


async def is_empty(queue: WorkQueue[str]) -> bool:
    getter = asyncio.ensure_future(queue.get())
    for _ in range(3):
        await asyncio.sleep(0)
    empty = not getter.done()
    getter.cancel()
    return empty


async def test_a_key_added_twice_is_handed_out_once(queue: WorkQueue[str], seen: Seen) -> None:
    queue.add("a")
    queue.add("a")
    queue.add("b")
    assert seen.depth == 2
    assert [await queue.get(), await queue.get()] == ["a", "b"]
    assert await is_empty(queue)


async def test_idle_keys_wait_for_all_others(queue: WorkQueue[str], seen: Seen) -> None:
    for key in ("a", "b", "c"):
        queue.add(key, idle=True)
    queue.add("d")
    queue.add("b")
    queue.add("d", idle=True)
    assert seen.depth == 4
    assert [await queue.get(), await queue.get()] == ["d", "b"]
    queue.add("e")
    assert [await queue.get() for _ in range(3)] == ["e", "a", "c"]
    assert await is_empty(queue)


async def test_an_idle_key_gets_its_turn_however_many_others_come(queue: WorkQueue[str]) -> None:
    queue.add("idle", idle=True)
    taken = []
    for number in range(2 * IDLE_TURN):
        queue.add(f"busy{number}")
        taken.append(await queue.get())
        queue.done(taken[-1])
    assert taken.index("idle") < IDLE_TURN


async def test_a_key_is_never_in_two_hands_and_no_event_is_lost(queue: WorkQueue[str]) -> None:
    queue.add("a")
    await queue.get()
    queue.add("a")
    assert await is_empty(queue)
    queue.done("a")
    assert await queue.get() == "a"
    queue.done("a")
    assert await is_empty(queue)


async def test_a_delayed_key_comes_when_its_time_is_due_and_the_shortest_delay_wins(
    queue: WorkQueue[str], clock: HandClock
) -> None:
    queue.add_after("a", 30)
    queue.add_after("a", 10)
    queue.add_after("a", 20)
    clock.advance(9.9)
    assert await is_empty(queue)
    clock.advance(0.2)
    assert await queue.get() == "a"
    queue.done("a")
    clock.advance(100)
    assert await is_empty(queue), "the longer delays were superseded"


async def test_an_event_overtakes_a_delay(queue: WorkQueue[str], clock: HandClock) -> None:
    queue.add_after("a", 30)
    queue.add("a")
    assert await queue.get() == "a"
    queue.done("a")
    clock.advance(60)
    assert await is_empty(queue)


async def test_a_delay_asked_for_by_the_pass_itself_survives_its_end(queue: WorkQueue[str], clock: HandClock) -> None:
    queue.add("a")
    await queue.get()
    queue.add_after("a", 5)
    queue.done("a")
    assert await is_empty(queue)
    clock.advance(5)
    assert await queue.get() == "a"


async def test_failures_back_off_exponentially_up_to_a_limit_and_success_resets(
    queue: WorkQueue[str], clock: HandClock, seen: Seen
) -> None:
    delays = []
    for _ in range(6):
        delays.append(queue.retry("a"))
        clock.advance(8.1)
        assert await queue.get() == "a"
        queue.done("a")
    for delay, ceiling in zip(delays, [1, 2, 4, 8, 8, 8], strict=True):
        assert ceiling / 2 <= delay <= ceiling
    assert seen.retries == 6
    queue.forget("a")
    assert queue.retry("a") <= 1


async def test_latency_is_the_time_between_due_and_handed_out(
    queue: WorkQueue[str], clock: HandClock, seen: Seen
) -> None:
    queue.add_after("a", 10)
    clock.advance(10)
    clock.advance(3)
    await queue.get()
    assert seen.latencies == [3.0]


async def test_the_age_of_the_oldest_pass_is_known(queue: WorkQueue[str], clock: HandClock) -> None:
    assert queue.longest_processing_seconds == 0
    queue.add("a")
    await queue.get()
    clock.advance(7)
    queue.add("b")
    await queue.get()
    assert queue.longest_processing_seconds == 7
    queue.done("a")
    assert queue.longest_processing_seconds == 0


async def test_a_dropped_key_leaves_nothing_behind(queue: WorkQueue[str], clock: HandClock) -> None:
    queue.retry("a")
    queue.add("b")
    queue.drop("a")
    queue.drop("b")
    clock.advance(100)
    assert queue.size == 0
    assert await is_empty(queue)
    assert queue.retry("a") <= 1, "its failures were forgotten"


async def test_ten_thousand_keys_that_come_and_go_leave_nothing_behind(queue: WorkQueue[str], clock: HandClock) -> None:
    for number in range(10_000):
        key = f"job-{number}"
        queue.add(key)
        assert await queue.get() == key
        queue.retry(key)
        queue.done(key)
        queue.drop(key)
    assert queue.size == 0
    assert not queue._failures
    assert not queue._again


async def test_closing_ends_every_waiting_worker(queue: WorkQueue[str]) -> None:
    workers = [asyncio.ensure_future(queue.get()) for _ in range(3)]
    await asyncio.sleep(0)
    queue.close()
    results = await asyncio.wait_for(asyncio.gather(*workers, return_exceptions=True), 1)
    assert all(isinstance(result, QueueClosed) for result in results)
