"""Leader election against a Lease in memory, with a clock per replica."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from opd_operator.errors import ApiError, Unreachable
from opd_operator.leader import LeaderElection, LeaseSettings
from opd_operator.resources import Resource

Manifest = dict[str, Any]


class LeaseStore:
    """One Lease with optimistic locking, as the API server keeps it."""

    def __init__(self) -> None:
        self.lease: Manifest | None = None
        self.version = 0
        self.down = False
        self.writes = 0

    async def get(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        self._check()
        return copy.deepcopy(self.lease)

    async def create(self, manifest: Manifest, *, fenced: bool = True) -> Manifest:
        self._check()
        if self.lease is not None:
            raise ApiError(409, "AlreadyExists", "exists")
        return self._store(manifest)

    async def replace(self, manifest: Manifest, *, fenced: bool = True) -> Manifest:
        self._check()
        assert self.lease is not None
        if manifest["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "changed")
        return self._store(manifest)

    def _check(self) -> None:
        if self.down:
            raise Unreachable("down")

    def _store(self, manifest: Manifest) -> Manifest:
        self.version += 1
        self.writes += 1
        self.lease = copy.deepcopy(manifest)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.lease)

    @property
    def holder(self) -> str:
        assert self.lease is not None
        return str(self.lease["spec"]["holderIdentity"])


class Replica:
    def __init__(self, store: LeaseStore, identity: str) -> None:
        self.now = 1000.0
        self.changes: list[bool] = []
        settings = LeaseSettings(namespace="opd", name="opd-operator", identity=identity)
        self.election = LeaderElection(store, settings, on_change=self.changes.append, clock=lambda: self.now)

    async def live(self, seconds: float) -> None:
        """Steps every two seconds, as `run` does."""
        for _ in range(int(seconds // 2)):
            self.now += 2
            await self.election.step()


@pytest.fixture
def store() -> LeaseStore:
    return LeaseStore()


async def test_the_first_replica_leads_and_the_second_waits(store: LeaseStore) -> None:
    first, second = Replica(store, "a"), Replica(store, "b")
    await first.election.step()
    await second.election.step()
    assert first.election.leading
    assert not second.election.elected.is_set()
    assert store.holder == "a"


async def test_a_living_leader_is_never_replaced(store: LeaseStore) -> None:
    first, second = Replica(store, "a"), Replica(store, "b")
    for _ in range(60):
        await first.live(2)
        await second.live(2)
    assert first.changes == [True]
    assert second.changes == []


async def test_a_dead_leader_is_replaced_within_twenty_seconds(store: LeaseStore) -> None:
    first, second = Replica(store, "a"), Replica(store, "b")
    await first.election.step()
    await second.election.step()
    await second.live(12)
    assert not second.election.leading, "the term of the dead leader has not ended"
    await second.live(8)
    assert second.election.leading
    assert store.holder == "b"
    assert store.lease is not None
    assert store.lease["spec"]["leaseTransitions"] == 2


async def test_a_released_lease_is_taken_at_the_next_look(store: LeaseStore) -> None:
    first, second = Replica(store, "a"), Replica(store, "b")
    await first.election.step()
    await second.election.step()
    await first.election.release()
    assert not first.election.leading
    await second.live(2)
    assert second.election.leading


async def test_a_leader_that_cannot_renew_stops_writing_before_others_may_start(store: LeaseStore) -> None:
    first, second = Replica(store, "a"), Replica(store, "b")
    await first.election.step()
    await second.election.step()
    first_api_down = Down(store)
    first.election._api = first_api_down
    overlap = []
    for _ in range(10):
        await first.live(2)
        await second.live(2)
        overlap.append(first.election.leading and second.election.leading)
    assert not any(overlap)
    assert not first.election.leading
    assert second.election.leading


class Down:
    """The way of one replica to the API server is cut."""

    def __init__(self, store: LeaseStore) -> None:
        self.store = store

    async def get(self, *_: Any, **__: Any) -> Manifest | None:
        raise Unreachable("cut")

    create = replace = get  # type: ignore[assignment]


async def test_a_short_outage_does_not_cost_the_leadership(store: LeaseStore) -> None:
    first = Replica(store, "a")
    await first.election.step()
    store.down = True
    await first.live(6)
    assert first.election.leading
    store.down = False
    await first.live(2)
    assert first.changes == [True]


async def test_a_leader_stops_to_write_between_two_looks_when_its_renewal_is_too_old(store: LeaseStore) -> None:
    first = Replica(store, "a")
    await first.election.step()
    first.now += 10
    assert first.election.elected.is_set()
    assert not first.election.leading, "a loop that was stuck must not write when it wakes up"


async def test_clocks_of_two_machines_may_differ_by_hours(store: LeaseStore) -> None:
    first, second = Replica(store, "a"), Replica(store, "b")
    await first.election.step()
    assert store.lease is not None
    store.lease["spec"]["renewTime"] = "2001-01-01T00:00:00.000000Z"
    await second.election.step()
    assert not second.election.elected.is_set()


async def test_a_restart_under_the_same_name_takes_its_own_lease_at_once(store: LeaseStore) -> None:
    await Replica(store, "a").election.step()
    again = Replica(store, "a")
    await again.election.step()
    assert again.election.leading


async def test_two_replicas_that_create_at_once_get_one_leader(store: LeaseStore) -> None:
    class Late(LeaseStore):
        async def get(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
            return None

    late = Late()
    first, second = Replica(late, "a"), Replica(late, "b")
    await first.election.step()
    await second.election.step()
    assert [first.election.leading, second.election.leading] == [True, False]
