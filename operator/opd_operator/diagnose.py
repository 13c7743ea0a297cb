"""What is wrong with a pod, and what a person can do about it: pods and events -> Diagnosis. Pure.

A Diagnosis is given for what has failed, goes away or waits; a healthy or merely starting pod has none. Classes are those of
`opd_api.vocabulary.FailureClass`; what is done about a class is decided in `plan`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opd_api.vocabulary import FailureClass, Reason
from opd_operator.model import Diagnosis, Manifest

MESSAGE_LIMIT = 700
LAST_WORDS_LINES = 5
LAST_WORDS_LIMIT = 400

IMAGE_PULL = frozenset(
    {
        "ImagePullBackOff",
        "ErrImagePull",
        "InvalidImageName",
        "ErrImageNeverPull",
        "RegistryUnavailable",
        "ImageInspectError",
    }
)
#: Words by which registries and kubelet say that there is no such image, as opposed to "try again".
NO_SUCH_IMAGE = re.compile(
    r"not found|manifest unknown|does not exist|InvalidImageName|couldn't parse image|ErrImageNeverPull|never", re.I
)
CONFIG_WAITS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
DISRUPTIONS = {
    "PreemptionByScheduler": Reason.PREEMPTED_BY_SCHEDULER,
    "EvictionByEvictionAPI": Reason.EVICTED,
    "TerminationByKubelet": Reason.EVICTED,
    "DeletionByTaintManager": Reason.NODE_LOST,
    "DeletionByPodGC": Reason.NODE_LOST,
}
POD_REASONS = {
    "Evicted": Reason.EVICTED,
    "NodeLost": Reason.NODE_LOST,
    "NodeShutdown": Reason.NODE_LOST,
    "Shutdown": Reason.NODE_LOST,
    "Terminated": Reason.NODE_LOST,
    "Preempting": Reason.PREEMPTED_BY_SCHEDULER,
    "UnexpectedAdmissionError": Reason.UNEXPECTED_ADMISSION,
    "NodeAffinity": Reason.UNEXPECTED_ADMISSION,
}
VOLUME_EVENTS = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
HINTS = {
    Reason.EVICTED: "The next attempt goes on from the last checkpoint; raise memory or disk requests if the node was short.",
    Reason.NODE_LOST: "The next attempt goes on from the last checkpoint on another node.",
    Reason.PREEMPTED_BY_SCHEDULER: "Give the job a higher runtime.priorityClassName if it should not give way.",
    Reason.UNEXPECTED_ADMISSION: "The kubelet's view of its devices differs from the scheduler's; see the node's device plug-in.",
    Reason.POD_DELETED: "Somebody deleted the pod; the next attempt goes on from the last checkpoint.",
}
RESUME = "The next attempt goes on from the last checkpoint."
QUOTA_HINT = "Wait for other jobs to end, or ask for a larger ResourceQuota."
#: Most telling first: a job waits for the first of these that any of its pods shows.
RANK = (
    Reason.CONTAINER_CONFIG_ERROR,
    Reason.STORAGE_NOT_WRITABLE,
    Reason.IMAGE_PULL_FAILED,
    Reason.OOM_KILLED,
    Reason.CRASH_LOOP,
    Reason.QUOTA_EXCEEDED,
    Reason.UNSCHEDULABLE,
    Reason.VOLUME_NOT_ATTACHED,
)


def diagnose_pods(pods: Iterable[Manifest], events: Sequence[Manifest] = ()) -> Diagnosis | None:
    """The most telling diagnosis of several pods, or None when none has one."""
    found = [diagnosis for pod in pods if (diagnosis := diagnose_pod(pod, events)) is not None]
    if not found:
        return None
    return min(found, key=lambda item: RANK.index(item.reason) if item.reason in RANK else len(RANK))


def diagnose_pod(pod: Manifest, events: Sequence[Manifest] = ()) -> Diagnosis | None:
    """What is wrong with one pod, or None."""
    return (
        _disrupted(pod) or _ended(pod) or _containers(pod) or _unscheduled(pod) or _volume(pod, events) or _deleted(pod)
    )


def diagnose_creation(message: str) -> Diagnosis | None:
    """Why a controller could not create a pod, from the words of the API server."""
    if not message:
        return None
    quota = re.search(r"exceeded quota: (.*)", message, re.S)
    if quota:
        return Diagnosis(
            FailureClass.CAPACITY,
            Reason.QUOTA_EXCEEDED,
            _cut(f"exceeded quota: {quota.group(1)}"),
            QUOTA_HINT,
        )
    if "forbidden" in message or "invalid" in message.lower() or "denied" in message:
        return Diagnosis(
            FailureClass.CONFIG,
            Reason.CONTAINER_CONFIG_ERROR,
            _cut(f"the API server refuses the pod: {message}"),
            "Change runtime.securityContext, runtime.serviceAccountName or the role's template.",
        )
    return Diagnosis(
        FailureClass.INFRASTRUCTURE,
        Reason.POD_FAILED,
        _cut(f"the pod cannot be created: {message}"),
        "It is tried again.",
    )


def creation_message(events: Iterable[Manifest], uid: str) -> str:
    """Message of the newest FailedCreate event about an object."""
    about = [item for item in events if item.get("involvedObject", {}).get("uid") == uid]
    failed = [
        item for item in about if item.get("reason") in ("FailedCreate", "FailedCreateHeadPod", "FailedCreateWorkerPod")
    ]
    newest = max(failed, key=lambda item: str(item.get("lastTimestamp") or item.get("eventTime") or ""), default=None)
    return str(newest.get("message", "")) if newest else ""


def last_words(text: str) -> str:
    """The end of a container's termination message or log, on one line."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return " | ".join(lines[-LAST_WORDS_LINES:])[-LAST_WORDS_LIMIT:]


