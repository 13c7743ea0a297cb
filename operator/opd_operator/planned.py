"""What a pass decided to do: the values that `plan` returns and `execute` carries out. Frozen, like everything in model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from opd_operator.model import Diagnosis, Manifest, ObjectRef


@dataclass(frozen=True)
class Deletion:
    """Delete one object, only if it still has this UID. 404 and a UID conflict both mean done."""

    ref: ObjectRef
    uid: str
    #: None leaves the objects' own grace period.
    grace_seconds: int | None = None


@dataclass(frozen=True)
class SecretRequest:
    """A Secret whose values the rim makes up: one `secrets.token_urlsafe(32)` per key, then POST.

    The manifest has no data. Its name holds the job's UID, so AlreadyExists alone proves that it is ours.
    """

    manifest: Manifest
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Rehearsal:
    """A POST that the API server only tries (dryRun=All). AlreadyExists means that it was taken before."""

    manifest: Manifest
    #: The child that a refusal is about; the manifest may only stand for it.
    ref: ObjectRef


@dataclass(frozen=True)
class StopRequest:
    """Annotate the progress ConfigMap with `opd.dev/stop: <attempt>` (merge patch)."""

    config_map: ObjectRef
    attempt: int


class EventType(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True)
class PlannedEvent:
    """An Event about the OPDJob. `reason` is a member of `opd_api.vocabulary.Reason`, or the code of a finding."""

    type: EventType
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """What one pass does, in the order of execution: doubt, delete, rehearse, secrets, create, apply, annotate, status, events.

    A refused write (see WriteProblem) ends the making of objects in this pass: later ones may need it. Annotations, status
    and events are executed all the same, because the status never claims a child that was not observed. A transient fault that outlives its retries ends the pass, and the key is queued again.
    """

    #: Objects whose silence was judged. They are read anew before anything else: when the cache was behind, nothing of this
    #: plan is done, and the pass is made again.
    doubt: tuple[ObjectRef, ...] = ()
    #: Deletes; a deletion of the OPDJob itself is the TTL.
    delete: tuple[Deletion, ...] = ()
    #: Never together with a create or an apply: they follow in the next pass, when `Memory.rehearsed` is the generation.
    rehearse: tuple[Rehearsal, ...] = ()
    secrets: tuple[SecretRequest, ...] = ()
    #: POST once. AlreadyExists and an owner reference with our UID means done.
    create: tuple[Manifest, ...] = ()
    #: Server-side apply, field manager `opd-operator`, force. Before applying over an existing object: check its owner UID.
    apply: tuple[Manifest, ...] = ()
    annotate: tuple[StopRequest, ...] = ()
    #: The complete desired status (camelCase), or None for no change. Keys it lacks are to be removed.
    status: Manifest | None = None
    #: Emitted after the status was written.
    events: tuple[PlannedEvent, ...] = ()
    #: Look again after so many seconds though nothing happened; None = only when something happens.
    requeue_after: float | None = None
    #: Why the job failed, its attempt ended or it waits; for the log. None when nothing is wrong.
    diagnosis: Diagnosis | None = None
