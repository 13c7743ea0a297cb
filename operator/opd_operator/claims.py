"""Access modes of a job's claim, read before the job starts: rule 21 needs an object that the spec only names."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from opd_operator.cluster import Cluster
from opd_operator.model import Snapshot
from opd_operator.resources import CLAIM

#: An answer is believed for so long: several jobs share a claim, and a new job is looked at several times.
KEEP_SECONDS = 30.0


class ClaimReader:
    """Completes the snapshots of jobs that have not started."""

    def __init__(self, cluster: Cluster, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._kept: dict[tuple[str, str], tuple[float, tuple[str, ...]]] = {}

    async def complete(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with the claim's access modes; empty while there is no such claim. Raises: ApiError, Unreachable."""
        job = snapshot.job
        storage = (job.get("spec") or {}).get("storage") or {}
        name = storage.get("claimName")
        started = (job.get("status") or {}).get("startTime") is not None
        if started or not isinstance(name, str) or not name or job["metadata"].get("deletionTimestamp"):
            return snapshot
        return replace(snapshot, claim_modes=await self._modes(job["metadata"]["namespace"], name))

    async def _modes(self, namespace: str, name: str) -> tuple[str, ...]:
        now = self._clock()
        for key in [key for key, (at, _) in self._kept.items() if now - at > KEEP_SECONDS]:
            del self._kept[key]
        if (namespace, name) not in self._kept:
            claim = await self._cluster.get(CLAIM, namespace, name)
            modes = ((claim or {}).get("spec") or {}).get("accessModes") or ()
            if claim is None:
                return ()
            self._kept[namespace, name] = (now, tuple(str(mode) for mode in modes))
        return self._kept[namespace, name][1]