def _disrupted(pod: Manifest) -> Diagnosis | None:
    condition = _condition(pod, "DisruptionTarget")
    if condition is None or condition.get("status") != "True":
        return None
    reason = DISRUPTIONS.get(str(condition.get("reason")), Reason.EVICTED)
    return _infrastructure(pod, reason, str(condition.get("message") or condition.get("reason")))


def _ended(pod: Manifest) -> Diagnosis | None:
    """A pod in phase Failed."""
    status = pod.get("status", {})
    if status.get("phase") != "Failed":
        return None
    word = str(status.get("reason", ""))
    reason = POD_REASONS.get(word) or (Reason.UNEXPECTED_ADMISSION if word.startswith("OutOf") else None)
    if reason is not None:
        return _infrastructure(pod, reason, str(status.get("message") or word))
    for container in _container_statuses(pod):
        ended = container.get("state", {}).get("terminated")
        if ended and ended.get("exitCode"):
            return _terminated(pod, container, ended)
    return Diagnosis(
        FailureClass.INFRASTRUCTURE,
        Reason.POD_FAILED,
        _cut(f"pod {_name(pod)} failed: {status.get('message') or word or 'no reason given'}"),
        "See the pod's events.",
    )


def _containers(pod: Manifest) -> Diagnosis | None:
    """Containers that wait for something that will not come, or end again and again."""
    for container in _container_statuses(pod):
        state, last = container.get("state", {}), container.get("lastState", {})
        waiting = state.get("waiting") or {}
        word, said = str(waiting.get("reason", "")), str(waiting.get("message", ""))
        if word in IMAGE_PULL:
            return _image(container, word, said)
        if word in CONFIG_WAITS:
            return Diagnosis(
                FailureClass.CONFIG,
                Reason.CONTAINER_CONFIG_ERROR,
                _cut(f"container {container.get('name')} of {_name(pod)} cannot start: {said or word}"),
                "Create the missing Secret or ConfigMap, or correct image, command or securityContext.",
            )
        ended = state.get("terminated") or last.get("terminated")
        if ended and ended.get("exitCode") and pod.get("status", {}).get("phase") != "Succeeded":
            return _terminated(pod, container, ended)
    return None


def _terminated(pod: Manifest, container: Mapping[str, Any], ended: Mapping[str, Any]) -> Diagnosis:
    """A container that ended with an error."""
    name, words = container.get("name"), last_words(str(ended.get("message", "")))
    if ended.get("reason") == "OOMKilled":
        return Diagnosis(
            FailureClass.INFRASTRUCTURE,
            Reason.OOM_KILLED,
            f"container {name} of {_name(pod)} used more memory than its limit",
            "Raise resources.limits.memory of the role, or make batches smaller.",
        )
    if re.search(r"permission denied|EACCES|read-only file system", words, re.I):
        return Diagnosis(
            FailureClass.CONFIG,
            Reason.STORAGE_NOT_WRITABLE,
            _cut(f"container {name} of {_name(pod)} may not write: {words}"),
            "Make the claim writable for the pods' user (1000), or set runtime.securityContext (runAsUser, fsGroup).",
        )
    count = int(container.get("restartCount", 0))
    looping = count > 0
    return Diagnosis(
        FailureClass.INTERNAL,
        Reason.CRASH_LOOP if looping else Reason.POD_FAILED,
        _cut(
            f"container {name} of {_name(pod)} ended with exit code {ended.get('exitCode')}"
            + (f", {count} restarts" if looping else "")
            + (f": {words}" if words else "")
        ),
        "See the container's log; correct the role's args or template.",
    )


