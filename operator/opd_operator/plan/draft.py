"""A plan in the making: the status being rewritten and the writes collected so far. Internal to `plan`.

The only mutable value of the pure half; it lives for one call of `plan` and is frozen into a Plan at its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from opd_api.v1alpha1 import AttemptStatus, Condition, OPDJobSpec
from opd_api.vocabulary import ConditionType, FailureClass, Reason
from opd_operator.children import JobContext
from opd_operator.children.config import config_map, config_map_name, trainer_config
from opd_operator.model import (
    API_VERSION_OF_KIND,
    Diagnosis,
    Fact,
    JobView,
    Kind,
    Manifest,
    ObjectRef,
    Observation,
    Owned,
)
from opd_operator.planned import Deletion, EventType, PlannedEvent, Rehearsal, SecretRequest, StopRequest
from opd_operator.settings import Settings

MESSAGE_LIMIT = 1024
#: status.attempts keeps so many; those of classes that are retried once are dropped last, because they are counted.
MAX_ATTEMPTS = 10
#: After its grace a pod is gone within seconds, unless its kubelet is.
OVERDUE_SECONDS = 30.0
COUNTED_ONCE = frozenset({FailureClass.INTERNAL.value, FailureClass.STALL.value})


class Truth(StrEnum):
    """Status of a condition. Unknown = not begun, False = begun or refused, True = done."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


