"""What the operator knows of the cluster: trimmed objects by job, kept up to date by the feed and by our own writes.

Two sources write here (watches and lists), and a third after each write of ours, in any order. The resourceVersion decides:
an older version never replaces a newer one. What a list no longer holds is dropped unless it is newer than the list.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple

from opd_api.progress import FINAL_KEY, PROGRESS_KEY
from opd_api.vocabulary import TERMINAL_PHASES, Annotation, ConditionType, Label
from opd_operator.children.names import job_label, progress_config_map
from opd_operator.model import Kind, Manifest, ObjectRef, Snapshot
from opd_operator.resources import CHILDREN, OPDJOB, RESOURCES, Resource

_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_KIND_OF_RESOURCE = {resource: kind for kind, resource in CHILDREN.items()}
#: So long the UID of a deleted object is remembered, so that a list that was under way cannot bring it back: the API server
#: lets the pages of a list be read for five minutes.
TOMBSTONE_SECONDS = 300.0


class JobKey(NamedTuple):
    """Namespace and name of an OPDJob: the key of the work queue."""

    namespace: str
    name: str


class Urgency(IntEnum):
    """How soon a change deserves a pass."""

    #: A heartbeat that says nothing new but that the trainer lives.
    SOON = 1
    NOW = 2


class Change(NamedTuple):
    """A job that a change concerns."""

    key: JobKey
    urgency: Urgency


class Cache:
    """See the module. Not thread-safe: the event loop owns it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._jobs: dict[JobKey, Manifest] = {}
        self._job_of_label: dict[tuple[str, str], JobKey] = {}
        #: (namespace, value of opd.dev/job) -> (kind, name) -> object. Children may be seen before their job.
        self._children: dict[tuple[str, str], dict[tuple[Kind, str], Manifest]] = {}
        #: When each UID was deleted, the oldest first.
        self._gone: OrderedDict[str, float] = OrderedDict()

    def job(self, key: JobKey) -> Manifest | None:
        """The OPDJob or None."""
        return self._jobs.get(key)

    def jobs(self) -> Iterator[tuple[JobKey, Manifest]]:
        """All OPDJobs."""
        return iter(list(self._jobs.items()))

    def children(self, key: JobKey, kind: Kind) -> Iterable[Manifest]:
        """Children of one kind."""
        family = self._children.get((key.namespace, job_label(key.name)), {})
        return (child for (child_kind, _), child in family.items() if child_kind == kind)

    def snapshot(self, key: JobKey) -> Snapshot | None:
        """Everything about a job; None when there is no such OPDJob."""
        job = self._jobs.get(key)
        if job is None:
            return None
        found: dict[Kind, list[Manifest]] = {kind: [] for kind in Kind}
        for (kind, _), child in sorted(self._children.get((key.namespace, job_label(key.name)), {}).items()):
            found[kind].append(child)
        return Snapshot(
            job=job,
            deployments=tuple(found[Kind.DEPLOYMENT]),
            services=tuple(found[Kind.SERVICE]),
            jobs=tuple(found[Kind.JOB]),
            pods=tuple(found[Kind.POD]),
            ray_jobs=tuple(found[Kind.RAY_JOB]),
            ray_clusters=tuple(found[Kind.RAY_CLUSTER]),
            config_maps=tuple(found[Kind.CONFIG_MAP]),
            network_policies=tuple(found[Kind.NETWORK_POLICY]),
        )

    def put(self, resource: Resource, manifest: Manifest) -> Change | None:
        """Takes a trimmed object unless a newer version is known. None: it concerns no known job, or is old."""
        metadata = manifest["metadata"]
        if metadata["uid"] in self._gone:
            return None
        if resource == OPDJOB:
            key = JobKey(metadata["namespace"], metadata["name"])
            if not _is_newer(manifest, self._jobs.get(key)):
                return None
            self._jobs[key] = manifest
            self._job_of_label[key.namespace, job_label(key.name)] = key
            return Change(key, Urgency.NOW)
        label = _label(manifest)
        kind = _KIND_OF_RESOURCE.get(resource)
        if label is None or kind is None:
            return None
        family = self._children.setdefault(label, {})
        old = family.get((kind, metadata["name"]))
        if not _is_newer(manifest, old):
            return None
        family[kind, metadata["name"]] = manifest
        owner = self._job_of_label.get(label)
        return Change(owner, _urgency(kind, old, manifest)) if owner is not None else None

    def remove(self, resource: Resource, manifest: Manifest) -> Change | None:
        """Drops an object that was deleted. Ignored when the name belongs to another object by now."""
        metadata = manifest["metadata"]
        self._bury(metadata["uid"])
        if resource == OPDJOB:
            key = JobKey(metadata["namespace"], metadata["name"])
            job = self._jobs.get(key)
            if job is None or job["metadata"]["uid"] != metadata["uid"]:
                return None
            del self._jobs[key]
            self._job_of_label.pop((key.namespace, job_label(key.name)), None)
            return Change(key, Urgency.NOW)
        label = _label(manifest)
        kind = _KIND_OF_RESOURCE.get(resource)
        if label is None or kind is None or label not in self._children:
            return None
        family = self._children[label]
        old = family.get((kind, metadata["name"]))
        if old is None or old["metadata"]["uid"] != metadata["uid"]:
            return None
        del family[kind, metadata["name"]]
        if not family:
            del self._children[label]
        owner = self._job_of_label.get(label)
        return Change(owner, Urgency.NOW) if owner is not None else None

    def mark_deleting(self, key: JobKey, ref: ObjectRef, uid: str, at: str) -> None:
        """Notes that a delete of ours was accepted at that time, until the watch tells more."""
        resource = RESOURCES[ref.api_version, ref.kind]
        if resource == OPDJOB:
            job = self._jobs.get(JobKey(ref.namespace, ref.name))
            if job is not None and job["metadata"]["uid"] == uid:
                self._jobs[JobKey(ref.namespace, ref.name)] = _deleting(job, at)
            return
        family = self._children.get((ref.namespace, job_label(key.name)), {})
        name = (_KIND_OF_RESOURCE[resource], ref.name)
        child = family.get(name)
        if child is not None and child["metadata"]["uid"] == uid:
            family[name] = _deleting(child, at)

    def forget(self, key: JobKey, ref: ObjectRef, uid: str) -> None:
        """Drops an object of a job that a delete of ours did not find any more."""
        self._bury(uid)
        resource = RESOURCES[ref.api_version, ref.kind]
        if resource == OPDJOB:
            return
        family = self._children.get((ref.namespace, job_label(key.name)), {})
        name = (_KIND_OF_RESOURCE[resource], ref.name)
        if name in family and family[name]["metadata"]["uid"] == uid:
            del family[name]

    def drop_absent(
        self, resource: Resource, namespace: str | None, present: set[tuple[str, str]], version: str
    ) -> list[Change]:
        """Drops objects that a complete list of that version does not hold. `present`: (namespace, uid) of the list."""
        changes = []
        for manifest in self._of(resource, namespace):
            metadata = manifest["metadata"]
            absent = (metadata["namespace"], metadata["uid"]) not in present
            if absent and _version(metadata.get("resourceVersion")) <= _version(version):
                change = self.remove(resource, manifest)
                if change is not None:
                    changes.append(change)
        return changes

    def _of(self, resource: Resource, namespace: str | None) -> list[Manifest]:
        if resource == OPDJOB:
            return [job for key, job in self._jobs.items() if namespace in (None, key.namespace)]
        kind = _KIND_OF_RESOURCE[resource]
        return [
            child
            for (child_namespace, _), family in self._children.items()
            if namespace in (None, child_namespace)
            for (child_kind, _), child in family.items()
            if child_kind == kind
        ]

    def _bury(self, uid: str) -> None:
        now = self._clock()
        self._gone.setdefault(uid, now)
        while now - next(iter(self._gone.values())) > TOMBSTONE_SECONDS:
            self._gone.popitem(last=False)

    @property
    def size(self) -> int:
        """Number of objects."""
        return len(self._jobs) + sum(len(family) for family in self._children.values())


