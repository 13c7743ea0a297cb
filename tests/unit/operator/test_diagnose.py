"""What is wrong with a pod, from documents as kubelet, scheduler and controllers write them."""

from __future__ import annotations

from typing import Any

import pytest

from opd_api.vocabulary import FailureClass, Reason
from opd_operator.diagnose import (
    creation_message,
    diagnose_creation,
    diagnose_pod,
    diagnose_pods,
    last_words,
    missing_of,
)
from opd_operator.model import Manifest


def pod(phase: str = "Pending", *, deleting: bool = False, node: bool = True, **status: Any) -> Manifest:
    metadata: Manifest = {"name": "p", "uid": "u"}
    if deleting:
        metadata["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    return {"metadata": metadata, "spec": {"nodeName": "n"} if node else {}, "status": {"phase": phase, **status}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"containerStatuses": [{"name": "main", "image": "img:1", "state": state}]}


def ended(code: int, reason: str = "Error", message: str = "", restarts: int = 0) -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    return {"containerStatuses": [{"name": "main", "restartCount": restarts, "state": state}]}


def disrupted(reason: str) -> dict[str, Any]:
    return {
        "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": f"because {reason}"}]
    }


def unscheduled(message: str) -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]}


GPUS = "0/4 nodes are available: 3 Insufficient nvidia.com/gpu, 1 node(s) had untolerated taint {gpu: true}. preemption: 0/4 nodes are available: 4 Preemption is not helpful for scheduling."
CASES = [
    (
        pod("Failed", reason="Evicted", message="The node was low on resource: memory."),
        "Infrastructure",
        "Evicted",
        "low on",
    ),
    (pod("Failed", reason="NodeLost"), "Infrastructure", "NodeLost", "p"),
    (pod("Failed", reason="NodeShutdown"), "Infrastructure", "NodeLost", "p"),
    (
        pod("Failed", reason="Preempting", message="Preempted in order to admit critical pod"),
        "Infrastructure",
        "PreemptedByScheduler",
        "critical",
    ),
    (
        pod("Failed", reason="UnexpectedAdmissionError", message="Allocate failed"),
        "Infrastructure",
        "UnexpectedAdmission",
        "Allocate failed",
    ),
    (pod("Failed", reason="OutOfmemory"), "Infrastructure", "UnexpectedAdmission", "OutOfmemory"),
    (
        pod("Running", deleting=True, **disrupted("PreemptionByScheduler")),
        "Infrastructure",
        "PreemptedByScheduler",
        "because",
    ),
    (pod("Running", deleting=True, **disrupted("EvictionByEvictionAPI")), "Infrastructure", "Evicted", "because"),
    (pod("Running", deleting=True, **disrupted("DeletionByTaintManager")), "Infrastructure", "NodeLost", "because"),
    (pod("Running", deleting=True), "Infrastructure", "PodDeleted", "deleted"),
    (pod("Failed", **ended(137, "OOMKilled")), "Infrastructure", "OOMKilled", "memory"),
    (pod("Running", **ended(137, "OOMKilled", restarts=2)), "Infrastructure", "OOMKilled", "memory"),
    (pod("Failed", **ended(1, message="a\nValueError: bad model")), "Internal", "PodFailed", "ValueError: bad model"),
    (pod("Running", **ended(1, message="boom", restarts=3)), "Internal", "CrashLoop", "3 restarts: boom"),
    (
        pod("Failed", **ended(1, message="PermissionError: [Errno 13] Permission denied: '/data/opd'")),
        "Config",
        "StorageNotWritable",
        "/data/opd",
    ),
    (pod("Failed"), "Infrastructure", "PodFailed", "no reason"),
    (pod(**waiting("ErrImagePull", "manifest unknown")), "Config", "ImagePullFailed", "img:1"),
    (pod(**waiting("InvalidImageName")), "Config", "ImagePullFailed", "img:1"),
    (
        pod(**waiting("ErrImageNeverPull", "Container image is not present with pull policy of Never")),
        "Config",
        "ImagePullFailed",
        "img:1",
    ),
    (pod(**waiting("ImagePullBackOff", "429 Too Many Requests")), "Capacity", "ImagePullFailed", "429"),
    (
        pod(**waiting("CreateContainerConfigError", 'secret "s" not found')),
        "Config",
        "ContainerConfigError",
        'secret "s"',
    ),
    (
        pod(**waiting("CreateContainerConfigError", "container has runAsNonRoot and image will run as root")),
        "Config",
        "ContainerConfigError",
        "runAsNonRoot",
    ),
    (pod(**waiting("RunContainerError", "exec: no such file")), "Config", "ContainerConfigError", "no such file"),
    (
        pod(node=False, **unscheduled(GPUS)),
        "Capacity",
        "Unschedulable",
        "3 Insufficient nvidia.com/gpu, 1 node(s) had untolerated taint",
    ),
    (
        pod(node=False, **unscheduled('persistentvolumeclaim "opd" not found')),
        "Capacity",
        "Unschedulable",
        '"opd" not found',
    ),
]


