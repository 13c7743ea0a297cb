"""Plays what a control plane without nodes lacks: kubelet, KubeRay and the trainer, by writing objects and statuses.

It is PLAYED: real KubeRay and real pods run in tests/e2e. What is real here is everything else: API server, etcd, garbage
collection, Deployment and Job controllers, admission, RBAC, and the operator's process with its own service account.

Each actor does what the real one would do, in the real one's order, and only that. Tests steer by `Script`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from operator_api import Api

from opd_api.progress import FINAL_KEY, PROGRESS_KEY
from opd_operator.errors import ApiError, Unreachable

Manifest = dict[str, Any]
NODE = "played-node"
PERIOD_SECONDS = 0.1


@dataclass
class Script:
    """How the played world behaves; tests change it while it runs."""

    #: Teachers load and answer. False: they stay unready for ever.
    teachers_ready: bool = True
    #: Why a teacher's container waits, while it is not ready.
    teacher_waiting: Manifest = field(default_factory=lambda: {"reason": "ContainerCreating"})
    #: What check and probe leave as their termination message, by role.
    check: Manifest = field(default_factory=dict)
    probe: Manifest = field(default_factory=dict)
    #: Role (check or probe) whose pods run on and on while it is named here.
    hold_steps_of: str = ""
    #: Steps that the trainer makes; it waits at `hold_at_step` until that is None.
    steps: int = 4
    hold_at_step: int | None = None
    #: KubeRay is not there: RayJobs stay as they are.
    kuberay: bool = True
    #: Status of a role's pods instead of a good one; container statuses need only what is special about them.
    statuses: dict[str, Manifest] = field(default_factory=dict)
    #: Roles that find no node, and the scheduler's words.
    no_room: dict[str, str] = field(default_factory=dict)
    #: Names of pods that nobody touches.
    hands_off: set[str] = field(default_factory=set)
    #: The trainer lives and says nothing; it says that it lives and does nothing.
    mute: bool = False
    idle: bool = False


def now() -> str:
    """The time as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Player:
    """The played world of one namespace."""

    def __init__(self, api: Api, namespace: str, script: Script | None = None) -> None:
        self.api = api
        self.namespace = namespace
        self.script = script or Script()
        #: Scripts of single jobs, by name; `script` is for all others.
        self.scripts: dict[str, Script] = {}
        #: What happened, in order: ("teacher ready", name), ("rayjob seen", name), ...
        self.log: list[tuple[str, str]] = []
        self._steps: dict[str, int] = {}
        self._sequence: dict[str, int] = {}
        #: UIDs of pods whose special status was written.
        self._given: set[str] = set()

    @contextlib.asynccontextmanager
    async def playing(self) -> AsyncIterator[Player]:
        """Plays while the block runs."""
        task = asyncio.create_task(self._play())
        try:
            yield self
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _play(self) -> None:
        while True:
            await self._each("v1", "Pod", self._kubelet)
            await self._each("ray.io/v1", "RayJob", self._kuberay)
            await self._each("ray.io/v1", "RayJob", self._trainer)
            await asyncio.sleep(PERIOD_SECONDS)

    async def _each(self, api_version: str, kind: str, act: Callable[[Manifest], Awaitable[None]]) -> None:
        """Let an actor look at every object. Another writer may have been faster, or the API server busy, as in a real
        cluster: the next round sees the new state, and nobody else waits for that."""
        found: list[Manifest] = []
        with contextlib.suppress(ApiError, Unreachable):
            found = await self.api.list(api_version, kind, self.namespace, "opd.dev/job")
        for item in found:
            with contextlib.suppress(ApiError, Unreachable):
                await act(item)

    def script_of(self, found: Manifest) -> Script:
        """The script of the job that an object belongs to."""
        return self.scripts.get(found["metadata"]["labels"]["opd.dev/job"], self.script)

    # --- kubelet and scheduler -------------------------------------------------------------------------------------

    async def _kubelet(self, pod: Manifest) -> None:
        role, script = pod["metadata"]["labels"]["opd.dev/role"], self.script_of(pod)
        if pod["metadata"]["name"] in script.hands_off:
            return
        if pod["metadata"].get("deletionTimestamp"):
            await self.api.delete(pod, grace_seconds=0)
            self.log.append(("pod gone", f"{role} {pod['metadata']['name']}"))
        elif role in script.no_room:
            await self._find_no_node(pod, script.no_room[role])
        elif not pod["spec"].get("nodeName"):
            await self._bind(pod)
        elif role in script.statuses:
            await self._stay(pod, script.statuses[role])
        elif role in ("check", "probe"):
            if role != script.hold_steps_of:
                await self._run_step(pod, role)
        else:
            await self._run_server(pod, role)

    async def _find_no_node(self, pod: Manifest, message: str) -> None:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        await self._once(pod, {"phase": "Pending", "conditions": [condition]})

    async def _stay(self, pod: Manifest, status: Manifest) -> None:
        """A pod that is not as it should be, and remains so."""
        containers = [_container(pod, {}, ready=False) | special for special in status.get("containerStatuses", [])]
        await self._once(pod, {**status, "containerStatuses": containers})

    async def _once(self, pod: Manifest, status: Manifest) -> None:
        """Write a status unless the pod has been given one of this kind before."""
        if pod["metadata"]["uid"] not in self._given:
            self._given.add(pod["metadata"]["uid"])
            await self.api.patch(pod, {"status": status}, "status")

    async def _bind(self, pod: Manifest) -> None:
        name = pod["metadata"]["name"]
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name},
            "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
        }
        await self.api.post(f"/api/v1/namespaces/{self.namespace}/pods/{name}/binding", body)

    async def _run_step(self, pod: Manifest, role: str) -> None:
        if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            return
        document = {
            "attempt": 1,
            "outcome": "Succeeded",
            **(self.script_of(pod).check if role == "check" else self.script_of(pod).probe),
        }
        succeeded = document["outcome"] == "Succeeded"
        code = 0 if succeeded else {"Config": 64, "Data": 65, "Teacher": 69}.get(str(document.get("failureClass")), 70)
        terminated = {
            "exitCode": code,
            "reason": "Completed" if succeeded else "Error",
            "message": json.dumps(document),
        }
        terminated |= {"startedAt": now(), "finishedAt": now()}
        status = {
            "phase": "Succeeded" if succeeded else "Failed",
            "containerStatuses": [_container(pod, {"terminated": terminated}, ready=False)],
        }
        await self.api.patch(pod, {"status": status}, "status")
        self.log.append((f"{role} {'passed' if succeeded else 'failed'}", pod["metadata"]["name"]))

    async def _run_server(self, pod: Manifest, role: str) -> None:
        script = self.script_of(pod)
        ready = role != "teacher" or script.teachers_ready
        conditions = pod.get("status", {}).get("conditions") or []
        is_ready = any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)
        if is_ready == ready and pod.get("status", {}).get("containerStatuses"):
            return
        state = {"running": {"startedAt": now()}} if ready else {"waiting": script.teacher_waiting}
        status = {
            "phase": "Running" if ready else "Pending",
            "containerStatuses": [_container(pod, state, ready=ready)],
            "conditions": [
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": now()},
                {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": now()},
            ],
        }
        await self.api.patch(pod, {"status": status}, "status")
        if ready:
            self.log.append((f"{role} ready", pod["metadata"]["name"]))

    # --- KubeRay ---------------------------------------------------------------------------------------------------

    async def _kuberay(self, job: Manifest) -> None:
        if job["metadata"].get("deletionTimestamp") or not self.script_of(job).kuberay:
            return
        state = job.get("status", {}).get("jobDeploymentStatus", "")
        if state in ("Complete", "Failed"):
            await self._shut_down(job)
        else:
            await self._run_ray_job(job, state)

    async def _run_ray_job(self, job: Manifest, state: str) -> None:
        name = job["metadata"]["name"]
        cluster = await self.api.get("ray.io/v1", "RayCluster", self.namespace, f"{name}-c")
        if state == "":
            if cluster is None:
                self.log.append(("rayjob seen", name))
            await self._create_cluster(job, cluster)
            await self._ray_status(job, jobDeploymentStatus="Initializing", rayClusterName=f"{name}-c")
        if state == "" or cluster is None:
            return
        pods = await self.api.list("v1", "Pod", self.namespace, f"ray.io/cluster={name}-c")
        running = len(pods) > 1 and all(pod.get("status", {}).get("phase") == "Running" for pod in pods)
        if not running:
            return
        if state == "Initializing":
            head = {"type": "HeadPodReady", "status": "True", "reason": "HeadPodRunningAndReady"}
            conditions = [head | {"lastTransitionTime": now(), "message": ""}]
            await self.api.patch(cluster, {"status": {"state": "ready", "conditions": conditions}}, "status")
            await self._ray_status(job, jobDeploymentStatus="Running", jobStatus="RUNNING", startTime=now())
        elif state == "Running" and (final := await self._final(name)) is not None:
            succeeded = final["outcome"] == "Succeeded"
            words = {
                "jobStatus": "SUCCEEDED",
                "jobDeploymentStatus": "Complete",
                "message": "Job finished successfully.",
            }
            if not succeeded:
                words = {"jobStatus": "FAILED", "jobDeploymentStatus": "Failed", "reason": "AppFailed"}
                words["message"] = "Job entrypoint command failed with exit code 75"
            await self._ray_status(job, endTime=now(), **words)

    async def _create_cluster(self, job: Manifest, known: Manifest | None) -> None:
        """Labels as KubeRay copies them: the RayJob's onto the RayCluster, the templates' onto the pods. Goes on where it
        was cut off."""
        name = job["metadata"]["name"]
        spec = job["spec"]["rayClusterSpec"]
        cluster = known or await self.api.create(
            {
                "apiVersion": "ray.io/v1",
                "kind": "RayCluster",
                "metadata": {
                    "name": f"{name}-c",
                    "namespace": self.namespace,
                    "labels": job["metadata"]["labels"],
                    "ownerReferences": [_owner(job)],
                },
                "spec": spec,
            }
        )
        await self._create_pod(cluster, f"{name}-c-head", spec["headGroupSpec"]["template"])
        for group in spec["workerGroupSpecs"]:
            for number in range(group["replicas"]):
                await self._create_pod(cluster, f"{name}-c-worker-{number}", group["template"])

    async def _create_pod(self, cluster: Manifest, name: str, template: Manifest) -> None:
        labels = {**template["metadata"]["labels"], "ray.io/cluster": cluster["metadata"]["name"]}
        metadata = {
            "name": name,
            "namespace": self.namespace,
            "labels": labels,
            "ownerReferences": [_owner(cluster)],
        }
        if await self.api.get("v1", "Pod", self.namespace, name) is None:
            await self.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})

    async def _shut_down(self, job: Manifest) -> None:
        """shutdownAfterJobFinishes, once its TTL is over."""
        ended = job["status"].get("endTime")
        age = (datetime.now(UTC) - datetime.fromisoformat(ended)).total_seconds() if ended else 0.0
        if age < job["spec"].get("ttlSecondsAfterFinished", 0):
            return
        cluster = await self.api.get("ray.io/v1", "RayCluster", self.namespace, f"{job['metadata']['name']}-c")
        if cluster is not None and not cluster["metadata"].get("deletionTimestamp"):
            await self.api.delete(cluster)

    async def _ray_status(self, job: Manifest, **words: str) -> None:
        await self.api.patch(job, {"status": words}, "status")

    # --- trainer ---------------------------------------------------------------------------------------------------

    async def _trainer(self, job: Manifest) -> None:
        running = job.get("status", {}).get("jobDeploymentStatus") == "Running"
        if running and not job["metadata"].get("deletionTimestamp"):
            await self._train(job)

    async def _train(self, job: Manifest) -> None:
        ray_job, owner = job["metadata"]["name"], job["metadata"]["ownerReferences"][0]["name"]
        attempt = int(job["metadata"]["labels"]["opd.dev/attempt"])
        progress = await self._progress(owner)
        if progress is None or await self._final(ray_job) is not None:
            return
        asked = (progress["metadata"].get("annotations") or {}).get("opd.dev/stop")
        step, script = self._steps.get(owner, 0), self.script_of(job)
        if asked == str(attempt):
            await self._finish(progress, attempt, step, "Preempted")
        elif step >= script.steps:
            await self._finish(progress, attempt, step, "Succeeded")
        elif not script.mute:
            held = script.hold_at_step is not None and step >= script.hold_at_step
            self._steps[owner] = step if held else step + 1
            await self._report(progress, owner, attempt, script)

    async def _report(self, progress: Manifest, owner: str, attempt: int, script: Script) -> None:
        step = self._steps[owner]
        self._sequence[owner] = self._sequence.get(owner, 0) + 1
        document = {
            "attempt": attempt,
            "sequence": self._sequence[owner],
            "phase": "Training",
            "step": step,
            "totalSteps": script.steps,
            "activity": 1 if script.idle else self._sequence[owner],
            "metrics": {"opd_reverse_kl": round(3.0 / (step + 1), 4)},
            "lastCheckpoint": _checkpoint(step, attempt),
        }
        await self.api.patch(progress, {"data": {PROGRESS_KEY: json.dumps(document)}})
        self.log.append(("step", f"{attempt}:{step}"))

    async def _finish(self, progress: Manifest, attempt: int, step: int, outcome: str) -> None:
        document: Manifest = {
            "attempt": attempt,
            "outcome": outcome,
            "step": step,
            "message": "saved",
            "checkpoint": _checkpoint(step, attempt),
        }
        if outcome == "Succeeded":
            document["result"] = {"checkpoint": _checkpoint(step, attempt)["path"], "exportedModel": "/data/export"}
        await self.api.patch(progress, {"data": {FINAL_KEY: json.dumps(document)}})
        self.log.append(("final", f"{attempt}:{outcome}"))

    async def _progress(self, owner: str) -> Manifest | None:
        return await self.api.get("v1", "ConfigMap", self.namespace, f"{owner}-progress")

    async def _final(self, ray_job: str) -> Manifest | None:
        """The final document of the RayJob's attempt."""
        job = await self.api.get("ray.io/v1", "RayJob", self.namespace, ray_job)
        if job is None:
            return None
        progress = await self._progress(job["metadata"]["ownerReferences"][0]["name"])
        text = ((progress or {}).get("data") or {}).get(FINAL_KEY)
        document: Manifest | None = json.loads(text) if text else None
        same = document is not None and str(document["attempt"]) == job["metadata"]["labels"]["opd.dev/attempt"]
        return document if same else None


def _checkpoint(step: int, attempt: int) -> Manifest:
    return {"step": step, "path": f"/data/opd/checkpoints/step-{step}.a{attempt}"}


def _container(pod: Manifest, state: Manifest, *, ready: bool) -> Manifest:
    container = pod["spec"]["containers"][0]
    found = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
    return found | {"ready": ready, "state": state}


def _owner(found: Manifest) -> Manifest:
    metadata = found["metadata"]
    return {
        "apiVersion": found["apiVersion"],
        "kind": found["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
