"""From the raw objects of one job to what `plan` decides on. Pure: the time and the memory are arguments.

Objects of an earlier OPDJob of the same name are told apart by owner UID, pods (which belong to a ReplicaSet, a Job or a
RayCluster) by their age.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from pydantic import ValidationError

from opd_api.progress import FINAL_KEY, PROGRESS_KEY, FinalDocument, ProgressDocument
from opd_api.v1alpha1 import OPDJobStatus
from opd_api.vocabulary import ConditionType, Label, Role, TrainerPhase
from opd_operator import diagnose_ray
from opd_operator.children import names
from opd_operator.children.teacher import served
from opd_operator.job_view import job_view
from opd_operator.model import (
    Fact,
    HeadState,
    JobView,
    Kind,
    Manifest,
    Memory,
    ObjectRef,
    Observation,
    Owned,
    RayJobView,
    Seen,
    Snapshot,
    TeacherView,
)
from opd_operator.observe_children import (
    attempt_of,
    is_active,
    ray_job_view,
    role_of,
    step_job,
    teacher_view,
)

Document = TypeVar("Document", ProgressDocument, FinalDocument)
#: Roles whose pods hold accelerators.
HOLDERS = frozenset({Role.TEACHER.value, Role.HEAD.value, Role.WORKER.value})


def observe(snapshot: Snapshot, now: datetime, memory: Memory) -> Observation:
    """What is known of one job at one moment, with the updated memory."""
    job = job_view(snapshot.job, claim_modes=snapshot.claim_modes, unwritten=memory.unwritten)
    ours = _ours(snapshot, job)
    pods = _pods(snapshot, job)
    ray_jobs = _ray_jobs(snapshot, ours, pods, job)
    attempt = attempt_now(job.status, ray_jobs)
    job = replace(job, status=job.status.model_copy(update={"attempt": attempt}))
    data = _progress_data(snapshot, ours, job)
    progress, garbled = _document(data, PROGRESS_KEY, ProgressDocument, attempt)
    final, unreadable = _document(data, FINAL_KEY, FinalDocument, attempt)
    steps = {
        item["metadata"]["name"]: step_job(ours[Kind.JOB, item["metadata"]["name"]], item, pods, snapshot.events)
        for item in snapshot.jobs
        if (Kind.JOB, item["metadata"]["name"]) in ours
    }
    holders = [pod for pod in pods if role_of(pod) in HOLDERS and is_active(pod)]
    observation = Observation(
        job=job,
        memory=memory,
        owned=ours,
        check=steps.get(names.check_job(job.name)),
        probes={name: step for name, step in steps.items() if name != names.check_job(job.name)},
        teachers=_teachers(snapshot, ours, pods, job),
        ray_jobs=ray_jobs,
        progress=progress,
        final=final,
        unreadable=unreadable or garbled,
        student_pods=_count_by_attempt(pods),
        holding_pods=len(holders),
        going_by=_going_by(holders),
        namespace_terminating=snapshot.namespace_terminating,
    )
    return replace(observation, memory=_remember(observation, attempt, now))


def _going_by(holders: Iterable[Manifest]) -> dict[str, str]:
    """Latest deletion time by node: a deletion timestamp includes the pod's grace."""
    found: dict[str, str] = {}
    for pod in holders:
        at, node = pod["metadata"].get("deletionTimestamp"), pod.get("spec", {}).get("nodeName", "")
        if at:
            found[node] = max(at, found.get(node, ""))
    return found


def event_subjects(snapshot: Snapshot) -> tuple[ObjectRef, ...]:
    """Objects whose Events would tell something that no status does: pods that wait for a volume, and Jobs and RayClusters
    without a pod. Empty for a healthy job, so that it costs no read."""
    found: list[ObjectRef] = []
    owners = {reference.get("uid") for pod in snapshot.pods for reference in pod["metadata"].get("ownerReferences", ())}
    for pod in snapshot.pods:
        waits = pod.get("status", {}).get("phase") == "Pending" and bool(pod.get("spec", {}).get("nodeName"))
        if waits and not pod["metadata"].get("deletionTimestamp"):
            found.append(ObjectRef.of({"apiVersion": "v1", "kind": Kind.POD.value, **_only_metadata(pod)}))
    for kind, api_version, items in (
        (Kind.JOB, "batch/v1", snapshot.jobs),
        (Kind.RAY_CLUSTER, "ray.io/v1", snapshot.ray_clusters),
    ):
        for item in items:
            over = bool(item.get("status", {}).get("completionTime")) or bool(item["metadata"].get("deletionTimestamp"))
            if item["metadata"].get("uid") not in owners and not over:
                found.append(ObjectRef.of({"apiVersion": api_version, "kind": kind.value, **_only_metadata(item)}))
    return tuple(found)


