"""A real Kueue beside us: its own integrations do not break our jobs, and the protocol of docs/design/kueue.md is what it speaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opd_failures.on_cluster import Staged, document, merged, stand_in_config_map, told
from opd_jobs import END_DEADLINE, LONG_TRAINING, START_DEADLINE, Watcher, tiny_job

from opd_cluster import addons, cluster, full, kueue

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]
API = "kueue.x-k8s.io/v1beta2"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
OPDJOB = "OPDJob.v1alpha1.opd.dev"
GPU = "nvidia.com/gpu"
#: Ray gives up when a busy machine has not started it in 30 s.
RETRIES = {"backoffLimit": 5}
#: A tiny job's teacher takes one accelerator, its worker two.
WHOLE, TEACHER_ONLY = 3, 1


@pytest.fixture(scope="module")
def with_kueue(operator: Any) -> Iterator[Any]:
    """The cluster with Kueue, which has never heard of OPDJobs, and an operator that tries again after seconds."""
    if operator.layout is None:
        pytest.skip("nothing is installed into a cluster of yours")
    _install(operator)
    pace = ("retryBackoffSeconds=1", "capacityBackoffMinSeconds=5", "capacityBackoffMaxSeconds=10")
    addons.install_operator(operator.layout, *(f"operator.{item}" for item in pace))
    yield operator
    addons.install_operator(operator.layout)
    kueue.remove(operator.layout)


def _install(operator: Any, *external: str) -> None:
    shape = cluster.recorded_shape(operator.layout)
    assert shape is not None
    kueue.install(operator.layout, full.nodes(operator.layout, shape)[0], *external)


class Queue:
    """A LocalQueue of the namespace on a ClusterQueue of its own."""

    def __init__(self, cluster: Any, namespace: str, name: str, gpus: int) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name
        cluster.kubectl("label", "namespace", namespace, f"{kueue.NAMESPACE_LABEL}=true")
        cluster.apply(namespace, stand_in_config_map())
        queue = {"apiVersion": API, "kind": "LocalQueue", "metadata": {"name": name}}
        cluster.apply(namespace, _flavor(), self._of(gpus), {**queue, "spec": {"clusterQueue": namespace}})

    def _of(self, gpus: int) -> dict[str, Any]:
        quotas = {"cpu": "100", "memory": "500Gi", GPU: str(gpus)}
        flavor = {"name": "any", "resources": [{"name": k, "nominalQuota": v} for k, v in quotas.items()]}
        group = {"coveredResources": list(quotas), "flavors": [flavor]}
        spec = {"namespaceSelector": {}, "resourceGroups": [group]}
        return {"apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": self.namespace}, "spec": spec}

    def gives(self, gpus: int) -> None:
        self.cluster.apply(self.namespace, self._of(gpus))

    def workload(self, prefix: str) -> dict[str, Any]:
        """The Workload whose name begins so; {} while there is none."""
        found = self.cluster.get(self.namespace, "workloads")
        return next((item for item in found if item["metadata"]["name"].startswith(prefix)), {})

    def says(self, prefix: str, condition: str) -> bool:
        conditions = self.workload(prefix).get("status", {}).get("conditions", [])
        return any(entry["type"] == condition and entry["status"] == "True" for entry in conditions)

    def waits_until(self, prefix: str, condition: str, seconds: float = 60) -> None:
        self.cluster.wait(f"{prefix}* {condition}", lambda: self.says(prefix, condition), seconds, self.namespace)

    def free(self) -> bool:
        """Nothing of the quota is taken."""
        found = self.cluster.get("default", "clusterqueue", self.namespace)["status"]
        used = [item for flavor in found.get("flavorsUsage", []) for item in flavor["resources"]]
        return all(item["total"] in ("0", 0) for item in used if item["name"] == GPU)


def _flavor() -> dict[str, Any]:
    return {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": "any"}, "spec": {}}


@pytest.fixture
def queue_of(with_kueue: Any, namespace: str, tiny_files: Path) -> Iterator[Callable[..., Queue]]:
    def make(gpus: int, name: str = "default") -> Queue:
        return Queue(with_kueue, namespace, name, gpus)

    yield make
    with_kueue.kubectl("delete", "opdjobs", "--all", "-n", namespace, "--wait=false")
    with_kueue.kubectl("delete", "clusterqueue", namespace, "--ignore-not-found", "--wait=false")


def start(queue: Queue, manifest: dict[str, Any]) -> Watcher:
    queue.cluster.apply(queue.namespace, manifest)
    return Watcher(queue.cluster, queue.namespace, manifest["metadata"]["name"])


def test_a_namespace_with_a_default_queue_runs_a_whole_job(queue_of: Callable[..., Queue]) -> None:
    queue = queue_of(WHOLE)
    watcher = start(queue, tiny_job())
    watcher.wait_phase("Training", seconds=2 * START_DEADLINE)
    for prefix in ("job-tiny-check-inputs", "pod-tiny-teacher-main", "rayjob-tiny-1"):
        assert queue.says(prefix, "Admitted"), f"Kueue did not admit {prefix}: it was not asked"
    status = watcher.wait_phase("Succeeded", seconds=END_DEADLINE)
    assert status["attempt"] == 1
    watcher.wait_free()
    queue.cluster.wait("the quota to be free", queue.free, 120, queue.namespace)


def test_a_student_that_the_queue_does_not_admit_waits_and_gives_its_teachers_back(
    queue_of: Callable[..., Queue],
) -> None:
    queue = queue_of(TEACHER_ONLY)
    changes = {"preflight": {"enabled": False}, "lifecycle": {"teacherIdleTimeoutSeconds": 20, "preRunningDeadlineSeconds": 10, **RETRIES}}  # fmt: skip
    watcher = start(queue, document("queued", Staged(changes)))
    said: set[str] = set()

    def released() -> bool:
        said.add(watcher.condition("Progressing").get("reason", ""))
        return bool((watcher.status().get("attempts") or [{}])[0].get("endTime"))

    queue.cluster.wait("the teachers to be given back", released, START_DEADLINE, queue.namespace)
    assert "NotAdmitted" in said
    first = watcher.status()["attempts"][0]
    assert first["reason"] == "CapacityReleased"
    assert "a queue has not admitted it" in first["message"]
    assert watcher.status().get("retries", 0) == 0, "waiting for the queue was counted as a failure"
    # Short so far, to show that time in the queue is no time of the start.
    watcher.patch({"lifecycle": {"preRunningDeadlineSeconds": 600}})
    queue.gives(WHOLE)
    watcher.wait_phase("Succeeded", seconds=2 * START_DEADLINE)
    watcher.wait_free()


def test_an_eviction_by_the_queue_costs_no_retry(queue_of: Callable[..., Queue]) -> None:
    queue = queue_of(WHOLE)
    training = {**LONG_TRAINING, "steps": 40}
    watcher = start(queue, tiny_job("evicted", training=training, rollout={"maxResponseTokens": 48}))
    watcher.wait_step(4, seconds=2 * START_DEADLINE)
    name = queue.workload("rayjob-evicted-1")["metadata"]["name"]
    queue.cluster.kubectl("patch", "workload", name, "-n", queue.namespace, "--type=merge", "-p", '{"spec":{"active":false}}')  # fmt: skip
    queue.cluster.wait("attempt 2", lambda: watcher.status().get("attempt") == 2, START_DEADLINE, queue.namespace)
    assert watcher.status()["attempts"][0]["reason"] == "Preempted"
    status = watcher.wait_phase("Succeeded", seconds=START_DEADLINE + END_DEADLINE)
    assert status.get("retries", 0) == 0, "an eviction by the queue was counted as a failure"
    assert [row["step"] for row in watcher.metrics()] == list(range(1, 41))
    consumed = watcher.consumed()
    assert len(consumed) == len(set(consumed))
    watcher.wait_free()


# --- the protocol of a native integration, its controller played by the test ---


def _pod_set(name: str, count: int, gpus: int) -> dict[str, Any]:
    requests = {"cpu": "20m", "memory": "64Mi", **({GPU: gpus} if gpus else {})}
    container = {"name": name, "image": "x", "resources": {"requests": requests}}
    container["resources"]["limits"] = {GPU: gpus} if gpus else {}
    return {"name": name, "count": count, "template": {"spec": {"containers": [container], "restartPolicy": "Never"}}}


def _workload(watcher: Watcher, queue: Queue) -> dict[str, Any]:
    """One Workload for teachers and Ray: what a controller for OPDJobs would write."""
    owner = watcher.object()
    reference = {key: owner[key] for key in ("apiVersion", "kind")} | {
        "name": watcher.name,
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }
    spec = {
        "queueName": queue.name,
        "podSets": [_pod_set("teacher-main", 1, 1), _pod_set("head", 1, 0), _pod_set("workers", 1, 2)],
    }
    metadata = {"name": f"opdjob-{watcher.name}", "ownerReferences": [reference]}
    return {"apiVersion": API, "kind": "Workload", "metadata": metadata, "spec": spec}


def _finished(queue: Queue, name: str) -> None:
    found = queue.workload(name)
    condition = {"type": "Finished", "status": "True", "reason": "Succeeded", "message": "the job has ended"}
    condition["lastTransitionTime"] = found["metadata"]["creationTimestamp"]
    conditions = [*found["status"]["conditions"], condition]
    _patch_status(queue, name, {"conditions": conditions})


def _patch_status(queue: Queue, name: str, status: dict[str, Any]) -> None:
    body = json.dumps({"status": status})
    queue.cluster.kubectl("patch", "workload", name, "-n", queue.namespace, "--subresource=status", "--type=merge", "-p", body)  # fmt: skip


def test_one_workload_admits_teachers_and_ray_together_and_suspends_them_together(
    with_kueue: Any, queue_of: Callable[..., Queue]
) -> None:
    _install(with_kueue, OPDJOB)
    # No queue called `default`: nothing but the OPDJob itself is queued.
    queue = queue_of(TEACHER_ONLY, "team")
    manifest = document("native", Staged(merged(told(run={"holds": True}), {"suspend": True, "preflight": {"enabled": False}, "lifecycle": RETRIES})))  # fmt: skip
    manifest["metadata"]["labels"] = {QUEUE_LABEL: "team"}
    watcher = start(queue, manifest)
    watcher.wait_phase("Suspended", seconds=60)
    queue.cluster.apply(queue.namespace, _workload(watcher, queue))
    waiting = "opdjob-native"

    def refused() -> bool:
        conditions = queue.workload(waiting).get("status", {}).get("conditions", [])
        return any(entry["type"] == "QuotaReserved" and "insufficient" in entry["message"] for entry in conditions)

    queue.cluster.wait("Kueue to say that three do not fit into one", refused, 60, queue.namespace)
    assert not watcher.pods(), "a pod exists though the job was not admitted"

    queue.gives(WHOLE)
    queue.waits_until(waiting, "Admitted")
    watcher.patch({"suspend": False})
    watcher.wait_phase("Training", seconds=START_DEADLINE)
    names = [item["metadata"]["name"] for item in queue.cluster.get(queue.namespace, "workloads")]
    assert names == [waiting], "Kueue queued a child of a job that it had admitted"

    queue.cluster.kubectl("patch", "workload", waiting, "-n", queue.namespace, "--type=merge", "-p", '{"spec":{"active":false}}')  # fmt: skip
    queue.waits_until(waiting, "Evicted")
    watcher.patch({"suspend": True})
    watcher.wait_phase("Suspended", seconds=START_DEADLINE)
    watcher.wait_free()
    assert not queue.cluster.get(queue.namespace, "deployments"), "a teacher outlived the eviction"
    queue.cluster.wait("the quota to be free", queue.free, 60, queue.namespace)
