"""The failures of the table that are brought about on a real cluster: its scheduler, kubelets, runtime, admission, quota and
controllers, KubeRay and Ray are real, and so are the operator in its pod, its rights and the trainer's.

Where the fault is not the trainer's own, stand_in_trainer.py takes the trainer's place in the pods, so that a failure takes
seconds and no model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opd_jobs import merged, tiny_job
from operator_jobs import Job, eventually

Manifest = dict[str, Any]
#: The test that brings all of them about; its parameter is the group.
ON_CLUSTER_TEST = "tests/e2e/jobs/test_failures.py::test_failures_are_told_answered_and_cleaned_up"
STAND_IN = Path(__file__).resolve().parents[1] / "stand_in_trainer.py"
#: The path of the trainer image with the stand-in before everything else.
PATH = "/stand-in:/opt/venv/bin:/usr/local/bin:/usr/bin:/bin"
#: Seconds until a step that waits in vain ends.
PATIENCE = 40
GPU = "nvidia.com/gpu"
#: An accelerator of which the node has one, so that taking it disturbs no other job.
RARE = "example.com/rare"


class Place:
    """A namespace of the cluster and the verbs of whoever disturbs a job in it."""

    def __init__(self, cluster: Any, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    async def kubectl(self, *words: str, input_text: str | None = None, check: bool = True) -> str:
        """kubectl in the namespace; its stdout."""
        call = (self.cluster.kubectl, "-n", self.namespace, *words)
        found: str = await asyncio.to_thread(*call, input_text=input_text, check=check)
        return found

    async def apply(self, *manifests: Manifest) -> None:
        await asyncio.to_thread(self.cluster.apply, self.namespace, *manifests)

    async def pod(self, job: Job, role: str) -> str:
        """The name of a pod of this role, once it is there."""

        async def first() -> str:
            pods = [pod for pod in await job.children("v1", "Pod") if pod["metadata"]["labels"]["opd.dev/role"] == role]
            return pods[0]["metadata"]["name"] if pods else ""

        return str(await eventually(f"a {role} pod of {job.name}", first))

    async def run_in(self, job: Job, role: str, program: str) -> None:
        """Run a shell program in a pod; that the pod does not survive it is none of its business."""
        await self.kubectl("exec", await self.pod(job, role), "--", "sh", "-c", program, check=False)


Act = Callable[[Job, Place], Awaitable[None]]


@dataclass(frozen=True)
class Staged:
    """How a failure is brought about."""

    #: Sections of the OPDJob over the small one.
    job: Manifest = field(default_factory=dict)
    #: What is there before the job, from (namespace, job).
    before: Callable[[str, str], list[Manifest]] = lambda namespace, job: []
    #: Whether what is there before acts already; asked until it does.
    prepared: Callable[[Place], Awaitable[bool]] | None = None
    #: Done once the job stands at the failure's step.
    act: Act | None = None
    #: What is there before disturbs every other job of its namespace.
    alone: bool = False
    #: The job's pods run the real trainer.
    real: bool = False


def document(name: str, staged: Staged) -> Manifest:
    """The OPDJob of a failure: no retries, short grace."""
    plain = {"lifecycle": {"backoffLimit": 0, "preemptionGraceSeconds": 3}, "runtime": {"resources": SMALL}}
    sections = merged(plain if staged.real else merged(plain, STOOD_IN), staged.job)
    return tiny_job(name, **sections)


SMALL = {"requests": {"cpu": "20m", "memory": "64Mi"}}
STOOD_IN: Manifest = {
    "runtime": {"env": [{"name": "PATH", "value": PATH}], "resources": SMALL},
    "storage": {
        "extraVolumes": [
            {"name": "stand-in", "mountPath": "/stand-in", "source": {"configMap": {"name": "stand-in", "defaultMode": 0o555}}}
        ]
    },
}  # fmt: skip


def stand_in_config_map() -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "stand-in"},
        "data": {"opd-trainer": STAND_IN.read_text()},
    }


def told(**commands: Manifest) -> Manifest:
    """Section `runtime` that tells the stand-ins what to do: told(check={"exit": 1})."""
    variables = [{"name": "PATH", "value": PATH}, {"name": "STAND_IN", "value": json.dumps(commands)}]
    return {"runtime": {"env": variables}}


def template(container: str, pod: Manifest | None = None, **fields: Any) -> Manifest:
    """A pod template that changes one container and perhaps the pod."""
    return {"template": {"spec": {**(pod or {}), "containers": [{"name": container, **fields}]}}}


def limited(memory: str, asked: str = "32Mi") -> Manifest:
    return {"resources": {"requests": {"cpu": "20m", "memory": asked}, "limits": {"memory": memory}}}


def units(count: int, resource: str = GPU) -> Manifest:
    return {"resources": {"requests": {resource: count}, "limits": {resource: count}}}


def quota(**hard: str) -> Callable[[str, str], list[Manifest]]:
    """A ResourceQuota; `gpus` stands for the accelerators, `jobs` for Jobs."""
    names = {"gpus": f"requests.{GPU}", "jobs": "count/jobs.batch"}
    spec = {"hard": {names[name]: amount for name, amount in hard.items()}}
    return lambda namespace, job: [
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}, "spec": spec}
    ]


def no_jobs_allowed(namespace: str, job: str) -> list[Manifest]:
    """Admission that refuses Jobs in this namespace."""
    name = f"no-jobs-{namespace}"
    here = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    rules = [{"apiGroups": ["batch"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["jobs"]}]
    policy = {"failurePolicy": "Fail", "matchConstraints": {"resourceRules": rules}}
    policy["validations"] = [{"expression": "false", "message": "no Jobs in this namespace", "reason": "Forbidden"}]
    binding = {"policyName": name, "validationActions": ["Deny"], "matchResources": {"namespaceSelector": here}}
    api = "admissionregistration.k8s.io/v1"
    return [
        {"apiVersion": api, "kind": "ValidatingAdmissionPolicy", "metadata": {"name": name}, "spec": policy},
        {"apiVersion": api, "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": name}, "spec": binding},
    ]


async def refuses_jobs(place: Place) -> bool:
    """The API server has compiled the policy."""
    words = ("create", "job", "trial", "--image=x", "--dry-run=server", "-o", "name")
    return not await place.kubectl(*words, check=False)


def somebody_elses_job(namespace: str, job: str) -> list[Manifest]:
    container = {"name": "x", "image": "opd-trainer:0.1.0"}
    pod = {"restartPolicy": "Never", "containers": [container]}
    metadata = {"name": f"{job}-check-inputs"}
    return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"suspend": True, "template": {"spec": pod}}}]  # fmt: skip


def claim_on_nothing(namespace: str, job: str) -> list[Manifest]:
    """A claim bound to a directory that no node has."""
    size = {"storage": "1Gi"}
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": "opd-local"}
    name = f"nothing-{namespace}"
    volume = {**common, "capacity": size, "hostPath": {"path": "/there/is/nothing", "type": "Directory"}}
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "nothing"},
            "spec": {**common, "volumeName": name, "resources": {"requests": size}},
        },
    ]


#: Objects outside of namespaces that the functions above make, for the test to remove.
CLUSTER_WIDE = (
    "validatingadmissionpolicybinding/no-jobs-{}",
    "validatingadmissionpolicy/no-jobs-{}",
    "persistentvolume/nothing-{}",
)
