"""The RayJob of one attempt: a head that controls and workers that learn and generate.

KubeRay's own retries are off: an attempt is a RayJob, so that a failure keeps its message and its class. Nothing restarts a
lost head, because user code would run a second time on an empty cluster.
"""

from __future__ import annotations

import yaml

from opd_api.paths import CONFIG_FILE
from opd_api.v1alpha1 import CleanupOnFailure, Device
from opd_api.vocabulary import Annotation, Port, Role
from opd_operator.children import names
from opd_operator.children.context import JobContext, with_spec_hash
from opd_operator.children.pods import PodParts, pod_template
from opd_operator.children.teacher import client_variables
from opd_operator.model import Manifest

#: Between "saved" and the end of the process: last heartbeat, final document, Ray's own shutdown.
GRACE_EXTRA_SECONDS = 30
#: KubeRay's cleanup is the second line; the operator deletes the RayJob itself when it is not to be kept.
TTL_SECONDS = 60
#: Object store of CPU jobs; Ray would otherwise take a third of the node's memory.
CPU_OBJECT_STORE_BYTES = 1 << 30
KEEP_HEAD_LOST = "ray.io/disable-provisioned-head-restart"


def ray_job(job: JobContext, attempt: int, config_map: str, config_hash: str) -> Manifest:
    """RayJob of an attempt."""
    lifecycle = job.spec.lifecycle
    keep = lifecycle.cleanup.on_failure is CleanupOnFailure.KEEP_RAY
    metadata = job.metadata(names.ray_job(job.name, attempt), Role.HEAD, attempt=attempt)
    metadata["annotations"] = {KEEP_HEAD_LOST: "true", Annotation.CONFIG_HASH.value: config_hash}
    return with_spec_hash(
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": metadata,
            "spec": {
                "entrypoint": f"opd-trainer run --config {CONFIG_FILE}",
                "submissionMode": "HTTPMode",
                "backoffLimit": 0,
                "shutdownAfterJobFinishes": True,
                "ttlSecondsAfterFinished": lifecycle.cleanup.keep_seconds if keep else TTL_SECONDS,
                "runtimeEnvYAML": _runtime_env(job),
                "rayClusterSpec": {
                    "rayVersion": job.spec.ray.ray_version or job.settings.ray_version,
                    "headGroupSpec": _head(job, attempt, config_map),
                    "workerGroupSpecs": [_workers(job, attempt, config_map)],
                },
            },
        }
    )


def grace_seconds(job: JobContext) -> int:
    """Time that a student's pod has between the request to end and its death."""
    return job.spec.lifecycle.preemption_grace_seconds + GRACE_EXTRA_SECONDS


def _runtime_env(job: JobContext) -> str:
    """The user's runtime environment; Ray waits as long as the pods do before it kills the entrypoint."""
    chosen = dict(job.spec.ray.runtime_env or {})
    chosen["env_vars"] = {"RAY_JOB_STOP_WAIT_TIME_S": str(grace_seconds(job)), **chosen.get("env_vars", {})}
    return yaml.safe_dump(chosen, sort_keys=True)


def _head(job: JobContext, attempt: int, config_map: str) -> Manifest:
    # No units at all: learners and engines belong on workers, and the head must live as long as the attempt.
    params = {"num-gpus": "0", "num-cpus": "0", "dashboard-host": "0.0.0.0"}  # noqa: S104 - KubeRay asks from outside
    if job.spec.runtime.device is Device.CPU:
        params["object-store-memory"] = str(CPU_OBJECT_STORE_BYTES)
    template = pod_template(
        job,
        PodParts(
            role=Role.HEAD,
            attempt=attempt,
            placement=job.spec.ray.head,
            env=client_variables(job),
            config_map=config_map,
            container={
                "name": "ray-head",
                "image": job.image,
                "lifecycle": _pre_stop(),
                "ports": [
                    {"name": "gcs", "containerPort": Port.RAY_GCS},
                    {"name": "dashboard", "containerPort": Port.RAY_DASHBOARD},
                    {"name": "client", "containerPort": Port.RAY_CLIENT},
                    {"name": "metrics", "containerPort": Port.METRICS},
                ],
            },
            pod={
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": grace_seconds(job),
                "serviceAccountName": names.head_account(job.name),
                "automountServiceAccountToken": True,
            },
            template=job.spec.ray.head.template,
        ),
    )
    return {"rayStartParams": params, "template": _once(template)}


def _once(template: Manifest) -> Manifest:
    """The template with restartPolicy Never, whatever a user's template says since the rules saw it (rule 30): Ray would run the
    user's code a second time on an empty cluster, within one attempt."""
    spec = template.get("spec")
    return {**template, "spec": {**spec, "restartPolicy": "Never"}} if isinstance(spec, dict) else template


def _workers(job: JobContext, attempt: int, config_map: str) -> Manifest:
    spec = job.spec
    units = spec.gpus_per_worker
    resource = spec.runtime.effective_accelerator_resource
    params: dict[str, str] = {}
    if resource:
        # Said outright because KubeRay derives it from resources whose name ends in "gpu" only.
        params["num-gpus"] = str(units)
    if spec.runtime.device is Device.CPU:
        params["object-store-memory"] = str(CPU_OBJECT_STORE_BYTES)
        # Small CPU requests would count as one CPU. Without accelerator units an actor is counted as one CPU.
        params["num-cpus"] = str(2 * units if resource else units)
    template = pod_template(
        job,
        PodParts(
            role=Role.WORKER,
            attempt=attempt,
            placement=spec.ray.workers,
            accelerators=units,
            config_map=config_map,
            container={"name": "ray-worker", "image": job.image, "lifecycle": _pre_stop()},
            pod={"restartPolicy": "Never", "terminationGracePeriodSeconds": grace_seconds(job)},
            template=spec.ray.workers.template,
        ),
    )
    count = spec.worker_count
    return {
        "groupName": "workers",
        "replicas": count,
        "minReplicas": count,
        "maxReplicas": count,
        "rayStartParams": params,
        "template": _once(template),
    }


def _pre_stop() -> Manifest:
    """Ask the controller to save, and wait for it: kubelet signals Ray only, and Ray kills the driver seconds later."""
    return {"preStop": {"exec": {"command": ["opd-trainer", "drain", "--wait"]}}}
