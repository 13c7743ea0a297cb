"""Rules 29 and 30: what goes into pods as Kubernetes takes it, and as the operator counts on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from opd_api import kubernetes
from opd_api.kubernetes import Problems
from opd_api.rules.finding import Hits, Level, rule
from opd_api.v1alpha1 import OPDJob, Placement, TemplatedPlacement

#: One wrong list can have many wrong elements; a status has room for few findings.
MOST = 8
_NEVER = "KubeRay and the operator make a new attempt where a lost pod would otherwise run user code twice"
_ALWAYS = "a Deployment knows no other"


def _roles(job: OPDJob) -> Iterator[tuple[str, Placement]]:
    spec = job.spec
    yield "spec.runtime", spec.runtime
    for index, teacher in enumerate(spec.teachers):
        yield f"spec.teachers[{index}]", teacher
    yield "spec.ray.head", spec.ray.head
    yield "spec.ray.workers", spec.ray.workers
    yield "spec.preflight", spec.preflight


def _placement(path: str, role: Placement) -> Problems:
    tolerations = [item.to_yaml_dict() for item in role.tolerations or ()]
    yield from kubernetes.label_problems(f"{path}.nodeSelector", role.node_selector)
    yield from kubernetes.toleration_problems(f"{path}.tolerations", tolerations)
    yield from kubernetes.affinity_problems(f"{path}.affinity", role.affinity)
    yield from kubernetes.spread_problems(f"{path}.topologySpread", role.topology_spread)
    if role.resources is not None:
        yield from kubernetes.resource_problems(f"{path}.resources", role.resources.to_yaml_dict())
    if isinstance(role, TemplatedPlacement):
        yield from kubernetes.template_problems(f"{path}.template", role.template)


def _runtime(job: OPDJob) -> Problems:
    runtime, path = job.spec.runtime, "spec.runtime"
    yield from kubernetes.env_problems(f"{path}.env", [item.to_yaml_dict() for item in runtime.env])
    resource = runtime.accelerator_resource
    if resource and (problem := kubernetes.resource_name_problem(resource)):
        yield f"{path}.acceleratorResource", problem


def _names(job: OPDJob) -> Problems:
    runtime = job.spec.runtime
    named: list[tuple[str, str | None]] = [
        ("spec.storage.claimName", job.spec.storage.claim_name),
        ("spec.runtime.serviceAccountName", runtime.service_account_name),
        ("spec.runtime.priorityClassName", runtime.priority_class_name),
    ]
    named += [
        (f"spec.runtime.imagePullSecrets[{i}].name", item.name) for i, item in enumerate(runtime.image_pull_secrets)
    ]
    for index, teacher in enumerate(job.spec.teachers):
        reference = teacher.api_key_secret_ref
        named.append((f"spec.teachers[{index}].apiKeySecretRef.name", reference.name if reference else None))
    for path, name in named:
        if name is not None and (problem := kubernetes.subdomain_problem(name)):
            yield path, problem
    images = [("spec.runtime.image", runtime.image)]
    images += [(f"spec.teachers[{index}].image", teacher.image) for index, teacher in enumerate(job.spec.teachers)]
    for path, image in images:
        if image is not None and (not image or image != "".join(image.split())):
            yield path, f"{image!r} is no image. Write it without spaces, such as registry.example/trainer:1."
    for index, volume in enumerate(job.spec.storage.extra_volumes):
        if len([value for value in volume.source.values() if value is not None]) != 1:
            yield (
                f"spec.storage.extraVolumes[{index}].source",
                "a volume has one source. Write one, such as hostPath: {path: /models}.",
            )


@rule(29, "PodField", Level.ERROR, "what goes into pods has the form that Kubernetes takes", cluster_only=True)
def pod_field(job: OPDJob) -> Hits:
    count = 0
    found = [_names(job), _runtime(job), *(_placement(path, role) for path, role in _roles(job))]
    for problems in found:
        for hit in problems:
            count += 1
            if count <= MOST:
                yield hit


@rule(30, "RestartPolicy", Level.ERROR, "pods restart as the operator counts on", cluster_only=True)
def restart_policy(job: OPDJob) -> Hits:
    wanted: list[tuple[str, dict[str, Any] | None, str, str]] = [
        ("spec.ray.head", job.spec.ray.head.template, "Never", _NEVER),
        ("spec.ray.workers", job.spec.ray.workers.template, "Never", _NEVER),
    ]
    wanted += [
        (f"spec.teachers[{index}]", teacher.template, "Always", _ALWAYS)
        for index, teacher in enumerate(job.spec.teachers)
    ]
    for path, template, policy, why in wanted:
        spec = (template or {}).get("spec")
        written = spec.get("restartPolicy") if isinstance(spec, dict) else None
        if written not in (None, policy):
            yield (
                f"{path}.template.spec.restartPolicy",
                f"{written!r} does not fit: {why}. Remove it, or write {policy}.",
            )


RULES = (pod_field, restart_policy)
