"""Plays kubelet, KubeRay and trainer for many jobs at once: it acts on what the watches tell, and asks for nothing.

The tests' player (tests/support/operator_player.py) looks at everything ten times a second, which would be most of the load
of a benchmark. PLAYED means: API server, etcd, Deployment and Job controllers, garbage collection and the operator are real.
Pods are bound to no node, so that they are gone when they are deleted; on kwok's nodes (`kubelet=False`) pods are its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from operator_api import Api
from watching import CONFIG_MAP, DEPLOYMENT, JOB, OPDJOB, POD, RAY_CLUSTER, RAY_JOB, watching

from opd_api.progress import FINAL_KEY, PROGRESS_KEY
from opd_api.vocabulary import Label, Role
from opd_operator.errors import ApiError

Manifest = dict[str, Any]
KINDS = (OPDJOB, POD, DEPLOYMENT, JOB, RAY_JOB)
STUDENT_PODS = 2


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Life:
    """What was seen of one job, in seconds of the performance counter."""

    #: Teacher's Deployment -> all its replicas are ready.
    ready: dict[str, float] = field(default_factory=dict)
    probed: float | None = None
    trains: asyncio.Event = field(default_factory=asyncio.Event)
    #: Set by the case: the trainer may end.
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    #: The final document was sent.
    ended: float | None = None
    #: Teacher's Deployment -> its delete was accepted.
    freed: dict[str, float] = field(default_factory=dict)
    succeeded: asyncio.Event = field(default_factory=asyncio.Event)
    #: Names of the student's pods that run.
    running: set[str] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def to_next_step(self) -> float:
        """From the last teacher ready to the probe's Job."""
        assert self.probed is not None
        return self.probed - max(self.ready.values())

    @property
    def to_release(self) -> float:
        """From the end told by the trainer to the last teacher's delete."""
        assert self.ended is not None
        return max(self.freed.values()) - self.ended


