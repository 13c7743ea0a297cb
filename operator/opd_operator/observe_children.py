"""Views of single children: check and probe Jobs, teachers, RayJobs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from opd_api.progress import FinalDocument
from opd_api.vocabulary import Annotation, FailureClass, Label, Reason, Role
from opd_operator import diagnose_ray
from opd_operator.diagnose import RESUME, creation_message, diagnose_creation, diagnose_pod, diagnose_pods
from opd_operator.model import Diagnosis, HeadState, Manifest, Owned, RayJobView, StepJob, StepState, TeacherView

JOB_UID_LABELS = ("batch.kubernetes.io/controller-uid", "controller-uid")
ROOM = frozenset({Reason.UNSCHEDULABLE, Reason.QUOTA_EXCEEDED, Reason.NOT_ADMITTED})


def role_of(item: Manifest) -> str:
    """Value of opd.dev/role."""
    return str(item["metadata"].get("labels", {}).get(Label.ROLE, ""))


def attempt_of(item: Manifest) -> int:
    """Value of opd.dev/attempt, 0 when there is none."""
    text = str(item["metadata"].get("labels", {}).get(Label.ATTEMPT, "0"))
    return int(text) if text.isdigit() else 0


def is_active(pod: Manifest) -> bool:
    """On a node and not ended: its accelerators are taken."""
    return bool(pod.get("spec", {}).get("nodeName")) and _phase(pod) not in ("Succeeded", "Failed")


def accelerator_units(pod: Manifest, resource: str) -> int:
    """Units of a resource that the pod's containers request. Not of every extended one: network devices are some, too."""
    containers = pod.get("spec", {}).get("containers", [])
    amounts = [str(item.get("resources", {}).get("limits", {}).get(resource, "")) for item in containers]
    return sum(int(amount) for amount in amounts if amount.isdigit())