def _image(container: Mapping[str, Any], word: str, said: str) -> Diagnosis:
    missing = bool(NO_SUCH_IMAGE.search(f"{word} {said}"))
    return Diagnosis(
        FailureClass.CONFIG if missing else FailureClass.CAPACITY,
        Reason.IMAGE_PULL_FAILED,
        _cut(f"image {container.get('image') or container.get('name')} cannot be pulled: {said or word}"),
        "Correct the image's name or load it on the nodes."
        if missing
        else "Check runtime.imagePullSecrets and the registry; the kubelet goes on trying.",
    )


def _unscheduled(pod: Manifest) -> Diagnosis | None:
    condition = _condition(pod, "PodScheduled")
    if condition is None or condition.get("status") != "False":
        return None
    said = str(condition.get("message", ""))
    missing = missing_of(said)
    return Diagnosis(
        FailureClass.CAPACITY,
        Reason.UNSCHEDULABLE,
        _cut(f"pod {_name(pod)} finds no node: {missing or said or 'the scheduler gave no reason'}"),
        _scheduling_hint(said),
    )


def missing_of(message: str) -> str:
    """What the scheduler misses: its list of causes without the preamble, the counts of nodes kept.

    >>> missing_of("0/3 nodes are available: 2 Insufficient nvidia.com/gpu, 1 node(s) had untolerated taint(s). preemption: 0/3 …")
    '2 Insufficient nvidia.com/gpu, 1 node(s) had untolerated taint(s)'
    """
    body = re.sub(r"^\s*\d+/\d+ nodes are available:\s*", "", message)
    return re.split(r"\.?\s*(?:no new claims|preemption:|still not schedulable)", body)[0].strip(" .")


def _scheduling_hint(message: str) -> str:
    if "persistentvolumeclaim" in message.lower():
        return "Create the claim that storage.claimName names in the job's namespace."
    if "Insufficient" in message:
        return "Wait until other jobs end, or ask for less."
    if "taint" in message or "didn't match" in message:
        return "Set nodeSelector and tolerations of the role to a pool that has room."
    return "Wait, or change the role's placement."


def _volume(pod: Manifest, events: Sequence[Manifest]) -> Diagnosis | None:
    uid = pod.get("metadata", {}).get("uid")
    if pod.get("status", {}).get("phase") != "Pending":
        return None
    for event in reversed(events):
        if event.get("involvedObject", {}).get("uid") == uid and event.get("reason") in VOLUME_EVENTS:
            said = str(event.get("message", ""))
            gone = "not found" in said and ("secret" in said.lower() or "configmap" in said.lower())
            return Diagnosis(
                FailureClass.CONFIG if gone else FailureClass.CAPACITY,
                Reason.VOLUME_NOT_ATTACHED,
                _cut(f"a volume of pod {_name(pod)} cannot be mounted: {said}"),
                "A ReadWriteOnce claim is attached to one node at a time: use ReadWriteMany, or keep all roles on that node."
                if "Multi-Attach" in said
                else "Check the claim and storage.extraVolumes.",
            )
    return None


def _deleted(pod: Manifest) -> Diagnosis | None:
    if not pod.get("metadata", {}).get("deletionTimestamp"):
        return None
    return _infrastructure(pod, Reason.POD_DELETED, "it is being deleted")


def _infrastructure(pod: Manifest, reason: Reason, said: str) -> Diagnosis:
    return Diagnosis(
        FailureClass.INFRASTRUCTURE,
        reason,
        _cut(f"pod {_name(pod)}: {said}"),
        HINTS.get(reason, "See the pod's events."),
    )


def _container_statuses(pod: Manifest) -> list[Mapping[str, Any]]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


def _condition(pod: Manifest, kind: str) -> Mapping[str, Any] | None:
    for condition in pod.get("status", {}).get("conditions", []):
        if condition.get("type") == kind:
            found: Mapping[str, Any] = condition
            return found
    return None


def _name(pod: Manifest) -> str:
    return str(pod.get("metadata", {}).get("name", "?"))


def _cut(text: str) -> str:
    clean = " ".join(text.split())
    return clean if len(clean) <= MESSAGE_LIMIT else f"{clean[: MESSAGE_LIMIT - 1]}…"
