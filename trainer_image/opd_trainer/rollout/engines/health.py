"""Health of one engine replica as a state machine. Pure.

A restarted replica cannot become HEALTHY by answering probes: it is STALE until it has loaded the weights of the moment.
Failed requests count apart from failed probes, because a wedged engine still answers probes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

#: Failed probes, or failed requests, in a row that make a replica DEAD. One makes it SUSPECT.
PROBE_STRIKES = 3
REQUEST_STRIKES = 3
#: Restarts of a replica within the window after which the fleet gives up.
RESTART_BUDGET = 3
RESTART_WINDOW_SECONDS = 1800.0


class Health(StrEnum):
    """What may be done with a replica."""

    #: Serves the current weights.
    HEALTHY = "healthy"
    #: Failed lately; still serves when there is no better one.
    SUSPECT = "suspect"
    #: Gone or given up; a restart follows.
    DEAD = "dead"
    #: Comes up.
    RESTARTING = "restarting"
    #: Up, with other weights than the current ones; gets no requests.
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """State and counters; every event returns a new value."""

    state: Health = Health.RESTARTING
    version: int | None = None
    probe_strikes: int = 0
    request_strikes: int = 0
    restarts: tuple[float, ...] = ()

    @property
    def serves(self) -> bool:
        """True when requests may go there."""
        return self.state in (Health.HEALTHY, Health.SUSPECT)

    def probe_passed(self) -> ReplicaHealth:
        """Clears probe strikes; failed requests keep it SUSPECT."""
        health = replace(self, probe_strikes=0)
        if health.state is Health.SUSPECT and health.request_strikes == 0:
            health = replace(health, state=Health.HEALTHY)
        return health

    def probe_failed(self) -> ReplicaHealth:
        """One strike; the third is death."""
        return self._struck(replace(self, probe_strikes=self.probe_strikes + 1))

    def request_passed(self) -> ReplicaHealth:
        """A response is the best proof of health there is."""
        state = Health.HEALTHY if self.state is Health.SUSPECT else self.state
        return replace(self, state=state, probe_strikes=0, request_strikes=0)

    def request_failed(self) -> ReplicaHealth:
        """One strike; the third is death."""
        return self._struck(replace(self, request_strikes=self.request_strikes + 1))

    @staticmethod
    def _struck(health: ReplicaHealth) -> ReplicaHealth:
        if not health.serves:
            return health
        dead = health.probe_strikes >= PROBE_STRIKES or health.request_strikes >= REQUEST_STRIKES
        return replace(health, state=Health.DEAD if dead else Health.SUSPECT)

    def died(self) -> ReplicaHealth:
        """The process or the actor is gone, or a load failed."""
        return replace(self, state=Health.DEAD, version=None)

    def restarting(self, now: float) -> ReplicaHealth:
        """A restart begins; it counts against the budget."""
        recent = tuple(moment for moment in self.restarts if now - moment < RESTART_WINDOW_SECONDS)
        return ReplicaHealth(Health.RESTARTING, None, 0, 0, (*recent, now))

    def may_restart(self, now: float) -> bool:
        """Whether the budget allows another restart."""
        return sum(now - moment < RESTART_WINDOW_SECONDS for moment in self.restarts) < RESTART_BUDGET

    def started(self) -> ReplicaHealth:
        """Up, but nothing is known about its weights."""
        return replace(self, state=Health.STALE, probe_strikes=0, request_strikes=0)

    def loaded(self, version: int, current: int) -> ReplicaHealth:
        """Verified weights `version`; HEALTHY only when these are the current ones."""
        if self.state in (Health.DEAD, Health.RESTARTING):
            return self
        return replace(self, version=version, state=Health.HEALTHY if version == current else Health.STALE)

    def outdated(self) -> ReplicaHealth:
        """Newer weights exist."""
        return replace(self, state=Health.STALE) if self.serves else self
