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


#: Of so many keys in a row one is idle, however many urgent ones wait: a TTL must run out on a busy cluster too.
IDLE_TURN = 10


class WorkQueue(Generic[Key]):
    """See the module. Must be used from one event loop."""

    def __init__(self, *, observer: Observer, clock: Clock | None = None, backoff: Backoff | None = None) -> None:
        self._clock: Clock = clock if clock is not None else asyncio.get_running_loop()
        self._backoff = backoff or Backoff()
        self._observer = observer
        self._ready: OrderedDict[Key, float] = OrderedDict()
        #: Keys nobody waits for.
        self._idle: OrderedDict[Key, float] = OrderedDict()
        self._since_idle = 0
        self._processing: dict[Key, float] = {}
        self._again: dict[Key, float] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._wake = asyncio.Event()
        self._closed = False

    def add(self, key: Key, *, idle: bool = False) -> None:
        """Makes the key due now. Cancels a later re-add: the pass that follows will ask for its own. `idle`: when no other key
        is due, unless the key is due already."""
        self._cancel_timer(key)
        now = self._clock.time()
        if key in self._processing:
            self._again.setdefault(key, now)
            return
        if key in self._ready or (idle and key in self._idle):
            return
        since = self._idle.pop(key, now)
        (self._idle if idle else self._ready)[key] = since
        self._observer.queue_depth(self._depth)
        self._wake.set()

    def add_after(self, key: Key, seconds: float) -> None:
        """Makes the key due later; of several delays the shortest wins."""
        if seconds <= 0:
            self.add(key)
            return
        if key in self._ready or key in self._idle or key in self._again:
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
        self._idle.pop(key, None)

    async def get(self) -> Key:
        """The next due key, oldest first, idle ones last. The caller must call `done` afterwards.

        Raises: QueueClosed after `close`.
        """
        while not self._depth:
            if self._closed:
                raise QueueClosed
            self._wake.clear()
            await self._wake.wait()
        idles = bool(self._idle) and (not self._ready or self._since_idle >= IDLE_TURN - 1)
        self._since_idle = 0 if idles else self._since_idle + 1
        key, since = (self._idle if idles else self._ready).popitem(last=False)
        now = self._clock.time()
        self._processing[key] = now
        self._observer.queue_depth(self._depth)
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
        self._idle.clear()
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
        return self._depth + len(self._timers) + len(self._processing)

    @property
    def _depth(self) -> int:
        return len(self._ready) + len(self._idle)

    def _fire(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def _cancel_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()


class QueueClosed(Exception):
    """The queue was closed: the worker ends."""
