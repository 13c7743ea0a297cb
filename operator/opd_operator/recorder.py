"""Kubernetes Events about OPDJobs. The same event within its window becomes a count in the first one, not a new object; the
count is written at the first repetition, and then once a minute at most.

Written as core/v1: `kubectl describe` sorts by lastTimestamp, which events.k8s.io/v1 forbids to set. That time has whole
seconds, and within one the order is that of the names, so these begin with the time."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from opd_operator.errors import ApiError, Unreachable
from opd_operator.model import Manifest, ObjectRef
from opd_operator.planned import EventType, PlannedEvent
from opd_operator.resources import CORE_EVENT, OPDJOB_API_VERSION, OPDJOB_KIND

log = logging.getLogger(__name__)

COMPONENT = "opd.dev/operator"
_NOTE = 1024
_REMEMBERED = 4096


class EventApi(Protocol):
    """What the recorder needs of the cluster."""

    async def create(self, manifest: Manifest, *, fenced: bool = True) -> Manifest:
        """POST."""
        ...

    async def merge_patch(
        self, ref: ObjectRef, patch: Manifest, *, subresource: str | None = None, fenced: bool = True
    ) -> Manifest:
        """JSON merge patch."""
        ...


@dataclass
class _Series:
    ref: ObjectRef
    count: int
    first_at: datetime
    written_at: datetime


class Recorder:
    """Writes events; never raises, because an event is never worth a failed pass."""

    def __init__(
        self,
        api: EventApi,
        *,
        instance: str,
        window_seconds: float = 600.0,
        update_seconds: float = 60.0,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api = api
        self._instance = instance[:128]
        self._window = window_seconds
        self._update = update_seconds
        self._now = now
        self._series: OrderedDict[tuple[str, str, str, str], _Series] = OrderedDict()

    async def record(self, job: Manifest, event: PlannedEvent) -> None:
        """Writes the event about this OPDJob, or counts it when it was written within the window."""
        try:
            await self._record(job, event)
        except (ApiError, Unreachable) as error:
            log.warning("event could not be written", extra={"reason": event.reason, "error": str(error)})

    def forget(self, uid: str) -> None:
        """Drops what is remembered of a job."""
        for key in [key for key in self._series if key[0] == uid]:
            del self._series[key]

    async def _record(self, job: Manifest, event: PlannedEvent) -> None:
        now = self._now()
        key = (job["metadata"]["uid"], event.type, event.reason, event.message)
        series = self._series.get(key)
        if series is not None and (now - series.first_at).total_seconds() < self._window:
            series.count += 1
            if series.count == 2 or (now - series.written_at).total_seconds() >= self._update:
                series.written_at = now
                patch: Manifest = {"count": series.count, "lastTimestamp": _whole(now)}
                await self._api.merge_patch(series.ref, patch)
            return
        manifest = self._manifest(job, event, now, key)
        self._series[key] = _Series(ObjectRef.of(manifest), 1, now, now)
        self._series.move_to_end(key)
        while len(self._series) > _REMEMBERED:
            self._series.popitem(last=False)
        try:
            await self._api.create(manifest)
        except ApiError as error:
            if not error.already_exists:  # the retry of a create whose answer got lost
                raise

    def _manifest(self, job: Manifest, event: PlannedEvent, now: datetime, key: tuple[str, ...]) -> Manifest:
        metadata = job["metadata"]
        digest = hashlib.sha256("\0".join((*key, _micro(now))).encode()).hexdigest()[:6]
        since = f"{round(now.timestamp() * 1_000_000):014x}"
        warning = event.type == EventType.WARNING
        return {
            "apiVersion": CORE_EVENT.api_version,
            "kind": CORE_EVENT.kind,
            "metadata": {"name": f"{metadata['name']}.{since}{digest}", "namespace": metadata["namespace"]},
            "eventTime": _micro(now),
            "firstTimestamp": _whole(now),
            "lastTimestamp": _whole(now),
            "count": 1,
            "type": event.type.value,
            "reason": event.reason[:128],
            "action": "Warn" if warning else "Reconcile",
            "message": event.message.encode()[:_NOTE].decode(errors="ignore"),
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "reportingInstance": self._instance,
            "involvedObject": {
                "apiVersion": OPDJOB_API_VERSION,
                "kind": OPDJOB_KIND,
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
        }


def _micro(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _whole(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