def _only_metadata(item: Manifest) -> Manifest:
    return {"metadata": item["metadata"]}


def _ours(snapshot: Snapshot, job: JobView) -> dict[tuple[Kind, str], Owned]:
    """Children with our UID as controller."""
    kinds = (
        (Kind.DEPLOYMENT, snapshot.deployments),
        (Kind.SERVICE, snapshot.services),
        (Kind.JOB, snapshot.jobs),
        (Kind.RAY_JOB, snapshot.ray_jobs),
        (Kind.CONFIG_MAP, snapshot.config_maps),
        (Kind.NETWORK_POLICY, snapshot.network_policies),
    )
    found: dict[tuple[Kind, str], Owned] = {}
    for kind, items in kinds:
        for item in items:
            metadata = item["metadata"]
            if any(reference.get("uid") == job.uid for reference in metadata.get("ownerReferences", ())):
                found[kind, metadata["name"]] = Owned(
                    kind=kind,
                    name=metadata["name"],
                    uid=metadata["uid"],
                    deleting=bool(metadata.get("deletionTimestamp")),
                    labels=metadata.get("labels", {}),
                    annotations=metadata.get("annotations", {}),
                )
    return found


def _pods(snapshot: Snapshot, job: JobView) -> list[Manifest]:
    """Pods that are not older than the job (both times are the API server's)."""
    born = str(snapshot.job["metadata"].get("creationTimestamp", ""))
    return [pod for pod in snapshot.pods if str(pod["metadata"].get("creationTimestamp", born)) >= born]


def _teachers(
    snapshot: Snapshot, ours: Mapping[tuple[Kind, str], Owned], pods: list[Manifest], job: JobView
) -> tuple[TeacherView, ...]:
    if job.spec is None:
        return ()
    by_name = {item["metadata"]["name"]: item for item in snapshot.deployments}
    views = []
    for teacher in served(job.spec):
        name = names.teacher(job.name, teacher.name)
        owned = ours.get((Kind.DEPLOYMENT, name))
        own_pods = [pod for pod in pods if pod["metadata"].get("labels", {}).get(Label.TEACHER) == teacher.name]
        views.append(
            teacher_view(
                teacher.name, teacher.replicas, owned, by_name.get(name) if owned else None, own_pods, snapshot.events
            )
        )
    return tuple(views)


def attempt_now(status: OPDJobStatus, ray_jobs: Mapping[int, RayJobView]) -> int:
    """The current attempt. The status counts, unless a RayJob lives that it cannot explain: then somebody wrote the status by
    hand, or it was lost, and the newest living RayJob is the attempt that is under way."""
    told = status.attempt or 1
    newest = max((attempt for attempt, view in ray_jobs.items() if not view.owned.deleting), default=told)
    record = next((item for item in status.attempts if item.number == told), None)
    if newest == told + 1 and record is not None and record.end_time is not None:
        return told  # the next attempt begins with its RayJob; the status follows
    return newest if newest > told or record is None else told


def _ray_jobs(
    snapshot: Snapshot, ours: Mapping[tuple[Kind, str], Owned], pods: list[Manifest], job: JobView
) -> dict[int, RayJobView]:
    """Our RayJobs by attempt. One whose name is not its attempt's (a copy that somebody made) is no attempt."""
    found: dict[int, RayJobView] = {}
    for item in snapshot.ray_jobs:
        owned = ours.get((Kind.RAY_JOB, item["metadata"]["name"]))
        attempt = attempt_of(item)
        if owned is None or owned.name != names.ray_job(job.name, attempt):
            continue
        clusters = [
            cluster
            for cluster in snapshot.ray_clusters
            if any(reference.get("uid") == owned.uid for reference in cluster["metadata"].get("ownerReferences", ()))
        ]
        own_pods = [pod for pod in pods if role_of(pod) in (Role.HEAD, Role.WORKER) and attempt_of(pod) == attempt]
        found[attempt] = ray_job_view(owned, item, clusters, own_pods, snapshot.events)
    return found


