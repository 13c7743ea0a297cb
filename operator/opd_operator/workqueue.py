"""A keyed work queue: one entry and one worker per key, back-off per failing key, delayed re-adds.

A key that is added while a worker holds it is handed out again when that worker is done, so no event is lost and no key is
ever processed twice at the same time. The queue never sleeps on its own: time and timers come from the event loop, which
is why tests can turn the clock by hand.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Clock(Protocol):
    """What the queue needs of an event loop."""

    def time(self) -> float:
        """Monotonic seconds."""
        ...

    def call_at(self, when: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        """Calls back at that time."""
        ...


class Observer(Protocol):
    """Receives what the queue measures; implemented by the metrics."""

    def queue_depth(self, depth: int) -> None:
        """Number of keys that wait for a worker."""
        ...

    def queue_latency(self, seconds: float) -> None:
        """How long a key waited after it became due."""
        ...

    def queue_retry(self) -> None:
        """A key was put back after a failure."""
        ...


@dataclass(frozen=True)
class Backoff:
    """Exponential back-off with full jitter on the upper half, in seconds."""

    base_seconds: float = 0.25
    limit_seconds: float = 120.0

    def delay(self, failures: int) -> float:
        """Seconds to wait after that many consecutive failures (>= 1)."""
        ceiling = min(self.limit_seconds, self.base_seconds * 2.0 ** min(failures - 1, 32))
        return ceiling * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards nothing


class WorkQueue(Generic[Key]):
    """See the module. Must be used from one event loop."""

    def __init__(self, *, observer: Observer, clock: Clock | None = None, backoff: Backoff | None = None) -> None:
        self._clock: Clock = clock if clock is not None else asyncio.get_running_loop()
        self._backoff = backoff or Backoff()
        self._observer = observer
        self._ready: OrderedDict[Key, float] = OrderedDict()
        self._processing: dict[Key, float] = {}
        self._again: dict[Key, float] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._wake = asyncio.Event()
        self._closed = False

    def add(self, key: Key, *, first: bool = False) -> None:
        """Makes the key due now. Cancels a later re-add: the pass that follows will ask for its own. `first`: before all keys
        that are due already."""
        self._cancel_timer(key)
        now = self._clock.time()
        if key in self._processing:
            self._again.setdefault(key, now)
            return
        if key not in self._ready:
            self._ready[key] = now
            self._observer.queue_depth(len(self._ready))
            self._wake.set()
        if first:
            self._ready.move_to_end(key, last=False)

    def add_after(self, key: Key, seconds: float) -> None:
        """Makes the key due later; of several delays the shortest wins."""
        if seconds <= 0:
            self.add(key)
            return
        if key in self._ready or key in self._again:
            return
        when = self._clock.time() + seconds
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= when:
                return
            timer.cancel()
        self._timers[key] = self._clock.call_at(when, self._fire, key)

    def retry(self, key: Key) -> float:
        """Puts a failed key back after its back-off; returns the delay in seconds."""
        failures = self._failures.get(key, 0) + 1
        self._failures[key] = failures
        delay = self._backoff.delay(failures)
        self._observer.queue_retry()
        self.add_after(key, delay)
        return delay

    def forget(self, key: Key) -> None:
        """Resets the back-off of a key that succeeded."""
        self._failures.pop(key, None)

    def drop(self, key: Key) -> None:
        """Removes every trace of a key whose object is gone."""
        self.forget(key)
        self._cancel_timer(key)
        self._again.pop(key, None)
        self._ready.pop(key, None)

    async def get(self) -> Key:
        """The next due key, oldest first. The caller must call `done` afterwards.

        Raises: QueueClosed after `close`.
        """
        while not self._ready:
            if self._closed:
                raise QueueClosed
            self._wake.clear()
            await self._wake.wait()
        key, since = self._ready.popitem(last=False)
        now = self._clock.time()
        self._processing[key] = now
        self._observer.queue_depth(len(self._ready))
        self._observer.queue_latency(now - since)
        return key

    def done(self, key: Key) -> None:
        """Ends the processing of a key; hands it out again if it was added meanwhile."""
        self._processing.pop(key, None)
        if self._again.pop(key, None) is not None:
            self.add(key)

    def close(self) -> None:
        """Wakes every waiting worker with QueueClosed and drops what is waiting."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._ready.clear()
        self._again.clear()
        self._observer.queue_depth(0)
        self._wake.set()

    @property
    def longest_processing_seconds(self) -> float:
        """Age of the oldest key in the hands of a worker; 0 when none is."""
        return max((self._clock.time() - since for since in self._processing.values()), default=0.0)

    @property
    def size(self) -> int:
        """Keys that are due, delayed or being processed: 0 means that the queue holds nothing."""
        return len(self._ready) + len(self._timers) + len(self._processing)

    def _fire(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def _cancel_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()


class QueueClosed(Exception):
    """The queue was closed: the worker ends."""
