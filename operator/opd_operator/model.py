"""The values that travel between the rim (cluster, feed) and the pure middle (observe, plan, diagnose, children).

One pass over a job is `observe(snapshot, now, memory) -> Observation`, `plan(observation, now, settings) -> Plan`, and then
the rim executes the plan in the order of its fields. Everything here is frozen; nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from opd_api.progress import FinalDocument, ProgressDocument
from opd_api.v1alpha1 import FindingStatus, OPDJobSpec, OPDJobStatus
from opd_api.vocabulary import FailureClass, Reason

#: A Kubernetes object as JSON would have it. Never mutated by anybody who did not build it.
Manifest = dict[str, Any]


@dataclass(frozen=True, order=True)
class ObjectRef:
    """Where an object lives; enough to address it at the API."""

    api_version: str
    kind: str
    namespace: str
    name: str

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> ObjectRef:
        """The address of a manifest that names its apiVersion, kind, namespace and name."""
        metadata = manifest["metadata"]
        return cls(manifest["apiVersion"], manifest["kind"], metadata.get("namespace", ""), metadata["name"])


class Fact(StrEnum):
    """Facts of the current attempt whose age matters; `Memory.since` is keyed by them."""

    #: A student pod of the attempt failed, vanished or is being deleted. Sticky: it stays true for the attempt.
    DISRUPTED = "disrupted"
    HEAD_GONE = "headGone"
    HEAD_NOT_READY = "headNotReady"
    RAY_JOB_MISSING = "rayJobMissing"
    RAY_JOB_ENDED = "rayJobEnded"
    RAY_JOB_RUNNING = "rayJobRunning"
    FINAL_DOCUMENT = "finalDocument"
    #: A student pod waits for room: unschedulable or over quota.
    CAPACITY_WAIT = "capacityWait"


class Kind(StrEnum):
    """Kinds of children that a snapshot holds."""

    DEPLOYMENT = "Deployment"
    SERVICE = "Service"
    JOB = "Job"
    POD = "Pod"
    RAY_JOB = "RayJob"
    RAY_CLUSTER = "RayCluster"
    CONFIG_MAP = "ConfigMap"
    NETWORK_POLICY = "NetworkPolicy"


API_VERSION_OF_KIND = {
    Kind.DEPLOYMENT: "apps/v1",
    Kind.SERVICE: "v1",
    Kind.JOB: "batch/v1",
    Kind.POD: "v1",
    Kind.RAY_JOB: "ray.io/v1",
    Kind.RAY_CLUSTER: "ray.io/v1",
    Kind.CONFIG_MAP: "v1",
    Kind.NETWORK_POLICY: "networking.k8s.io/v1",
}


@dataclass(frozen=True)
class Snapshot:
    """Everything the cache knows about one job, raw.

    Children are found by the label `opd.dev/job` (see `children.names.job_label`) in the job's namespace; RayClusters carry
    it too because KubeRay copies a RayJob's labels. Objects of an earlier OPDJob of the same name may be among them:
    observe sorts them out by owner UID. What observe reads of each kind (the rest may be trimmed away):

    - every object: apiVersion, kind, metadata.{name, namespace, uid, generation, labels, annotations, ownerReferences,
      creationTimestamp, deletionTimestamp}
    - OPDJob, Deployment, Job, RayJob, RayCluster: status; OPDJob also spec; Deployment also spec.replicas
    - Event: involvedObject.uid, reason, message, lastTimestamp, eventTime
    - Pod: spec.nodeName, spec.containers[].resources, status
    - ConfigMap: data of the one named `children.names.progress_config_map`; nothing of the others
    """

    job: Manifest
    deployments: tuple[Manifest, ...] = ()
    services: tuple[Manifest, ...] = ()
    jobs: tuple[Manifest, ...] = ()
    pods: tuple[Manifest, ...] = ()
    ray_jobs: tuple[Manifest, ...] = ()
    ray_clusters: tuple[Manifest, ...] = ()
    config_maps: tuple[Manifest, ...] = ()
    #: Access modes of the claim, of jobs that have not started.
    claim_modes: tuple[str, ...] = ()
    network_policies: tuple[Manifest, ...] = ()
    #: core/v1 Events about the objects that `observe.event_subjects(snapshot)` names; fetched only when it names some.
    events: tuple[Manifest, ...] = ()
    #: The namespace has a deletionTimestamp, or a create was answered with "is being terminated".
    namespace_terminating: bool = False


class WriteProblemKind(StrEnum):
    """Why the API server did not take a write. Transient faults (429, 5xx, conflicts) are retried by the rim, not told."""

    #: 409 AlreadyExists, and the GET shows another owner.
    COLLISION = "collision"
    #: The same, but that object has a deletionTimestamp, or its owner is an OPDJob of our name with another UID.
    BEING_DELETED = "beingDeleted"
    #: 403 with "exceeded quota".
    QUOTA = "quota"
    #: 400 or 422: the child cannot exist as the templates have it.
    INVALID = "invalid"
    #: 404: the kind is not installed.
    NOT_SERVED = "notServed"
    #: 403 otherwise: the operator lacks a right, or an admission plug-in (Pod Security, policy engine) refuses. Also what an
    #: admission webhook or policy denies with another code (400 and 422 are their defaults).
    FORBIDDEN = "forbidden"
    #: 403 from an admission plug-in that has not read the type OPDJob yet: its CRD is younger than half a minute.
    TYPE_NOT_READ = "typeNotRead"


@dataclass(frozen=True, order=True)
class WriteProblem:
    """One refused write of the last executed plan."""

    ref: ObjectRef
    kind: WriteProblemKind
    #: The API server's words, at most 512 characters, without secrets.
    message: str = ""


@dataclass(frozen=True)
class Seen:
    """A number of the progress document and when this process saw it change."""

    value: int
    at: datetime


@dataclass(frozen=True)
class Unwritten:
    """A status that the API server refused, kept so that clocks and cleanup go on without it."""

    #: The status that is stored instead. Once somebody stores another one, that one counts.
    stored: Manifest
    wanted: Manifest


@dataclass(frozen=True)
class Memory:
    """What this process remembers of one job between two passes. Losing it costs time, never correctness.

    `observe` returns the updated memory in `Observation.memory`; the rim keeps it per UID, hands it to the next pass, drops
    it with the job, and replaces `problems` with those of each execution (empty when all writes were taken). When
    `problems` changed the rim looks at the job again within a second, otherwise after `Plan.requeue_after`.
    """

    #: Attempt that `sequence`, `activity` and the sticky facts belong to.
    attempt: int = 0
    sequence: Seen | None = None
    activity: Seen | None = None
    #: When a fact that is still true was first seen.
    since: Mapping[Fact, datetime] = field(default_factory=dict)
    #: Diagnosis that goes with Fact.DISRUPTED; kept because the pod soon vanishes.
    disruption: Diagnosis | None = None
    problems: tuple[WriteProblem, ...] = ()
    #: Generation of the spec whose children met the problems.
    met_at: int = 0
    #: Generation of the spec whose children the API server would take.
    rehearsed: int = 0
    #: The status of the last pass, when the API server did not take all of it.
    unwritten: Unwritten | None = None

    def with_problems(self, problems: tuple[WriteProblem, ...], generation: int) -> Memory:
        """The same memory after an execution, for this generation of the spec, that met these problems."""
        return replace(self, problems=tuple(sorted(set(problems))), met_at=generation)


@dataclass(frozen=True)
class JobView:
    """The OPDJob itself. `spec` is None when it cannot be parsed; then `findings` say why."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: OPDJobSpec | None
    status: OPDJobStatus
    #: The status as it is stored, to tell whether a new one differs.
    raw_status: Manifest
    findings: tuple[FindingStatus, ...] = ()
    deleting: bool = False

    @property
    def refused(self) -> bool:
        """True when a finding is an error: nothing is created for such a job."""
        return self.spec is None or any(finding.severity == "Error" for finding in self.findings)

    @property
    def uid8(self) -> str:
        """First eight characters of the UID, as used in names."""
        return self.uid[:8]


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a pod or a RayJob, and what a person can do about it."""

    failure_class: FailureClass
    reason: Reason
    message: str
    hint: str

    def __str__(self) -> str:
        stop = "" if not self.hint or self.message.endswith((".", "!", "?", "…")) else "."
        return f"{self.message}{stop} {self.hint}".strip()[:1024]


@dataclass(frozen=True)
class Owned:
    """A child that exists and is ours."""

    kind: Kind
    name: str
    uid: str
    deleting: bool
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


class StepState(StrEnum):
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True)
class StepJob:
    """A check or probe Job."""

    owned: Owned
    state: StepState
    #: Parsed from the termination message of its newest pod.
    document: FinalDocument | None
    diagnosis: Diagnosis | None
    #: Its newest pod is seen to have ended.
    pod_ended: bool = False
    #: The Job has ended but its pod is still seen alive: its watch is late, and the document with it.
    undecided: bool = False


@dataclass(frozen=True)
class TeacherView:
    """One teacher that the operator serves."""

    name: str
    deployment: Owned | None
    #: The Deployment's annotation opd.dev/restart.
    restart: int
    ready: int
    desired: int
    #: True when the Deployment has been observed, all replicas are updated and ready, and their pods are seen.
    all_ready: bool
    #: UIDs of the ready pods: a probe is valid for exactly these.
    ready_pods: tuple[str, ...]
    #: Pods that exist, terminating ones included.
    pods: int
    diagnosis: Diagnosis | None
    #: A container restarted so often that waiting is pointless (compared with a setting by plan).
    restarts_of_container: int


class HeadState(StrEnum):
    """What is known of the Ray head's pod of the current attempt."""

    NOT_SEEN = "notSeen"
    PENDING = "pending"
    RUNNING = "running"
    TERMINATING = "terminating"
    FAILED = "failed"
    GONE = "gone"