def trim(resource: Resource, manifest: Manifest) -> Manifest:
    """Only what decisions need (see model.Snapshot): memory is counted per watched object."""
    metadata = dict(manifest["metadata"])
    metadata.pop("managedFields", None)
    annotations = metadata.get("annotations")
    if annotations and _LAST_APPLIED in annotations:
        metadata["annotations"] = {key: value for key, value in annotations.items() if key != _LAST_APPLIED}
    kept: Manifest = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}
    if "status" in manifest:
        kept["status"] = manifest["status"]
    match resource.kind:
        case "OPDJob":
            kept["spec"] = manifest.get("spec") or {}
        case "Deployment":
            spec = manifest.get("spec") or {}
            template = {"metadata": (spec.get("template") or {}).get("metadata") or {}}
            kept["spec"] = {"replicas": spec.get("replicas"), "template": template}
        case "Pod":
            spec = manifest.get("spec") or {}
            containers = [
                {"name": container.get("name"), "resources": container.get("resources") or {}}
                for container in spec.get("containers") or ()
            ]
            kept["spec"] = {"nodeName": spec.get("nodeName"), "containers": containers}
        case "ConfigMap":
            instance = (metadata.get("labels") or {}).get(Label.INSTANCE.value, "")
            if metadata["name"] == progress_config_map(instance):
                kept["data"] = manifest.get("data") or {}
    return kept


