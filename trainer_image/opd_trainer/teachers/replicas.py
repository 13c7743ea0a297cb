"""Replicas of one teacher: limits, breaker and the choice of a replica. No I/O; the clock is an argument."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from opd_trainer.teachers.resolver import Endpoint

#: Failures in a row that open a breaker, and for how long, in seconds.
BREAKER_STRIKES = 5
BREAKER_SECONDS = 10.0
#: A group leaves its replica when that one has more than this many times the mean in flight …
OVERLOAD = 1.5
#: … and at least this many requests: with less there is nothing to balance, and the shared prefix is worth more.
OVERLOAD_FLOOR = 8


class ReplicaGoneError(Exception):
    """The replica became unreachable while the request waited for its turn."""


@dataclass(slots=True)
class _Waiter:
    tokens: int
    turn: asyncio.Future[None]


@dataclass(slots=True)
class Replica:
    """One server address. Requests AND tokens in flight are bounded; the first to wait is the first to go."""

    endpoint: Endpoint
    max_requests: int
    max_tokens: int | None
    reachable: bool = True
    strikes: int = 0
    open_until: float = 0.0
    requests: int = 0
    tokens: int = 0
    _waiting: deque[_Waiter] = field(default_factory=deque)

    @property
    def load(self) -> int:
        """Requests that run or wait here."""
        return self.requests + len(self._waiting)

    def breaker_open(self, now: float) -> bool:
        """True while the replica rests after failures in a row."""
        return now < self.open_until

    def _fits(self, tokens: int) -> bool:
        if self.requests >= self.max_requests:
            return False
        # A request larger than the whole budget goes alone instead of never.
        return self.max_tokens is None or self.tokens + tokens <= self.max_tokens or self.requests == 0

    async def acquire(self, tokens: int) -> None:
        """Wait for room. Raises ReplicaGoneError when the replica becomes unreachable meanwhile."""
        if not self._waiting and self._fits(tokens):
            self._enter(tokens)
            return
        waiter = _Waiter(tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self.release(tokens)
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
            raise

    def _enter(self, tokens: int) -> None:
        self.requests += 1
        self.tokens += tokens

    def release(self, tokens: int) -> None:
        """Give the room back and let the next ones in."""
        self.requests -= 1
        self.tokens -= tokens
        while self._waiting and self._fits(self._waiting[0].tokens):
            waiter = self._waiting.popleft()
            if not waiter.turn.done():
                self._enter(waiter.tokens)
                waiter.turn.set_result(None)

    def succeeded(self) -> None:
        """A request ended well."""
        self.reachable = True
        self.strikes = 0
        self.open_until = 0.0

    def failed(self, now: float) -> None:
        """A request failed on a reachable replica."""
        self.strikes += 1
        if self.strikes >= BREAKER_STRIKES:
            self.open_until = now + BREAKER_SECONDS

    def lost(self) -> None:
        """Nothing answers: whoever waits here has to look elsewhere."""
        self.reachable = False
        while self._waiting:
            turn = self._waiting.popleft().turn
            if not turn.done():
                turn.set_exception(ReplicaGoneError())


def preferred(replicas: Iterable[Replica], teacher: str, group: int) -> Replica:
    """Rendezvous hash of (teacher, group): all samples of a group share a replica, and few groups move when one is lost."""

    def weight(replica: Replica) -> bytes:
        key = f"{teacher}\0{group}\0{replica.endpoint.url}".encode()
        return hashlib.blake2b(key, digest_size=8).digest()

    return max(replicas, key=weight)


def choose(
    replicas: Iterable[Replica], teacher: str, group: int, now: float, *, avoid: frozenset[str] = frozenset()
) -> Replica | None:
    """The replica for the next try, or None when none is reachable.

    The preferred one, unless it just failed this request, rests, or has far more to do than the mean; then the one with
    the least to do. Replicas that failed or rest are used only when there is no other.
    """
    reachable = [replica for replica in replicas if replica.reachable]
    if not reachable:
        return None
    good = [r for r in reachable if r.endpoint.url not in avoid and not r.breaker_open(now)] or reachable
    first = preferred(reachable, teacher, group)
    mean = sum(replica.load for replica in reachable) / len(reachable)
    overloaded = first.load >= OVERLOAD_FLOOR and first.load > OVERLOAD * mean
    if first in good and not overloaded:
        return first
    return min(good, key=lambda replica: replica.load)