def step_job(owned: Owned, item: Manifest, pods: Sequence[Manifest], events: Sequence[Manifest]) -> StepJob:
    """A check or probe Job with the document of its newest pod that left one."""
    conditions = {entry["type"] for entry in item.get("status", {}).get("conditions", []) if entry["status"] == "True"}
    own = [
        pod for pod in pods if any(pod["metadata"].get("labels", {}).get(key) == owned.uid for key in JOB_UID_LABELS)
    ]
    own.sort(key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
    state = StepState.RUNNING
    if conditions & {"Complete", "SuccessCriteriaMet"}:
        state = StepState.SUCCEEDED
    elif "Failed" in conditions:
        state = StepState.FAILED
    documents = [document for pod in own if (document := _termination_document(pod)) is not None]
    diagnosis = diagnose_pods(own[-1:], events)
    if diagnosis is None and not own:
        diagnosis = diagnose_creation(creation_message(events, owned.uid))
    ended = bool(own) and _phase(own[-1]) in ("Succeeded", "Failed")
    return StepJob(
        owned=owned,
        state=state,
        document=documents[-1] if documents else None,
        diagnosis=diagnosis,
        pod_ended=ended,
        undecided=state is not StepState.RUNNING and bool(own) and not ended,
    )


def teacher_view(
    name: str,
    replicas: int,
    owned: Owned | None,
    deployment: Manifest | None,
    pods: Sequence[Manifest],
    events: Sequence[Manifest],
) -> TeacherView:
    """A served teacher. Ready means: observed, all replicas updated and ready, and exactly so many ready pods are seen."""
    restart = owned.annotations.get(Annotation.RESTART, "0") if owned else "0"
    # Pods from before a restart say nothing about the present ones, though they may be seen for a while.
    staying = [
        pod
        for pod in pods
        if not pod["metadata"].get("deletionTimestamp")
        and pod["metadata"].get("annotations", {}).get(Annotation.RESTART, restart) == restart
    ]
    ready_pods = tuple(sorted(pod["metadata"]["uid"] for pod in staying if _is_ready(pod)))
    if owned is None or deployment is None:
        return TeacherView(name, None, 0, 0, replicas, False, (), len(pods), None, 0)
    status = deployment.get("status", {})
    desired = int(deployment.get("spec", {}).get("replicas", replicas))
    ready = int(status.get("readyReplicas", 0))
    current = int(status.get("observedGeneration", 0)) >= int(deployment["metadata"].get("generation", 0))
    updated = int(status.get("updatedReplicas", 0)) == desired == int(status.get("replicas", 0))
    all_ready = current and updated and not owned.deleting and ready == desired == len(ready_pods)
    refusal = next(
        (
            str(entry.get("message", ""))
            for entry in status.get("conditions", [])
            if entry.get("type") == "ReplicaFailure" and entry.get("status") == "True"
        ),
        "",
    )
    diagnosis = None if all_ready else diagnose_pods(staying, events) or diagnose_creation(refusal)
    return TeacherView(
        name=name,
        deployment=owned,
        restart=int(restart) if restart.isdigit() else 0,
        ready=min(ready, desired),
        desired=desired,
        all_ready=all_ready,
        ready_pods=ready_pods,
        pods=len(pods),
        diagnosis=diagnosis,
        restarts_of_container=max((_restarts(pod) for pod in staying if not _is_ready(pod)), default=0),
    )


def ray_job_view(
    owned: Owned,
    item: Manifest,
    clusters: Sequence[Manifest],
    pods: Sequence[Manifest],
    events: Sequence[Manifest],
) -> RayJobView:
    """A RayJob, its RayCluster's live health and its pods."""
    status = item.get("status", {})
    cluster = clusters[-1] if clusters else None
    state = cluster.get("status", {}) if cluster else {}
    conditions = {entry["type"]: entry for entry in state.get("conditions", [])}
    deployment_status = str(status.get("jobDeploymentStatus", ""))
    once_ready = (
        state.get("state") == "ready" or deployment_status == "Running" or _true(conditions, "RayClusterProvisioned")
    )
    heads = [pod for pod in pods if role_of(pod) == Role.HEAD]
    head_seen = once_ready or bool(state.get("head", {}).get("podName"))
    going = [pod for pod in pods if pod["metadata"].get("deletionTimestamp") or _phase(pod) in ("Failed", "Succeeded")]
    waiting_pods = [pod for pod in pods if pod not in going and not _is_ready(pod)]
    suspended = deployment_status in diagnose_ray.SUSPENDED
    waiting = diagnose_pods(waiting_pods, events) or _cluster_refusal(conditions, cluster, events)
    if waiting is None and suspended and not pods:
        waiting = diagnose_ray.not_admitted()
    return RayJobView(
        owned=owned,
        attempt=attempt_of(item),
        deployment_status=deployment_status,
        job_status=str(status.get("jobStatus", "")),
        reason=str(status.get("reason", "")),
        message=str(status.get("message", "")),
        head=_head_state(heads, head_seen),
        cluster_ready=state.get("state") == "ready",
        head_not_ready=once_ready and conditions.get("HeadPodReady", {}).get("status") == "False",
        waiting=waiting,
        waits_for_room=waiting is not None and waiting.reason in ROOM,
        disruption=diagnose_ray.suspended_by_queue() if going and suspended else _disruption(going),
        scheduled_at=_scheduled_at(pods),
    )


def _cluster_refusal(
    conditions: Mapping[str, Any], cluster: Manifest | None, events: Sequence[Manifest]
) -> Diagnosis | None:
    """Pods that KubeRay could not create."""
    if cluster is None:
        return None
    message = creation_message(events, cluster["metadata"]["uid"])
    if _true(conditions, "ReplicaFailure"):
        message = str(conditions["ReplicaFailure"].get("message", "")) or message
    return diagnose_creation(message)


def _disruption(going: Sequence[Manifest]) -> Diagnosis | None:
    """Why pods go away or failed; the head's reason before a worker's, because workers follow the head."""
    for pod in sorted(going, key=lambda pod: role_of(pod) != Role.HEAD):
        diagnosis = diagnose_pod(pod)
        if diagnosis is not None:
            return diagnosis
    if going:
        lost = Reason.HEAD_LOST if role_of(going[0]) == Role.HEAD else Reason.WORKER_LOST
        name = going[0]["metadata"]["name"]
        return Diagnosis(FailureClass.INFRASTRUCTURE, lost, f"pod {name} ended", RESUME)
    return None


def _head_state(heads: Sequence[Manifest], seen: bool) -> HeadState:
    if not heads:
        return HeadState.GONE if seen else HeadState.NOT_SEEN
    head = max(heads, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
    if _phase(head) in ("Failed", "Succeeded"):
        return HeadState.FAILED
    if head["metadata"].get("deletionTimestamp"):
        return HeadState.TERMINATING
    return HeadState.RUNNING if _phase(head) == "Running" else HeadState.PENDING


def _scheduled_at(pods: Sequence[Manifest]) -> datetime | None:
    """When the last pod got its node; None while one waits or none exists."""
    times: list[datetime] = []
    for pod in pods:
        entry = next((e for e in pod.get("status", {}).get("conditions", []) if e.get("type") == "PodScheduled"), None)
        if entry is None or entry.get("status") != "True" or not entry.get("lastTransitionTime"):
            return None
        times.append(datetime.fromisoformat(entry["lastTransitionTime"]))
    return max(times, default=None)


def _termination_document(pod: Manifest) -> FinalDocument | None:
    """The FinalDocument that a check or probe pod left as its termination message."""
    for status in pod.get("status", {}).get("containerStatuses", []):
        message = ((status.get("state") or {}).get("terminated") or {}).get("message")
        if message:
            try:
                return FinalDocument.model_validate_json(message)
            except ValidationError:
                # FallbackToLogsOnError: the tail of the log, which diagnose shows as last words.
                return None
    return None


def _is_ready(pod: Manifest) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(entry.get("type") == "Ready" and entry.get("status") == "True" for entry in conditions)


def _restarts(pod: Manifest) -> int:
    return max(
        (int(item.get("restartCount", 0)) for item in pod.get("status", {}).get("containerStatuses", [])), default=0
    )


def _phase(pod: Manifest) -> str:
    return str(pod.get("status", {}).get("phase", ""))


def _true(conditions: Mapping[str, Any], kind: str) -> bool:
    return bool(conditions.get(kind, {}).get("status") == "True")