def _count_by_attempt(pods: Iterable[Manifest]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for pod in pods:
        if role_of(pod) in (Role.HEAD, Role.WORKER) and not _over(pod):
            counts[attempt_of(pod)] = counts.get(attempt_of(pod), 0) + 1
    return counts


def _over(pod: Manifest) -> bool:
    """A pod whose containers have all ended: it writes nothing and holds nothing."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _progress_data(snapshot: Snapshot, ours: Mapping[tuple[Kind, str], Owned], job: JobView) -> Mapping[str, str]:
    name = names.progress_config_map(job.name)
    for item in snapshot.config_maps:
        if item["metadata"]["name"] == name and (Kind.CONFIG_MAP, name) in ours:
            data: Mapping[str, str] = item.get("data") or {}
            return data
    return {}


def _document(data: Mapping[str, str], key: str, model: type[Document], attempt: int) -> tuple[Document | None, str]:
    """A document of the current attempt; or why what is there cannot be read."""
    text = data.get(key)
    if not text:
        return None, ""
    try:
        document = model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return None, f"(the document under {key!r} is unreadable: {'.'.join(map(str, first['loc']))}: {first['msg']})"
    return (document, "") if document.attempt == attempt else (None, "")


def _remember(observation: Observation, attempt: int, now: datetime) -> Memory:
    """The memory after this look: changed numbers get the present time, new facts too, ended facts are forgotten."""
    old = observation.memory
    same = old.attempt == attempt
    sequence, activity = (old.sequence, old.activity) if same else (None, None)
    progress = observation.progress
    if progress is not None:
        if sequence is None or sequence.value != progress.sequence:
            sequence = Seen(progress.sequence, now)
        # While samples are held for a teacher nothing moves, and nothing is stalled.
        held = progress.phase is TrainerPhase.TEACHER_UNAVAILABLE
        if activity is None or held or activity.value != progress.activity:
            activity = Seen(progress.activity, now)
    facts = _facts(observation, attempt)
    if same and Fact.DISRUPTED in old.since:
        facts.add(Fact.DISRUPTED)
    since = {fact: old.since.get(fact, now) if same else now for fact in facts}
    job = observation.ray_jobs.get(attempt)
    return Memory(
        attempt=attempt,
        sequence=sequence,
        activity=activity,
        since=since,
        disruption=(old.disruption if same else None) or (job.disruption if job else None),
        # Of another spec's children they say nothing about this one's.
        problems=old.problems if old.met_at == observation.job.generation else (),
        met_at=old.met_at,
        rehearsed=old.rehearsed,
        unwritten=old.unwritten,
    )


def _facts(observation: Observation, attempt: int) -> set[Fact]:
    """What is true of the current attempt now."""
    facts: set[Fact] = set()
    if observation.final is not None:
        facts.add(Fact.FINAL_DOCUMENT)
    job = observation.ray_jobs.get(attempt)
    entry = next((item for item in observation.job.status.attempts if item.number == attempt), None)
    live = entry is not None and entry.end_time is None
    created = observation.progress is not None or any(
        condition.type == ConditionType.RAY_JOB_CREATED and condition.status == "True"
        for condition in observation.job.status.conditions
    )
    if job is None or job.owned.deleting:
        if live and (created or job is not None):
            facts.add(Fact.RAY_JOB_MISSING)
        return facts
    if diagnose_ray.ended(job):
        facts.add(Fact.RAY_JOB_ENDED)
    if job.deployment_status == "Running":
        facts.add(Fact.RAY_JOB_RUNNING)
    if job.head is HeadState.GONE:
        facts.add(Fact.HEAD_GONE)
    if job.head_not_ready:
        facts.add(Fact.HEAD_NOT_READY)
    if job.disruption is not None:
        facts.add(Fact.DISRUPTED)
    if job.waiting is not None and job.waits_for_room:
        facts.add(Fact.CAPACITY_WAIT)
    return facts
