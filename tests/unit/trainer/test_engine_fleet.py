"""The fleet: choice, restart, weight updates and giving up, with replicas in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from opd_testing.fake_engine import FakeReplica

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import Failure, SampleError, TrainerError
from opd_trainer.rollout.engines import fleet as fleet_module
from opd_trainer.rollout.engines.fleet import MAX_CASUALTIES, Fleet
from opd_trainer.rollout.engines.health import RESTART_BUDGET, Health

BROKEN = Failure(FailureClass.INFRASTRUCTURE, Reason.ENGINE_FAILED, "no kernel image")
REFUSED = Failure(FailureClass.DATA, Reason.DATA_ERROR, "too long")


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "MONITOR_SECONDS", 0.01)
    monkeypatch.setattr(fleet_module, "RESTART_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(fleet_module, "RETRY_SECONDS", 0.001)


class Made:
    """Remembers every replica that the fleet made."""

    def __init__(self) -> None:
        self.replicas: list[FakeReplica] = []
        self.prepare: Callable[[FakeReplica], None] = lambda _: None

    def __call__(self, index: int) -> FakeReplica:
        replica = FakeReplica(index)
        self.prepare(replica)
        self.replicas.append(replica)
        return replica


@contextlib.asynccontextmanager
async def fleet_of(count: int, made: Made, *, deadline: float = 5.0) -> AsyncIterator[Fleet]:
    fleet = Fleet(made, replicas=count, concurrency_per_replica=4, start_deadline=deadline, drain_deadline=deadline)
    try:
        await fleet.start(Path("v0"), 0)
        yield fleet
    finally:
        await fleet.stop()


async def ask(fleet: Fleet, group: int = 1) -> int:
    result = await fleet.generate(np.array([group], np.int32), group_id=group, max_tokens=4)
    return int(result.response_ids[0])


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def test_samples_of_a_group_go_to_one_replica_and_groups_to_all() -> None:
    made = Made()
    async with fleet_of(3, made) as fleet:
        for group in range(30):
            for _ in range(2):
                await ask(fleet, group)
        assert fleet.concurrency == 12
    seen = [set(replica.prompts) for replica in made.replicas]
    assert all(seen)
    assert sum(map(len, seen)) == 30, "no group was split"


async def test_a_crowded_replica_gives_groups_to_the_others() -> None:
    made = Made()
    async with fleet_of(2, made) as fleet:
        gate = asyncio.Event()
        for replica in made.replicas:
            replica.gate = gate
        tasks = [asyncio.create_task(ask(fleet, 5)) for _ in range(8)]
        await until(lambda: sum(len(replica.prompts) for replica in made.replicas) == 8)
        gate.set()
        await asyncio.gather(*tasks)
    assert all(replica.prompts for replica in made.replicas)


async def test_new_weights_reach_every_replica_before_the_update_returns() -> None:
    made = Made()
    async with fleet_of(3, made) as fleet:
        await fleet.update_weights(Path("v1"), 1, abort=False)
        assert [replica.version for replica in made.replicas] == [1, 1, 1]
        assert [await ask(fleet, group) for group in range(6)] == [1] * 6


async def test_a_request_whose_engine_dies_is_answered_by_another_one() -> None:
    made = Made()
    async with fleet_of(2, made) as fleet:
        gate = asyncio.Event()
        made.replicas[0].gate = gate
        tasks = [asyncio.create_task(ask(fleet, group)) for group in range(10)]
        await until(lambda: sum(len(replica.prompts) for replica in made.replicas) == 10)
        made.replicas[0].lost = True
        gate.set()
        async with asyncio.timeout(10):
            assert await asyncio.gather(*tasks) == [0] * 10


async def test_a_dead_engine_comes_back_with_the_weights_of_the_moment() -> None:
    made = Made()
    async with fleet_of(1, made) as fleet:
        start_gate = asyncio.Event()
        made.prepare = lambda replica: setattr(replica, "start_gate", start_gate)
        made.replicas[0].alive = False
        await until(lambda: len(made.replicas) == 2)
        update = asyncio.create_task(fleet.update_weights(Path("v1"), 1, abort=False))
        waiting = asyncio.create_task(ask(fleet))
        await asyncio.sleep(0)
        assert not waiting.done()
        start_gate.set()
        async with asyncio.timeout(10):
            await update
            assert await waiting == 1
        assert made.replicas[1].weights == "v1"
        assert made.replicas[0].killed


async def test_a_load_that_fails_or_lies_replaces_the_engine() -> None:
    for flaw in ("load_failure", "reported_version"):
        made = Made()
        async with fleet_of(2, made) as fleet:
            setattr(made.replicas[0], flaw, BROKEN if flaw == "load_failure" else 7)
            async with asyncio.timeout(10):
                await fleet.update_weights(Path("v1"), 1, abort=True)
            await until(lambda fleet=fleet: all(health.state is Health.HEALTHY for health in fleet.health))
            assert len(made.replicas) == 3
            assert [await ask(fleet, group) for group in range(6)] == [1] * 6


async def test_an_engine_that_answers_probes_but_no_requests_is_replaced_and_the_request_survives() -> None:
    made = Made()
    async with fleet_of(1, made) as fleet:
        made.replicas[0].failures = [BROKEN] * 100
        async with asyncio.timeout(10):
            assert await ask(fleet) == 0
        assert len(made.replicas) == 2


async def test_a_request_that_breaks_engine_after_engine_fails_alone() -> None:
    made = Made()
    made.prepare = lambda replica: replica.failures.extend([BROKEN] * 3)
    async with fleet_of(1, made) as fleet:
        with pytest.raises(SampleError, match="no kernel image"):
            async with asyncio.timeout(10):
                await ask(fleet)
        assert len(made.replicas) == MAX_CASUALTIES


async def test_a_request_that_fails_while_others_succeed_is_given_up() -> None:
    made = Made()
    async with fleet_of(1, made) as fleet:
        replica = made.replicas[0]
        replica.failures = [BROKEN] * 100
        monitor = asyncio.create_task(_successes(fleet))
        with pytest.raises(SampleError):
            async with asyncio.timeout(10):
                await ask(fleet)
        monitor.cancel()
        assert len(made.replicas) == 1


async def _successes(fleet: Fleet) -> None:
    while True:
        fleet._slots[0].health = fleet._slots[0].health.request_passed()
        await asyncio.sleep(0)


async def test_failed_probes_replace_an_engine_whose_process_lives() -> None:
    made = Made()
    async with fleet_of(1, made) as fleet:
        made.replicas[0].answers = False
        await until(lambda: len(made.replicas) == 2 and fleet.health[0].state is Health.HEALTHY)


async def test_a_prompt_that_the_engine_refuses_fails_without_another_try() -> None:
    made = Made()
    async with fleet_of(2, made) as fleet:
        for replica in made.replicas:
            replica.failures = [REFUSED]
        with pytest.raises(SampleError, match="too long"):
            await ask(fleet)
        assert sum(len(replica.prompts) for replica in made.replicas) == 1
        assert all(health.state is Health.HEALTHY for health in fleet.health)


async def test_an_engine_that_dies_again_and_again_ends_the_run() -> None:
    made = Made()
    async with fleet_of(1, made) as fleet:
        made.prepare = lambda replica: setattr(replica, "start_failure", BROKEN)
        made.replicas[0].lost = True
        with pytest.raises(TrainerError, match="cannot be restarted") as caught:
            async with asyncio.timeout(10):
                await ask(fleet)
    assert caught.value.failure.failure_class is FailureClass.INFRASTRUCTURE
    assert caught.value.failure.reason is Reason.ENGINE_FAILED
    assert len(made.replicas) == 1 + RESTART_BUDGET


async def test_a_first_start_that_fails_says_why_and_is_not_retried() -> None:
    made = Made()
    made.prepare = lambda replica: setattr(replica, "start_failure", BROKEN)
    with pytest.raises(TrainerError, match="no kernel image"):
        async with fleet_of(1, made):
            pass
    assert len(made.replicas) == 1
    assert made.replicas[0].killed


async def test_an_engine_that_never_comes_up_is_given_up_after_the_deadline() -> None:
    made = Made()
    made.prepare = lambda replica: setattr(replica, "start_gate", asyncio.Event())
    with pytest.raises(TrainerError, match="did not come up") as caught:
        async with fleet_of(1, made, deadline=0.05):
            pass
    assert caught.value.failure.reason is Reason.PLACEMENT_FAILED


async def test_stop_ends_every_replica_and_can_be_repeated() -> None:
    made = Made()
    async with fleet_of(3, made) as fleet:
        await fleet.stop()
        await fleet.stop()
    assert all(replica.stopped and replica.killed for replica in made.replicas)
