"""Events of the cluster about pods and volumes, read only while something waits and only about what waits.

FailedAttachVolume, FailedMount and the like are nowhere else. They are not watched: most Events of a cluster are not about
us. An answer is kept for a few seconds, because a waiting job is looked at more often than its Events change.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from opd_operator.cluster import Cluster
from opd_operator.model import Manifest, ObjectRef, Snapshot
from opd_operator.observe import event_subjects
from opd_operator.resources import CORE_EVENT

KEEP_SECONDS = 10.0
#: Subjects that are asked for in one pass; a job whose hundred pods all wait has one reason, not a hundred.
SUBJECTS = 4
_KEPT = ("reason", "message", "type", "count", "firstTimestamp", "lastTimestamp", "eventTime", "series")


class EventReader:
    """Completes snapshots with the Events that observe asks for."""

    def __init__(self, cluster: Cluster, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._kept: dict[ObjectRef, tuple[float, tuple[Manifest, ...]]] = {}

    async def complete(self, snapshot: Snapshot, *, terminating: bool) -> Snapshot:
        """The snapshot with Events and the namespace's state. Raises: ApiError, Unreachable."""
        events: list[Manifest] = []
        for subject in tuple(event_subjects(snapshot))[:SUBJECTS]:
            events += await self._about(subject)
        if not events and not terminating:
            return snapshot
        return replace(snapshot, events=tuple(events), namespace_terminating=terminating)

    async def _about(self, subject: ObjectRef) -> tuple[Manifest, ...]:
        now = self._clock()
        for old in [ref for ref, (at, _) in self._kept.items() if now - at > KEEP_SECONDS]:
            del self._kept[old]
        if subject not in self._kept:
            selector = f"involvedObject.kind={subject.kind},involvedObject.name={subject.name}"
            found: list[Manifest] = []
            async for items, _ in self._cluster.list_pages(CORE_EVENT, subject.namespace, field_selector=selector):
                found += [_trim(item) for item in items]
            self._kept[subject] = (now, tuple(found))
        return self._kept[subject][1]


def _trim(event: Manifest) -> Manifest:
    kept: dict[str, Any] = {key: event[key] for key in _KEPT if key in event}
    metadata = event["metadata"]
    kept["metadata"] = {key: metadata[key] for key in ("name", "namespace", "creationTimestamp") if key in metadata}
    kept["involvedObject"] = event.get("involvedObject") or {}
    return kept
