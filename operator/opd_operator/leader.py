"""One active operator among several, by a Lease.

Only the work waits for leadership: watches and caches are warm in every replica, so a takeover starts to work at once. The
clocks of two machines are never compared: a follower measures with its own clock how long the Lease has not changed. The
leader stops to write when it could not renew for `renew_seconds`, which is shorter than the duration after which others
take over; between the two nobody writes. A release on SIGTERM empties the holder, which followers see at their next look.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from opd_operator.errors import ApiError, Unreachable
from opd_operator.model import Manifest
from opd_operator.resources import LEASE, Resource

log = logging.getLogger(__name__)


class LeaseApi(Protocol):
    """What the election needs of the cluster."""

    async def get(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        """The Lease or None."""
        ...

    async def create(self, manifest: Manifest, *, fenced: bool = True) -> Manifest:
        """POST."""
        ...

    async def replace(self, manifest: Manifest, *, fenced: bool = True) -> Manifest:
        """PUT with resourceVersion."""
        ...


@dataclass(frozen=True)
class LeaseSettings:
    """Where the Lease is and how long its terms are, in seconds: retry < renew < duration."""

    namespace: str
    name: str
    identity: str
    duration_seconds: float = 15.0
    renew_seconds: float = 10.0
    retry_seconds: float = 2.0


class LeaderElection:
    """Call `run` as a task; `leading` tells the state; `elected` is set while this process leads."""

    def __init__(
        self,
        api: LeaseApi,
        settings: LeaseSettings,
        *,
        on_change: Callable[[bool], None] = lambda leading: None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._api = api
        self._settings = settings
        self._on_change = on_change
        self._clock = clock or asyncio.get_running_loop().time
        self.elected = asyncio.Event()
        self._lease: Manifest | None = None
        self._seen_version = ""
        self._seen_at = 0.0
        self._renewed_at = 0.0

    @property
    def leading(self) -> bool:
        """True while the Lease is held and was renewed recently enough to write."""
        return self.elected.is_set() and self._clock() - self._renewed_at < self._settings.renew_seconds

    async def run(self) -> None:
        """Acquires, renews and re-acquires for ever."""
        while True:
            await self.step()
            await asyncio.sleep(self._settings.retry_seconds)

    async def step(self) -> None:
        """One look at the Lease: renew it, take it, or see that somebody else holds it."""
        deadline = self._settings.retry_seconds * 2
        try:
            async with asyncio.timeout(deadline):
                held = await self._renew() if self.elected.is_set() else await self._acquire()
        except (ApiError, Unreachable, TimeoutError) as error:
            log.warning("lease could not be read or written", extra={"error": f"{type(error).__name__}: {error}"})
            held = self.leading
        self._set(held)

    async def release(self) -> None:
        """Hands the Lease back so that another replica takes over at once. Errors are logged: the term ends anyway."""
        if not self.elected.is_set() or self._lease is None:
            return
        self._set(False)
        try:
            async with asyncio.timeout(self._settings.retry_seconds * 2):
                await self._api.replace(self._manifest(self._lease, holder=""), fenced=False)
        except (ApiError, Unreachable, TimeoutError) as error:
            log.warning("lease could not be released", extra={"error": str(error)})

    def _set(self, held: bool) -> None:
        if held == self.elected.is_set():
            return
        if held:
            self.elected.set()
        else:
            self.elected.clear()
        log.info("leading" if held else "not leading", extra={"identity": self._settings.identity})
        self._on_change(held)

    async def _renew(self) -> bool:
        asked_at = self._clock()
        if self._lease is None:
            return await self._acquire()
        try:
            self._lease = await self._api.replace(self._manifest(self._lease), fenced=False)
        except ApiError as error:
            if not error.conflict:
                raise
            return await self._acquire()
        self._renewed_at = asked_at
        return True

    async def _acquire(self) -> bool:
        asked_at = self._clock()
        lease = await self._api.get(LEASE, self._settings.namespace, self._settings.name)
        try:
            if lease is None:
                self._lease = await self._api.create(self._manifest(None), fenced=False)
            elif self._may_take(lease):
                self._lease = await self._api.replace(self._manifest(lease), fenced=False)
            else:
                return False
        except ApiError as error:
            if error.code == 409:
                return False
            raise
        self._renewed_at = asked_at
        return True

    def _may_take(self, lease: Manifest) -> bool:
        """Ours, free, or unchanged for the holder's whole term by our own clock."""
        spec: dict[str, Any] = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder in ("", self._settings.identity):
            return True
        version = lease["metadata"].get("resourceVersion", "")
        now = self._clock()
        if version != self._seen_version:
            self._seen_version, self._seen_at = version, now
            return False
        return now - self._seen_at >= float(spec.get("leaseDurationSeconds") or self._settings.duration_seconds)

    def _manifest(self, current: Manifest | None, *, holder: str | None = None) -> Manifest:
        holder = self._settings.identity if holder is None else holder
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        old: dict[str, Any] = (current or {}).get("spec") or {}
        changed = (old.get("holderIdentity") or "") != holder
        spec: dict[str, Any] = {
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, round(self._settings.duration_seconds)),
            "renewTime": now,
            "acquireTime": now if changed or "acquireTime" not in old else old["acquireTime"],
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + int(changed and bool(holder)),
        }
        metadata: dict[str, Any] = {"name": self._settings.name, "namespace": self._settings.namespace}
        if current is not None:
            metadata["resourceVersion"] = current["metadata"]["resourceVersion"]
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


class AlwaysLeading:
    """Stands in for the election where it is switched off: a single replica."""

    def __init__(self, on_change: Callable[[bool], None] = lambda leading: None) -> None:
        self.elected = asyncio.Event()
        self._on_change = on_change
        self.leading = False

    async def run(self) -> None:
        """Leads at once and for ever."""
        self.leading = True
        self.elected.set()
        self._on_change(True)
        await asyncio.Event().wait()

    async def release(self) -> None:
        """Nothing to hand back, but no work is done after this."""
        self.leading = False
        self.elected.clear()
