"""A fleet of student servers behind one door: `interfaces.RolloutEngine`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import Failure, SampleError, TrainerError
from opd_trainer.interfaces import GenerateResult
from opd_trainer.rollout.engines.health import Health, ReplicaHealth
from opd_trainer.rollout.engines.replica import ReplicaHandle, ReplicaLostError

log = logging.getLogger(__name__)

MONITOR_SECONDS = 2.0
#: A probe that takes longer is a strike. Long, because a busy engine is no dead one.
PROBE_SECONDS = 30.0
STOP_SECONDS = 20.0
RESTART_BACKOFF_SECONDS = 2.0
#: Engines that one request may see fail before it is taken for the one that kills them, and its tries in all.
MAX_CASUALTIES = 3
MAX_TRIES = 12
#: Pause before the same request goes out again: a server that is dying refuses at once, its end shows a moment later.
RETRY_SECONDS = 0.5
#: A group leaves its replica when that one has this many times the mean of running requests.
OVERLOAD = 1.5

MakeReplica = Callable[[int], ReplicaHandle]


@dataclass(slots=True, eq=False)
class Slot:
    """A place in the fleet; the replica in it may be replaced."""

    index: int
    handle: ReplicaHandle
    health: ReplicaHealth = field(default_factory=ReplicaHealth)
    running: int = 0
    restart: asyncio.Task[None] | None = None
    #: Serialises weight loads of this replica.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Fleet:
    """Chooses a replica for each request, watches all of them, restarts what dies, loads weights everywhere."""

    def __init__(
        self,
        make: MakeReplica,
        *,
        replicas: int,
        concurrency_per_replica: int,
        start_deadline: float,
        drain_deadline: float,
        describe_resources: Callable[[], str] = lambda: "",
    ) -> None:
        self._make = make
        self._count = replicas
        self._per_replica = concurrency_per_replica
        self._start_deadline = start_deadline
        self._drain_deadline = drain_deadline
        self._describe_resources = describe_resources
        self._slots: list[Slot] = []
        self._weights, self._version = "", 0
        #: Replicas that read a version from the disk now, by version.
        self._readers: Counter[int] = Counter()
        self._changed = asyncio.Event()
        self._monitor: asyncio.Task[None] | None = None
        self._broken: Failure | None = None
        self._stopping = False

    @property
    def concurrency(self) -> int:
        """Requests that are useful in flight over the whole fleet."""
        return self._count * self._per_replica

    @property
    def health(self) -> list[ReplicaHealth]:
        """Health of every replica, by index."""
        return [slot.health for slot in self._slots]

    @property
    def reading(self) -> frozenset[int]:
        """Versions that some replica reads from the disk now: a restart takes its time, and `update_weights` does not wait."""
        return frozenset(self._readers)

    @contextlib.contextmanager
    def _newest(self) -> Iterator[tuple[str, int]]:
        """Folder and version of the moment, which count as read until the block ends."""
        weights, version = self._weights, self._version
        self._readers[version] += 1
        try:
            yield weights, version
        finally:
            self._readers -= Counter([version])  # unlike a subtraction of 1 this forgets what nobody reads

    def prepare(self) -> None:
        """Let the replicas' processes come up; `start` waits for them and gives them weights."""
        if not self._slots:
            self._slots = [Slot(index, self._make(index)) for index in range(self._count)]

    async def start(self, weights: Path, version: int) -> None:
        """Bring every replica up. Raises TrainerError with what is missing or what failed."""
        self._weights, self._version = str(weights), version
        self.prepare()
        failures = await asyncio.gather(*(self._bring_up(slot) for slot in self._slots))
        for failure in filter(None, failures):
            raise TrainerError(failure.failure_class, failure.reason, failure.message)
        self._monitor = asyncio.create_task(self._watch(), name="fleet-monitor")

    async def _bring_up(self, slot: Slot) -> Failure | None:
        """Place, start, load the weights of the moment; leaves the slot HEALTHY or returns why not."""
        deadline = time.monotonic() + self._start_deadline
        try:
            await slot.handle.placed(self._start_deadline)
            with self._newest() as (weights, version):
                async with asyncio.timeout(max(1.0, deadline - time.monotonic())):
                    if failure := await slot.handle.start(weights, version):
                        return failure
            slot.health = slot.health.started().loaded(version, self._version)
            while slot.health.state is Health.STALE:
                if failure := await self._load(slot, abort=False):
                    return failure
        except TimeoutError:
            return Failure(
                FailureClass.INFRASTRUCTURE,
                Reason.PLACEMENT_FAILED,
                f"engine {slot.index} did not come up within {self._start_deadline:.0f} s"
                f" ({self._describe_resources()})",
            )
        except ReplicaLostError as error:
            return Failure(FailureClass.INFRASTRUCTURE, Reason.ENGINE_FAILED, f"engine {slot.index} died: {error}")
        log.info("engine %d serves version %d", slot.index, self._version)
        self._announce()
        return None

    async def generate(
        self, prompt_ids: NDArray[np.int32], *, group_id: int, max_tokens: int, top_k: int = 0
    ) -> GenerateResult:
        """One response. Raises SampleError for DATA faults and TrainerError when the fleet is broken."""
        casualties: list[ReplicaHandle] = []
        failure = Failure(FailureClass.INFRASTRUCTURE, Reason.ENGINE_FAILED, "")
        for _ in range(MAX_TRIES):
            slot = await self._pick(group_id)
            handle = slot.handle
            slot.running += 1
            try:
                outcome = await handle.generate(prompt_ids, max_tokens, top_k)
            except ReplicaLostError as error:
                outcome = Failure(FailureClass.INFRASTRUCTURE, Reason.ENGINE_FAILED, str(error))
                self._dead(slot, handle, str(error))
            finally:
                slot.running -= 1
            if isinstance(outcome, GenerateResult):
                slot.health = slot.health.request_passed()
                return outcome
            if outcome.failure_class is FailureClass.DATA:
                raise SampleError(outcome)
            failure = outcome
            if not any(handle is casualty for casualty in casualties):
                casualties.append(handle)
            self._request_failed(slot, handle, outcome)
            if len(casualties) >= MAX_CASUALTIES:
                break
            await asyncio.sleep(RETRY_SECONDS)
        raise SampleError(failure)

    def _request_failed(self, slot: Slot, handle: ReplicaHandle, failure: Failure) -> None:
        if slot.handle is not handle:
            return
        log.warning("engine %d failed a request: %s", slot.index, failure.message)
        slot.health = slot.health.request_failed()
        if slot.health.state is Health.DEAD:
            self._dead(slot, handle, failure.message)

    async def _pick(self, group: int) -> Slot:
        """The replica for a request; waits for one, at most the start deadline."""
        deadline = time.monotonic() + self._start_deadline
        while True:
            if self._broken is not None:
                raise TrainerError(self._broken.failure_class, self._broken.reason, self._broken.message)
            if slot := self._choose(group):
                return slot
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise TrainerError(
                    FailureClass.INFRASTRUCTURE,
                    Reason.ENGINE_FAILED,
                    f"no engine became ready within {self._start_deadline:.0f} s: "
                    + ", ".join(f"{slot.index} {slot.health.state}" for slot in self._slots),
                ) from None

    def _choose(self, group: int) -> Slot | None:
        """All samples of a group go to one replica (shared prefix) unless it has far more to do than the mean."""
        serving = [slot for slot in self._slots if slot.health.state is Health.HEALTHY]
        serving = serving or [slot for slot in self._slots if slot.health.serves]
        if not serving:
            return None

        def weight(slot: Slot) -> bytes:
            return hashlib.blake2b(f"{group}\0{slot.index}".encode(), digest_size=8).digest()

        first = max(serving, key=weight)
        mean = sum(slot.running for slot in serving) / len(serving)
        if first.running >= self._per_replica // 2 and first.running > OVERLOAD * mean:
            return min(serving, key=lambda slot: slot.running)
        return first

    async def update_weights(self, weights: Path, version: int, *, abort: bool) -> None:
        """New weights on every replica. Returns when every replica that lives serves them, at least one.

        Raises TrainerError when none does.
        """
        self._weights, self._version = str(weights), version
        living = [slot for slot in self._slots if slot.health.serves or slot.health.state is Health.STALE]
        for slot in living:
            slot.health = slot.health.outdated()
        await asyncio.gather(*(self._refit(slot, abort=abort) for slot in living))
        await self._pick(0)

    async def _refit(self, slot: Slot, *, abort: bool) -> None:
        handle = slot.handle
        try:
            async with asyncio.timeout(self._start_deadline if abort else self._drain_deadline):
                failure = await self._load(slot, abort=abort)
            message = failure.message if failure else ""
        except TimeoutError:
            message = "weights were not loaded in time"
        except ReplicaLostError as error:
            message = str(error)
        if message:
            self._dead(slot, handle, message)

    async def _load(self, slot: Slot, *, abort: bool) -> Failure | None:
        """Load the weights of the moment into one replica. Raises ReplicaLostError."""
        async with slot.lock:
            with self._newest() as (weights, version):
                if slot.health.version == version and slot.health.serves:
                    return None
                if failure := await slot.handle.load(weights, version, abort):
                    return failure
            status = await slot.handle.status()
            if status.version != version:
                return Failure(
                    FailureClass.INFRASTRUCTURE,
                    Reason.ENGINE_FAILED,
                    f"engine {slot.index} reports version {status.version} after loading {version}",
                )
            slot.health = slot.health.loaded(version, self._version)
            self._announce()
        return None

    async def _watch(self) -> None:
        """Probe every replica; one that does not answer three times is replaced."""
        while True:
            await asyncio.sleep(MONITOR_SECONDS)
            await asyncio.gather(*(self._probe(slot) for slot in self._slots))

    async def _probe(self, slot: Slot) -> None:
        if slot.health.state in (Health.RESTARTING, Health.DEAD) or slot.lock.locked():
            return
        handle = slot.handle
        try:
            status = await asyncio.wait_for(handle.status(), PROBE_SECONDS)
        except TimeoutError:
            self._probe_failed(slot, handle, "the engine does not answer probes")
        except ReplicaLostError as error:
            self._dead(slot, handle, str(error))
        else:
            if not status.alive:
                self._dead(slot, handle, status.message)
            elif not status.answers:
                self._probe_failed(slot, handle, status.message)
            else:
                slot.health = slot.health.probe_passed()

    def _probe_failed(self, slot: Slot, handle: ReplicaHandle, why: str) -> None:
        slot.health = slot.health.probe_failed()
        if slot.health.state is Health.DEAD:
            self._dead(slot, handle, why)

    def _dead(self, slot: Slot, handle: ReplicaHandle, why: str) -> None:
        """Replace a dead replica in the background; several reports of one death count once."""
        if slot.handle is not handle or self._stopping or (slot.restart is not None and not slot.restart.done()):
            return
        log.error("engine %d is dead: %s", slot.index, why)
        slot.health = slot.health.died()
        if not slot.health.may_restart(time.monotonic()):
            self._break(f"engine {slot.index} died again after {len(slot.health.restarts)} restarts: {why}")
            return
        slot.restart = asyncio.create_task(self._restart(slot), name=f"restart-engine-{slot.index}")

    async def _restart(self, slot: Slot) -> None:
        handle = slot.handle
        while True:
            slot.health = slot.health.restarting(time.monotonic())
            with contextlib.suppress(ReplicaLostError, TimeoutError):
                await asyncio.wait_for(handle.stop(), STOP_SECONDS)
            handle.kill()
            await asyncio.sleep(RESTART_BACKOFF_SECONDS * len(slot.health.restarts))
            handle = slot.handle = self._make(slot.index)
            failure = await self._bring_up(slot)
            if failure is None:
                return
            log.error("engine %d did not come back: %s", slot.index, failure.message)
            slot.health = slot.health.died()
            if not slot.health.may_restart(time.monotonic()):
                self._break(f"engine {slot.index} cannot be restarted: {failure.message}")
                return

    def _break(self, message: str) -> None:
        """The fleet cannot be kept running: every request from now on says so."""
        self._broken = Failure(FailureClass.INFRASTRUCTURE, Reason.ENGINE_FAILED, message)
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def stop(self) -> None:
        """End every process; idempotent."""
        self._stopping = True
        tasks = [task for task in [self._monitor, *(slot.restart for slot in self._slots)] if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._stop_one(slot) for slot in self._slots))
        self._slots, self._monitor = [], None

    @staticmethod
    async def _stop_one(slot: Slot) -> None:
        with contextlib.suppress(ReplicaLostError, TimeoutError):
            await asyncio.wait_for(slot.handle.stop(), STOP_SECONDS)
        slot.handle.kill()