@dataclass(frozen=True)
class RayJobView:
    """The RayJob of one attempt and its RayCluster's live state. The words are KubeRay's."""

    owned: Owned
    attempt: int
    deployment_status: str
    job_status: str
    reason: str
    message: str
    head: HeadState
    cluster_ready: bool
    #: RayCluster condition HeadPodReady is False though the cluster had been ready.
    head_not_ready: bool
    #: Why pods of the attempt do not run yet.
    waiting: Diagnosis | None
    #: They wait for room (unschedulable, quota), not for an image or a volume.
    waits_for_room: bool
    #: Why pods of the attempt failed or go away.
    disruption: Diagnosis | None
    #: When the last of its pods got a node; None while one has none.
    scheduled_at: datetime | None


@dataclass(frozen=True)
class Observation:
    """One job as `plan` sees it."""

    job: JobView
    memory: Memory
    #: Every owned child by kind and name.
    owned: Mapping[tuple[Kind, str], Owned]
    check: StepJob | None = None
    #: Probe Jobs by name.
    probes: Mapping[str, StepJob] = field(default_factory=dict)
    teachers: tuple[TeacherView, ...] = ()
    #: RayJobs by attempt.
    ray_jobs: Mapping[int, RayJobView] = field(default_factory=dict)
    #: Documents of the current attempt; others are ignored.
    progress: ProgressDocument | None = None
    final: FinalDocument | None = None
    #: Why a document that is there could not be read.
    unreadable: str = ""
    #: Student pods that still exist, by attempt.
    student_pods: Mapping[int, int] = field(default_factory=dict)
    #: Pods of teachers and students that have a node and have not ended.
    holding_pods: int = 0
    #: Of those that are deleted, by node: the latest time by which they should be gone.
    going_by: Mapping[str, str] = field(default_factory=dict)
    #: RayJobs are not served by this cluster: set by the rim, which knows it from its lists.
    kuberay_missing: bool = False
    namespace_terminating: bool = False

    @property
    def problems(self) -> tuple[WriteProblem, ...]:
        """Refused writes of the last execution."""
        return self.memory.problems