def at_rest(job: Manifest) -> bool:
    """It has ended and holds nothing: only its time to live is left."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    released = any(
        item.get("type") == ConditionType.RESOURCES_RELEASED and item.get("status") == "True" for item in conditions
    )
    return released and has_ended(job) and not job["metadata"].get("deletionTimestamp")


def has_ended(job: Manifest) -> bool:
    """Nothing will be trained for this OPDJob any more."""
    return (job.get("status") or {}).get("phase") in TERMINAL_PHASES


def _deleting(manifest: Manifest, at: str) -> Manifest:
    return {**manifest, "metadata": {"deletionTimestamp": at, **manifest["metadata"]}}


def _label(manifest: Manifest) -> tuple[str, str] | None:
    metadata = manifest["metadata"]
    value = (metadata.get("labels") or {}).get(Label.JOB.value)
    return (metadata["namespace"], value) if value else None


def _version(value: Any) -> int:
    """resourceVersions of one kind are ordered numbers; what is none counts as the newest."""
    text = str(value or "")
    return int(text) if text.isdecimal() else 2**63


def _is_newer(manifest: Manifest, old: Manifest | None) -> bool:
    if old is None:
        return True
    return _version(manifest["metadata"].get("resourceVersion")) > _version(old["metadata"].get("resourceVersion"))


def _urgency(kind: Kind, old: Manifest | None, new: Manifest) -> Urgency:
    if kind is Kind.CONFIG_MAP and old is not None and _news(old) == _news(new):
        return Urgency.SOON
    return Urgency.NOW


def _news(config_map: Manifest) -> tuple[Any, ...]:
    """What of a progress ConfigMap deserves a pass at once: attempt, phase, the end, the request to stop."""
    data = config_map.get("data") or {}
    try:
        document = json.loads(data.get(PROGRESS_KEY) or "{}")
    except (ValueError, RecursionError):  # nesting without end must not reach the lists, which feed every job
        document = {}
    metadata = config_map["metadata"]
    return (
        document.get("attempt") if isinstance(document, dict) else None,
        document.get("phase") if isinstance(document, dict) else None,
        data.get(FINAL_KEY),
        (metadata.get("annotations") or {}).get(Annotation.STOP.value),
        metadata.get("deletionTimestamp"),
        metadata["uid"],
    )