class Player:
    """The played world of one namespace."""

    def __init__(self, api: Api, namespace: str, *, kubelet: bool = True, beat_seconds: float | None = None) -> None:
        self._api, self._namespace, self._kubelet = api, namespace, kubelet
        #: Pause between two heartbeats of a trainer; None: it says one word and is still.
        self._beat = beat_seconds
        self.lives: dict[str, Life] = defaultdict(Life)
        self._done: set[tuple[str, str]] = set()
        self._group = asyncio.TaskGroup()

    @contextlib.asynccontextmanager
    async def playing(self) -> AsyncIterator[Player]:
        """Plays while the block runs."""
        tasks: list[asyncio.Task[None]] = []
        async with self._group as group:
            self._start = lambda work: tasks.append(group.create_task(work))
            async with watching(self._api, self._namespace, KINDS, self._tell):
                yield self
            for task in tasks:
                task.cancel()

    async def all(self, event: str, names: list[str], *, seconds: float) -> None:
        """Until every job has come to that event of its life."""
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(getattr(self.lives[name], event).wait() for name in names))
        except TimeoutError:
            late = [name for name in names if not getattr(self.lives[name], event).is_set()]
            raise AssertionError(
                f"{len(late)} of {len(names)} jobs: not {event} within {seconds} s: {late[:5]}"
            ) from None

    # --- what the watches tell ---------------------------------------------------------------------------------------

    def _tell(self, at: float, change: str, found: Manifest) -> None:
        kind = found["kind"]
        if kind == "OPDJob":
            if (found.get("status") or {}).get("phase") == "Succeeded":
                self.lives[found["metadata"]["name"]].succeeded.set()
            return
        labels = found["metadata"].get("labels") or {}
        if Label.JOB.value not in labels:
            return
        life = self.lives[labels[Label.JOB.value]]
        name, role = found["metadata"]["name"], labels.get(Label.ROLE.value)
        going = change == "DELETED" or "deletionTimestamp" in found["metadata"]
        if kind == "Deployment":
            if going:
                life.freed.setdefault(name, at)
            elif _all_ready(found):
                life.ready.setdefault(name, at)
        elif kind == "Job" and role == Role.PROBE and change == "ADDED":
            life.probed = at
        elif kind == "Pod" and not going:
            self._pod(found, role, life)
        elif kind == "RayJob" and change == "ADDED":
            self._start(self._student(found, life))

    def _pod(self, pod: Manifest, role: str | None, life: Life) -> None:
        if role in (Role.HEAD, Role.WORKER) and (pod.get("status") or {}).get("phase") == "Running":
            life.running.add(pod["metadata"]["name"])
            life.changed.set()
        if self._kubelet and self._first(pod, "run"):
            self._start(self._run(pod, role))

    def _first(self, found: Manifest, what: str) -> bool:
        key = (found["metadata"]["uid"], what)
        if key in self._done:
            return False
        self._done.add(key)
        return True

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        raise RuntimeError("nothing is played yet")

    # --- kubelet -----------------------------------------------------------------------------------------------------

    async def _run(self, pod: Manifest, role: str | None) -> None:
        container = pod["spec"]["containers"][0]
        status = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": _now()}
        if role in (Role.CHECK, Role.PROBE):
            message = json.dumps({"attempt": 1, "outcome": "Succeeded"})
            ended = {"exitCode": 0, "reason": "Completed", "message": message}
            ended |= {"startedAt": _now(), "finishedAt": _now()}
            status |= {"ready": False, "state": {"terminated": ended}}
            patch = {"phase": "Succeeded", "containerStatuses": [status], "conditions": [scheduled]}
        else:
            status |= {"ready": True, "state": {"running": {"startedAt": _now()}}}
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": _now()}
            patch = {"phase": "Running", "containerStatuses": [status], "conditions": [scheduled, ready]}
        await self._api.patch(pod, {"status": patch}, "status")

    # --- KubeRay and trainer -----------------------------------------------------------------------------------------

    async def _student(self, job: Manifest, life: Life) -> None:
        """The whole life of a RayJob."""
        with contextlib.suppress(ApiError):  # the case has deleted the OPDJob, and everything of it goes
            cluster = await self._cluster(job)
            await self._say(job, jobDeploymentStatus="Initializing", rayClusterName=cluster["metadata"]["name"])
            while len(life.running) < STUDENT_PODS:
                life.changed.clear()
                await life.changed.wait()
            head = {"type": "HeadPodReady", "status": "True", "reason": "HeadPodRunningAndReady"}
            conditions = [head | {"lastTransitionTime": _now(), "message": ""}]
            await self._api.patch(cluster, {"status": {"state": "ready", "conditions": conditions}}, "status")
            await self._say(job, jobDeploymentStatus="Running", jobStatus="RUNNING", startTime=_now())
            await self._train(job, life)
            words = {"jobStatus": "SUCCEEDED", "jobDeploymentStatus": "Complete"}
            await self._say(job, endTime=_now(), message="Job finished successfully.", **words)

    async def _cluster(self, job: Manifest) -> Manifest:
        name, spec = job["metadata"]["name"], job["spec"]["rayClusterSpec"]
        metadata = {
            "name": f"{name}-c",
            "namespace": self._namespace,
            "labels": job["metadata"]["labels"],
            "ownerReferences": [_owner(job)],
        }
        cluster = await self._api.create(
            {"apiVersion": RAY_CLUSTER.api_version, "kind": RAY_CLUSTER.kind, "metadata": metadata, "spec": spec}
        )
        for what, group in (("head", spec["headGroupSpec"]), ("worker", spec["workerGroupSpecs"][0])):
            template = group["template"]
            labels = {**template["metadata"]["labels"], "ray.io/cluster": f"{name}-c"}
            pod = {**metadata, "name": f"{name}-c-{what}", "labels": labels, "ownerReferences": [_owner(cluster)]}
            await self._api.create({"apiVersion": "v1", "kind": "Pod", "metadata": pod, "spec": template["spec"]})
        return cluster

    async def _train(self, job: Manifest, life: Life) -> None:
        owner = job["metadata"]["ownerReferences"][0]["name"]
        progress = {
            "apiVersion": CONFIG_MAP.api_version,
            "kind": CONFIG_MAP.kind,
            "metadata": {"name": f"{owner}-progress", "namespace": self._namespace},
        }
        beats = 0
        while True:
            beats += 1
            await self._api.patch(progress, {"data": {PROGRESS_KEY: json.dumps(_heartbeat(beats))}})
            life.trains.set()
            try:
                async with asyncio.timeout(self._beat):
                    await life.may_end.wait()
                break
            except TimeoutError:
                continue
        life.ended = time.perf_counter()
        await self._api.patch(progress, {"data": {FINAL_KEY: json.dumps(_final(beats))}})

    async def _say(self, job: Manifest, **words: str) -> None:
        await self._api.patch(job, {"status": words}, "status")


def _all_ready(deployment: Manifest) -> bool:
    status = deployment.get("status") or {}
    seen = status.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
    return seen and status.get("readyReplicas", 0) == deployment["spec"]["replicas"]


def _heartbeat(number: int) -> Manifest:
    checkpoint = {"step": number, "path": f"/data/opd/checkpoints/step-{number}.a1"}
    words = {"attempt": 1, "sequence": number, "phase": "Training", "step": number, "totalSteps": 1000}
    return {**words, "activity": number, "metrics": {"opd_reverse_kl": 1.5 / number}, "lastCheckpoint": checkpoint}


def _final(step: int) -> Manifest:
    checkpoint = {"step": step, "path": f"/data/opd/checkpoints/step-{step}.a1"}
    result = {"checkpoint": checkpoint["path"], "exportedModel": "/data/export"}
    words = {"attempt": 1, "outcome": "Succeeded", "step": step, "message": "saved"}
    return {**words, "checkpoint": checkpoint, "result": result}


def _owner(found: Manifest) -> Manifest:
    named = {"apiVersion": found["apiVersion"], "kind": found["kind"], "name": found["metadata"]["name"]}
    return {**named, "uid": found["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True}
