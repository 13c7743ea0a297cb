"""Published weights stay on the disk as long as some replica still reads them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from controller_fakes import FakeEngine, FakeLearner
from opd_testing.fake_engine import FakeReplica

from opd_trainer.controller.admission import Admission
from opd_trainer.controller.weights import Publisher
from opd_trainer.errors import Failure
from opd_trainer.interfaces import RolloutEngine
from opd_trainer.rollout.engines import fleet as fleet_module
from opd_trainer.rollout.engines.fleet import Fleet
from opd_trainer.rollout.engines.health import Health
from opd_trainer.storage import RunDirectory


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "MONITOR_SECONDS", 0.01)
    monkeypatch.setattr(fleet_module, "RESTART_BACKOFF_SECONDS", 0.001)


class ReadingReplica(FakeReplica):
    """A replica that imports for a while before it reads its weights."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.importing = asyncio.Event()

    async def start(self, weights: str, version: int) -> Failure | None:
        self.importing.set()
        failure = await super().start(weights, version)
        assert Path(weights, "model.txt").exists(), f"version {version} was pruned under engine {self.index}"
        return failure


def publisher(directory: RunDirectory, engine: RolloutEngine) -> Publisher:
    directory.create()
    return Publisher(directory, learner=FakeLearner(), engine=engine, admission=Admission(), drain=True)


def versions(directory: RunDirectory) -> list[int]:
    return sorted(int(folder.name.removeprefix("v")) for folder in directory.weights.glob("a*/v*"))


async def test_weights_from_which_a_replica_still_starts_are_kept_and_go_afterwards(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, 1)
    made: list[ReadingReplica] = []
    imported = asyncio.Event()
    died = asyncio.Event()

    def make(index: int) -> ReadingReplica:
        replica = ReadingReplica(index)
        if len(made) == 2:  # the restarted one
            replica.start_gate = imported
            died.set()
        made.append(replica)
        return replica

    fleet = Fleet(make, replicas=2, concurrency_per_replica=4, start_deadline=10.0, drain_deadline=10.0)
    publishing = publisher(directory, fleet)
    try:
        await publishing.start_engines(0)
        made[0].alive = False
        async with asyncio.timeout(10):
            await died.wait()
            await made[2].importing.wait()
        for version in (1, 2, 3):  # the other replica serves on
            await publishing.publish(version)
        assert versions(directory) == [0, 2, 3]
        imported.set()
        async with asyncio.timeout(10):
            while [health.state for health in fleet.health] != [Health.HEALTHY] * 2:
                await asyncio.sleep(0.005)
        assert [replica.version for replica in made[1:]] == [3, 3]
        assert len(fleet.health[0].restarts) == 1, "the restart went well at the first try"
        await publishing.publish(4)
        assert versions(directory) == [3, 4]
    finally:
        await fleet.stop()


async def test_an_engine_that_reads_only_when_it_is_told_keeps_two_versions(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, 1)
    engine = FakeEngine()
    engine.prepare()
    publishing = publisher(directory, engine)
    await publishing.start_engines(0)
    for version in (1, 2, 3):
        await publishing.publish(version)
    assert versions(directory) == [2, 3]
