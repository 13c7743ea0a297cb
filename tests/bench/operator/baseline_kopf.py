"""The usual kopf operator of the same function: indices, on.create and on.field. `kopf run` starts it; cold.py measures it.

It makes the same children from the same builders, looks its children up in indices, and lets kopf remember in annotations what
it has handled. It has nothing else of ours: no classes of failure, no attempts, no deadlines. Settings are kopf's own.
"""

from __future__ import annotations

import secrets
from typing import Any

import kopf

from opd_api.v1alpha1 import OPDJob
from opd_operator.children.render import render
from opd_operator.cluster import Cluster
from opd_operator.errors import ApiError
from opd_operator.model import ObjectRef
from opd_operator.planned import Deletion
from opd_operator.settings import Settings

JOB_LABEL = "opd.dev/job"
OURS = {JOB_LABEL: kopf.PRESENT}
OPDJOB = ("opd.dev", "v1alpha1", "opdjobs")


class NoCalls:
    """Calls are not counted."""

    def api_call(self, verb: str, kind: str, code: str) -> None:
        """Not counted."""


@kopf.on.startup()
async def connect(memo: Any, **_: Any) -> None:
    """One client for all handlers."""
    memo.cluster = await Cluster.connect(observer=NoCalls())


@kopf.index(*OPDJOB)
def jobs(name: str, body: kopf.Body, **_: Any) -> Any:
    """Name -> the OPDJob."""
    return {name: {"spec": dict(body.spec), "metadata": dict(body.metadata)}}


@kopf.index("apps", "v1", "deployments", labels=OURS)
def teachers(name: str, labels: Any, spec: Any, status: Any, meta: Any, **_: Any) -> Any:
    """Job -> its teachers, and whether they are ready."""
    ready = status.get("readyReplicas", 0) == spec.get("replicas", 1)
    return {labels[JOB_LABEL]: (name, meta["uid"], ready)}


@kopf.index("ray.io", "v1", "rayjobs", labels=OURS)
def ray_jobs(name: str, labels: Any, **_: Any) -> Any:
    """Job -> its RayJob."""
    return {labels[JOB_LABEL]: name}


@kopf.on.create(*OPDJOB)
async def created(body: kopf.Body, patch: kopf.Patch, memo: Any, **_: Any) -> None:
    """Everything but the RayJob."""
    for manifest in _children(body):
        if manifest["kind"] not in ("RayJob", "Job"):
            await _create(memo.cluster, manifest)
    patch.status["phase"] = "StartingTeachers"


@kopf.on.field("apps", "v1", "deployments", field="status.readyReplicas", labels=OURS)
async def teacher_ready(
    namespace: str, labels: Any, memo: Any, jobs: kopf.Index, teachers: kopf.Index, ray_jobs: kopf.Index, **_: Any
) -> None:
    """The RayJob, once every teacher is ready."""
    job = labels[JOB_LABEL]
    if job in ray_jobs or job not in jobs or not all(ready for _, _, ready in teachers.get(job, [])):
        return
    (body,) = jobs[job]
    for manifest in _children({"apiVersion": "opd.dev/v1alpha1", "kind": "OPDJob", **body}):
        if manifest["kind"] == "RayJob":
            await _create(memo.cluster, manifest)


@kopf.on.field("ray.io", "v1", "rayjobs", field="status.jobDeploymentStatus", labels=OURS)
async def ray_job_changed(
    namespace: str, labels: Any, new: Any, memo: Any, jobs: kopf.Index, teachers: kopf.Index, **_: Any
) -> None:
    """The job's phase; no teacher after its end."""
    job = labels[JOB_LABEL]
    phase = {"Running": "Training", "Complete": "Succeeded", "Failed": "Failed"}.get(new)
    if phase is None or job not in jobs:
        return
    ref = ObjectRef("opd.dev/v1alpha1", "OPDJob", namespace, job)
    await memo.cluster.merge_patch(ref, {"status": {"phase": phase}}, subresource="status")
    if phase != "Training":
        for name, uid, _ready in teachers.get(job, []):
            await memo.cluster.delete(Deletion(ObjectRef("apps/v1", "Deployment", namespace, name), uid))


@kopf.on.field(*OPDJOB, field="spec.suspend")
async def suspended(name: str, namespace: str, new: Any, memo: Any, ray_jobs: kopf.Index, **_: Any) -> None:
    """Hands the wish to the RayJob."""
    for ray_job in ray_jobs.get(name, []):
        ref = ObjectRef("ray.io/v1", "RayJob", namespace, ray_job)
        await memo.cluster.merge_patch(ref, {"spec": {"suspend": bool(new)}})


def _children(body: Any) -> list[dict[str, Any]]:
    metadata = {key: body["metadata"][key] for key in ("name", "namespace", "uid")}
    document = {
        "apiVersion": body["apiVersion"],
        "kind": body["kind"],
        "metadata": metadata,
        "spec": dict(body["spec"]),
    }
    return render(OPDJob.model_validate(document), Settings())


async def _create(cluster: Cluster, manifest: dict[str, Any]) -> None:
    if manifest["kind"] == "Secret":
        manifest = {**manifest, "stringData": {key: secrets.token_urlsafe(32) for key in ("api-key", "admin-key")}}
    try:
        await cluster.create(manifest)
    except ApiError as error:
        if not error.already_exists:
            raise