def stamp(moment: datetime) -> str:
    """A time as Kubernetes writes it, in whole seconds."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def moment(text: str | None) -> datetime | None:
    """The time of a stamp."""
    return datetime.fromisoformat(text) if text else None


@dataclass
class Draft:
    """See the module. `spec` and `context` may be used by steps after `accept` only."""

    observation: Observation
    now: datetime
    settings: Settings
    conditions: dict[str, Condition] = field(default_factory=dict)
    attempts: list[AttemptStatus] = field(default_factory=list)
    attempt: int = 1
    retries: int = 0
    teacher_restarts: int = 0
    start_time: str | None = None
    completion_time: str | None = None
    next_attempt_time: str | None = None
    #: The spec may act on existing children: a new attempt begins, or it changed before the first one.
    refresh: bool = False
    #: Why nothing more may start: the spec of the started job was edited into one that the rules refuse.
    refused_edit: Diagnosis | None = None
    #: An end was decided in this pass; see `Draft.deletions`.
    closing: bool = False
    doubt: list[ObjectRef] = field(default_factory=list)
    delete: list[Deletion] = field(default_factory=list)
    rehearse: list[Rehearsal] = field(default_factory=list)
    secrets: list[SecretRequest] = field(default_factory=list)
    create: list[Manifest] = field(default_factory=list)
    apply: list[Manifest] = field(default_factory=list)
    annotate: list[StopRequest] = field(default_factory=list)
    events: list[PlannedEvent] = field(default_factory=list)
    #: What the job waits for, for the Progressing condition.
    waits: tuple[Reason, str] | None = None
    #: What is wrong, when something is: the last word counts, and an end is the last.
    diagnosis: Diagnosis | None = None
    wake_at: datetime | None = None

    @classmethod
    def begin(cls, observation: Observation, now: datetime, settings: Settings) -> Draft:
        """A draft that starts from the stored status."""
        status = observation.job.status
        return cls(
            observation=observation,
            now=now,
            settings=settings,
            conditions={condition.type: condition for condition in status.conditions},
            attempts=list(status.attempts),
            attempt=status.attempt or 1,
            retries=status.retries or 0,
            teacher_restarts=status.teacher_restarts or 0,
            start_time=status.start_time,
            completion_time=status.completion_time,
            next_attempt_time=status.next_attempt_time,
        )

    @property
    def job(self) -> JobView:
        """The OPDJob."""
        return self.observation.job

    @property
    def spec(self) -> OPDJobSpec:
        """The parsed spec. Raises ValueError before `accept` has seen one."""
        if self.job.spec is None:
            raise ValueError("the spec was not accepted")
        return self.job.spec

    @property
    def context(self) -> JobContext:
        """What the builders of children need."""
        return JobContext(self.job.name, self.job.namespace, self.job.uid, self.spec, self.settings)

    # --- time ---

    def wake(self, at: datetime) -> None:
        """Look again at this time, or earlier."""
        if self.wake_at is None or at < self.wake_at:
            self.wake_at = at

    def passed(self, start: datetime, seconds: float) -> bool:
        """True when so much time has passed; otherwise the job is looked at again when it has."""
        try:
            end = start + timedelta(seconds=seconds)
        except OverflowError:  # a TTL of ages, or a time that somebody wrote by hand: later than any time
            return False
        if self.now >= end:
            return True
        self.wake(end)
        return False

    def lasts(self, fact: Fact, seconds: float) -> bool:
        """True when a fact has been seen for so long."""
        since = self.observation.memory.since.get(fact)
        return since is not None and self.passed(since, seconds)

    def going_away(self) -> str:
        """What is waited for while pods end, with the nodes that end theirs too late: nobody answers there."""
        said = "pods are going away"  # not how many: each that goes would cost a status write
        going = sorted((node, moment(at)) for node, at in self.observation.going_by.items())
        late = [node for node, at in going if at is not None and self.passed(at, OVERDUE_SECONDS)]
        if not late:
            return said
        return (
            f"{said}; {', '.join(late)} did not end them in time. A lost node frees them when it is back; "
            "if it stays away, delete its Node object."
        )

    # --- conditions ---

    @property
    def stored(self) -> dict[str, Condition]:
        """Conditions as they are stored, by type."""
        return {condition.type: condition for condition in self.job.status.conditions}

    def is_true(self, kind: ConditionType) -> bool:
        """Whether a condition is True."""
        return self.truth(kind) is Truth.TRUE

    def truth(self, kind: ConditionType) -> Truth:
        """Status of a condition; Unknown when it was never set."""
        condition = self.conditions.get(kind)
        return Truth(condition.status) if condition else Truth.UNKNOWN

    def reason(self, kind: ConditionType) -> str:
        """Reason of a condition."""
        condition = self.conditions.get(kind)
        return condition.reason if condition else ""

    def since(self, kind: ConditionType) -> datetime:
        """When a condition last changed its status."""
        condition = self.conditions.get(kind)
        return (moment(condition.last_transition_time) if condition else None) or self.now

    def set(self, kind: ConditionType, truth: Truth, reason: Reason, message: str = "") -> None:
        """Set a condition; without a message it says what its reason means. The transition time moves with the stored status only: one that a pass sets and takes back did not
        move for those who read it."""
        known = (self.stored.get(kind), self.conditions.get(kind))
        same = next((item for item in known if item is not None and item.status == truth.value), None)
        self.conditions[kind] = Condition(
            type=kind.value,
            status=truth.value,
            reason=reason.value,
            message=(message or reason.explanation)[:MESSAGE_LIMIT],
            last_transition_time=same.last_transition_time if same is not None else stamp(self.now),
            observed_generation=self.job.generation,
        )

    def wait(self, reason: Reason, message: str) -> None:
        """Say what the job waits for."""
        self.waits = (reason, message)

    def wait_for(self, diagnosis: Diagnosis) -> None:
        """Wait for what a diagnosis names."""
        if not self.closing:
            self.diagnosis = diagnosis
        self.wait(diagnosis.reason, str(diagnosis))

    # --- attempts ---

    @property
    def entry(self) -> AttemptStatus | None:
        """Record of the current attempt, None before its RayJob was asked for."""
        return next((item for item in self.attempts if item.number == self.attempt), None)

    @property
    def live(self) -> bool:
        """True while the current attempt's RayJob was asked for and has not ended."""
        return self.entry is not None and self.entry.end_time is None

    def record(self, entry: AttemptStatus) -> None:
        """Add or replace the record of an attempt, within the bound."""
        kept = [item for item in self.attempts if item.number != entry.number]
        while len(kept) >= MAX_ATTEMPTS:
            spare = next((item for item in kept if item.failure_class not in COUNTED_ONCE), kept[0])
            kept.remove(spare)
        self.attempts = [*kept, entry]

    # --- writes ---

    def make_sure_of(self, kind: Kind, name: str) -> None:
        """Nothing is done before a live look at this child agrees with what was seen of it."""
        self.doubt.append(ObjectRef(API_VERSION_OF_KIND[kind], kind.value, self.job.namespace, name))

    def owned(self, kind: Kind, name: str) -> Owned | None:
        """A child of ours by name."""
        return self.observation.owned.get((kind, name))

    def create_once(self, kind: Kind, manifest: Manifest) -> bool:
        """Create a child unless it exists. False when one of that name is still being deleted."""
        found = self.owned(kind, manifest["metadata"]["name"])
        if found is None:
            self.create.append(manifest)
            self.started()
        return found is None or not found.deleting

    def create_config(self) -> tuple[str, str]:
        """Ensure the configuration of the current attempt; its ConfigMap's name and its hash."""
        config = trainer_config(self.context, self.attempt)
        self.create_once(Kind.CONFIG_MAP, config_map(self.context, config))
        return config_map_name(self.context, config), config.content_hash

    def remove(self, owned: Owned | None) -> None:
        """Delete a child unless it is gone or going."""
        if owned is not None and not owned.deleting and all(item.uid != owned.uid for item in self.delete):
            ref = ObjectRef(API_VERSION_OF_KIND[owned.kind], owned.kind.value, self.job.namespace, owned.name)
            self.delete.append(Deletion(ref, owned.uid))

    @property
    def deletions(self) -> tuple[Deletion, ...]:
        """Deletes of this pass. An end is written down before anything is removed: a process that died in between would
        find a missing RayJob and take its own deletion for a fault of the cluster."""
        return () if self.closing else tuple(self.delete)

    def remove_all(self, found: Iterable[Owned]) -> None:
        """Delete several children."""
        for owned in found:
            self.remove(owned)

    def started(self) -> None:
        """The first child is asked for: from now on most of the spec is immutable."""
        if self.start_time is None:
            self.start_time = stamp(self.now)

    def event(self, kind: EventType, reason: Reason, message: str) -> None:
        """Add an Event."""
        self.events.append(PlannedEvent(kind, reason.value, message[:MESSAGE_LIMIT]))