@pytest.mark.parametrize(("item", "failure", "reason", "words"), CASES)
def test_a_pod_is_diagnosed_with_class_reason_words_and_hint(
    item: Manifest, failure: str, reason: str, words: str
) -> None:
    found = diagnose_pod(item)
    assert found is not None
    assert (found.failure_class, found.reason) == (FailureClass(failure), Reason(reason))
    assert words in found.message
    assert found.hint.endswith(".")
    assert len(str(found)) <= 1024


@pytest.mark.parametrize(
    "item",
    [
        pod("Running", conditions=[{"type": "PodScheduled", "status": "True"}]),
        pod(**waiting("ContainerCreating")),
        pod(**waiting("PodInitializing")),
        pod("Succeeded", **ended(0)),
        pod(conditions=[]),
    ],
)
def test_a_healthy_or_starting_pod_has_no_diagnosis(item: Manifest) -> None:
    assert diagnose_pod(item) is None


@pytest.mark.parametrize(
    ("reason", "message", "failure"),
    [
        ("FailedMount", "MountVolume.SetUp failed: connection timed out", "Capacity"),
        ("FailedAttachVolume", 'Multi-Attach error for volume "pvc-1"', "Capacity"),
        ("FailedMount", 'MountVolume.SetUp failed: configmap "nope" not found', "Config"),
    ],
)
def test_a_volume_that_cannot_be_mounted_is_known_from_events(reason: str, message: str, failure: str) -> None:
    event = {"involvedObject": {"uid": "u"}, "reason": reason, "message": message}
    other = {"involvedObject": {"uid": "other"}, "reason": "FailedMount", "message": "not ours"}
    found = diagnose_pod(pod(**waiting("ContainerCreating")), [event, other])
    assert found is not None
    assert (found.failure_class, found.reason) == (FailureClass(failure), Reason.VOLUME_NOT_ATTACHED)
    assert message in found.message
    assert diagnose_pod(pod(**waiting("ContainerCreating")), [other]) is None


def test_of_several_pods_the_most_telling_one_speaks() -> None:
    items = [pod(node=False, **unscheduled(GPUS)), pod(**waiting("CreateContainerConfigError", "x")), pod("Running")]
    found = diagnose_pods(items)
    assert found is not None
    assert found.reason is Reason.CONTAINER_CONFIG_ERROR
    assert diagnose_pods([pod("Running")]) is None


def test_a_quota_is_capacity_and_names_what_is_used_up() -> None:
    found = diagnose_creation(
        'pods "p" is forbidden: exceeded quota: gpu, requested: requests.nvidia.com/gpu=4, used: 8, limited: 8'
    )
    assert found is not None
    assert (found.failure_class, found.reason) == (FailureClass.CAPACITY, Reason.QUOTA_EXCEEDED)
    assert "requests.nvidia.com/gpu=4" in found.message


def test_a_pod_that_admission_refuses_is_a_fault_of_the_spec() -> None:
    found = diagnose_creation('pods "p" is forbidden: violates PodSecurity "restricted:latest": hostPath volumes')
    assert found is not None
    assert found.failure_class is FailureClass.CONFIG
    assert "hostPath" in found.message


def test_the_newest_creation_event_of_the_object_counts() -> None:
    events = [
        {"involvedObject": {"uid": "a"}, "reason": "FailedCreate", "message": "new", "lastTimestamp": "2026-01-02"},
        {"involvedObject": {"uid": "a"}, "reason": "FailedCreate", "message": "old", "lastTimestamp": "2026-01-01"},
        {"involvedObject": {"uid": "b"}, "reason": "FailedCreate", "message": "other", "lastTimestamp": "2026-01-03"},
        {"involvedObject": {"uid": "a"}, "reason": "Killing", "message": "no", "lastTimestamp": "2026-01-04"},
    ]
    assert creation_message(events, "a") == "new"
    assert creation_message(events, "c") == ""


def test_the_schedulers_preamble_is_cut() -> None:
    assert missing_of(GPUS) == "3 Insufficient nvidia.com/gpu, 1 node(s) had untolerated taint {gpu: true}"
    assert missing_of("no nodes available to schedule pods") == "no nodes available to schedule pods"


def test_last_words_are_the_end_on_one_line() -> None:
    assert last_words("1\n2\n\n3\n4\n5\n6\n") == "2 | 3 | 4 | 5 | 6"
    assert len(last_words("x" * 5000)) == 400
