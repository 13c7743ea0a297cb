"""The pod that all roles share: storage, security, environment, placement. Roles add their container and their template."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from opd_api.paths import CONFIG_FILE, HUB_FOLDER
from opd_api.v1alpha1 import Device, Placement, Resources
from opd_api.vocabulary import Role
from opd_operator.children import names
from opd_operator.children.context import JobContext
from opd_operator.children.merge import merge_named, merge_template
from opd_operator.model import Manifest

HOME = "/home/opd"
CONFIG_FOLDER = CONFIG_FILE.rpartition("/")[0]
#: The user of every pod, unless runtime.securityContext says otherwise.
USER = 1000
POD_SECURITY: Manifest = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Manifest = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
#: Small enough that a laptop's single node takes a whole job.
CPU_REQUESTS = {"cpu": "250m", "memory": "1Gi"}


@dataclass(frozen=True)
class PodParts:
    """What a role adds to the shared pod."""

    role: Role
    container: Manifest
    placement: Placement
    accelerators: int = 0
    attempt: int | None = None
    teacher: str | None = None
    env: list[Manifest] = field(default_factory=list)
    #: Name of the ConfigMap that is mounted at /etc/opd, for pods that run opd-trainer.
    config_map: str | None = None
    online: bool = False
    volumes: list[Manifest] = field(default_factory=list)
    mounts: list[Manifest] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)
    #: Fields of the pod spec that only this role sets.
    pod: Manifest = field(default_factory=dict)
    template: Manifest | None = None


def pod_template(job: JobContext, parts: PodParts) -> Manifest:
    """PodTemplateSpec of a role, with the user's template merged last."""
    container = {
        "imagePullPolicy": job.pull_policy,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONTAINER_SECURITY,
        **parts.container,
        "env": _environment(job, parts),
        "volumeMounts": [*_mounts(job, parts), *parts.mounts],
        "resources": _resources(job, parts),
    }
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": job.spec.runtime.security_context or POD_SECURITY,
        **_placement(job, parts),
        **_identity(job),
        **parts.pod,
        "containers": [container],
        "volumes": [*_volumes(job, parts), *parts.volumes],
    }
    labels = names.labels(job.name, parts.role, attempt=parts.attempt, teacher=parts.teacher)
    metadata: Manifest = {"labels": labels}
    if parts.annotations:
        metadata["annotations"] = parts.annotations
    merged = merge_template({"metadata": metadata, "spec": spec}, parts.template)
    # Without our labels the operator would not see the pod, and would take its node for lost.
    chosen = merged["metadata"] if isinstance(merged["metadata"], dict) else metadata
    return {**merged, "metadata": {**chosen, "labels": {**(chosen.get("labels") or {}), **labels}}}


def secret_variable(variable: str, secret: str, key: str) -> Manifest:
    """An environment variable from a Secret."""
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _environment(job: JobContext, parts: PodParts) -> list[Manifest]:
    """Shared variables, then the role's, then the user's, which win."""
    runtime = job.spec.runtime
    shared = {
        "HOME": HOME,
        # Images made for root have no passwd entry for our user, and Python's getpass then fails.
        "USER": "opd",
        "LOGNAME": "opd",
        "XDG_CACHE_HOME": f"{HOME}/.cache",
        "TRITON_CACHE_DIR": f"{HOME}/.cache/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{HOME}/.cache/torchinductor",
        "HF_HOME": f"{job.spec.storage.mount_path.rstrip('/')}/{HUB_FOLDER}",
        "PYTHONUNBUFFERED": "1",
    }
    if job.spec.preflight.enabled and not parts.online:
        # The check has downloaded what is needed; without a check every pod must be able to.
        shared["HF_HUB_OFFLINE"] = "1"
    if runtime.device is Device.CPU:
        # One thread a process: CPU jobs share few cores among many pods.
        shared["OMP_NUM_THREADS"] = "1"
    variables = merge_named([{"name": name, "value": value} for name, value in shared.items()], parts.env, "env")
    return merge_named(variables, [item.to_yaml_dict() for item in runtime.env], "env")


def _volumes(job: JobContext, parts: PodParts) -> list[Manifest]:
    storage = job.spec.storage
    found: list[Manifest] = [
        {"name": "home", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "dshm", "emptyDir": {"medium": "Memory"}},
    ]
    if storage.claim_name:
        found.append({"name": "data", "persistentVolumeClaim": {"claimName": storage.claim_name}})
    if parts.config_map:
        found.append({"name": "config", "configMap": {"name": parts.config_map}})
    found.extend({"name": extra.name, **extra.source} for extra in storage.extra_volumes)
    return found


def _mounts(job: JobContext, parts: PodParts) -> list[Manifest]:
    storage = job.spec.storage
    found: list[Manifest] = [
        {"name": "home", "mountPath": HOME},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - an emptyDir of the pod's own
        {"name": "dshm", "mountPath": "/dev/shm"},  # noqa: S108
    ]
    if storage.claim_name:
        found.append({"name": "data", "mountPath": storage.mount_path})
    if parts.config_map:
        found.append({"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True})
    found.extend(
        {"name": extra.name, "mountPath": extra.mount_path, "readOnly": extra.read_only}
        for extra in storage.extra_volumes
    )
    return found


def _resources(job: JobContext, parts: PodParts) -> Manifest:
    """The role's resources, else the runtime's, else small CPU requests; accelerators are added to both sides."""
    chosen = parts.placement.resources or job.spec.runtime.resources
    if chosen is None:
        small = job.spec.runtime.device is Device.CPU or not parts.accelerators
        chosen = Resources(requests=CPU_REQUESTS if small else {}, limits={})
    requests: dict[str, Any] = dict(chosen.requests)
    limits: dict[str, Any] = dict(chosen.limits)
    resource = job.spec.runtime.effective_accelerator_resource
    if resource and parts.accelerators:
        requests[resource] = limits[resource] = parts.accelerators
    return {name: values for name, values in (("requests", requests), ("limits", limits)) if values}


def _placement(job: JobContext, parts: PodParts) -> Manifest:
    """Placement fields; a role's own value replaces runtime's."""
    role, runtime = parts.placement, job.spec.runtime
    own = role.tolerations if role.tolerations is not None else runtime.tolerations
    tolerations = [item.to_yaml_dict() for item in own or []]
    resource = runtime.effective_accelerator_resource
    if resource and parts.accelerators:
        default = {"key": resource, "operator": "Exists", "effect": "NoSchedule"}
        if default not in tolerations:
            tolerations.append(default)
    selector = role.node_selector if role.node_selector is not None else runtime.node_selector
    affinity = role.affinity if role.affinity is not None else runtime.affinity
    spread = role.topology_spread if role.topology_spread is not None else runtime.topology_spread
    found = {
        "nodeSelector": selector,
        "tolerations": tolerations,
        "affinity": affinity,
        "topologySpreadConstraints": spread,
        "priorityClassName": runtime.priority_class_name,
    }
    return {name: value for name, value in found.items() if value}


def _identity(job: JobContext) -> Manifest:
    """Service account and pull secrets."""
    runtime = job.spec.runtime
    found: Manifest = {}
    if runtime.service_account_name:
        found["serviceAccountName"] = runtime.service_account_name
    if runtime.image_pull_secrets:
        found["imagePullSecrets"] = [{"name": item.name} for item in runtime.image_pull_secrets]
    return found
