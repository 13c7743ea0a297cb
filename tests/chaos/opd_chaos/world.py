"""Plays what a control plane without nodes lacks, for one job, as its schedule says: scheduler, kubelet and the people.

Everything is decided from the observer's present state, so that playing costs writes only. KubeRay and the trainer are in
world_student.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import aiohttp
from operator_api import Api
from operator_player import NODE

from opd_chaos.observer import Observer
from opd_chaos.schedule import NEVER, Action, Life, document
from opd_chaos.world_student import Student, now
from opd_operator.errors import ApiError, Unreachable

Manifest = dict[str, Any]
TICK_SECONDS = 0.1
#: Another writer was faster, or the API server is busy: the next look tries again.
NOT_NOW = (ApiError, Unreachable, aiohttp.ClientError, TimeoutError, OSError)
TERMINAL = ("Succeeded", "Failed")
EXIT_CODES = {"ok": 0, "Config": 64, "Data": 65, "Teacher": 69, "Internal": 70, "Infrastructure": 75}


class World:
    """One job's world. `run` plays until it is cancelled."""

    def __init__(self, api: Api, observer: Observer, namespace: str, life: Life) -> None:
        self.api, self.observer, self.namespace, self.life = api, observer, namespace, life
        #: UIDs of objects that a person or a fault of the schedule deleted.
        self.touched: set[str] = set()
        #: OPDJobs of this name so far: people may delete one and make another.
        self.made = 0
        #: Actions that are not done; of these, those that wait for their phase.
        self.busy_actions = self.idle_actions = len(life.actions)
        self.last_phase = ""
        self._student = Student(self)
        self._since: dict[str, float] = {}
        self._ended: dict[str, int] = {}
        self._written: dict[tuple[str, str], float] = {}

    # --- what is there -----------------------------------------------------------------------------------------------

    @property
    def job(self) -> Manifest | None:
        """The OPDJob."""
        return self.observer.job(self.namespace, self.life.name)

    @property
    def status(self) -> Manifest:
        """Its status."""
        return (self.job or {}).get("status") or {}

    @property
    def seen(self) -> int:
        """OPDJobs of this name that the observer has seen so far."""
        record = self.observer.record[self.namespace, self.life.name]
        return len({entry.uid for entry in record if entry.kind == "OPDJob"})

    def objects(self, kind: str) -> list[Manifest]:
        """Objects of the job."""
        return self.observer.objects(self.namespace, self.life.name, kind)

    def age(self, found: Manifest, what: str = "") -> float:
        """Seconds since this world first asked for it."""
        at = time.monotonic()  # once: a clock read twice made every pod younger than 0, and for a moment without room
        return at - self._since.setdefault(found["metadata"]["uid"] + what, at)

    def once(self, found: Manifest, what: str, seconds: float = 3.0) -> bool:
        """True when a write has not been tried in the last seconds: the watch tells of it a little later."""
        key = (found["metadata"]["uid"], what)
        if time.monotonic() - self._written.get(key, -NEVER) < seconds:
            return False
        self._written[key] = time.monotonic()
        return True

    # --- the life ----------------------------------------------------------------------------------------------------

    async def create(self) -> None:
        """Makes the OPDJob."""
        try:
            await self.api.create(document(self.life, self.namespace))
        except ApiError as error:
            if not error.already_exists:  # the answer to the first try was lost
                raise
        self.made += 1

    async def run(self) -> None:
        """Plays for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._play())
            for action in self.life.actions:
                group.create_task(self._act(action))

    async def _play(self) -> None:
        while True:
            for actor in (self._pods, self._student.kuberay, self._student.trainer):
                with contextlib.suppress(*NOT_NOW):
                    await actor()
            await asyncio.sleep(TICK_SECONDS)

    # --- scheduler and kubelet ---------------------------------------------------------------------------------------

    async def _pods(self) -> None:
        for pod in self.objects("Pod"):
            role = pod["metadata"]["labels"]["opd.dev/role"]
            phase = pod.get("status", {}).get("phase")
            if pod["metadata"].get("deletionTimestamp"):
                student = role in ("head", "worker")
                if self.age(pod, "going") >= (self._student.lingers(pod) if student else 0.1) and self.once(
                    pod, "gone"
                ):
                    if pod["metadata"].get("finalizers") and phase not in TERMINAL:
                        # As a kubelet does: the Job controller lets a pod go when it has seen how it ended.
                        await self.end(pod, 137)
                    await self.api.delete(pod, grace_seconds=0)
            elif phase in TERMINAL:
                continue
            elif not pod["spec"].get("nodeName"):
                await self._schedule(pod, role)
            elif role in ("check", "probe"):
                await self._step(pod, role)
            elif role == "teacher":
                await self._teacher(pod)
            elif self.age(pod) >= self._student.start_after(pod):
                await self.ready(pod, True)

    async def _schedule(self, pod: Manifest, role: str) -> None:
        room_after = 0.0
        if role == "teacher":
            room_after = self._teacher_of(pod).unschedulable
        elif role == "worker":
            room_after = self._student.room_after(pod)
        name = pod["metadata"]["name"]
        if self.age(pod) < room_after:
            conditions = pod.get("status", {}).get("conditions") or []
            if not conditions and self.once(pod, "no room"):
                refusal = {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
                    "lastTransitionTime": now(),
                }
                await self.api.patch(pod, {"status": {"conditions": [refusal]}}, "status")
        elif self.once(pod, "bind"):
            target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
            body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
            await self.api.post(f"/api/v1/namespaces/{self.namespace}/pods/{name}/binding", body)

    async def _step(self, pod: Manifest, role: str) -> None:
        step = self.life.check if role == "check" else self.life.probe
        if self.age(pod) < step.seconds or not self.once(pod, "end"):
            return
        number = self._ended.get(role, 0)
        end = step.ends[min(number, len(step.ends) - 1)]
        self._ended[role] = number + 1
        document: Manifest = {
            "attempt": 1,
            "outcome": "Succeeded" if end == "ok" else "Failed",
            "message": f"{role} {end}",
        }
        if end != "ok":
            document |= {"failureClass": end}
        await self.end(pod, EXIT_CODES[end], json.dumps(document))

    def _teacher_of(self, pod: Manifest) -> Any:
        name = pod["metadata"]["labels"]["opd.dev/teacher"]
        return next(item for item in self.life.teachers if item.name == name)

    async def _teacher(self, pod: Manifest) -> None:
        plan = self._teacher_of(pod)
        age = self.age(pod, "running")
        if self._student.loses(plan):
            await self.ready(pod, False)
            return
        crashes = min(plan.crashes, int(age / 0.4))
        if age >= plan.ready_after + 0.4 * plan.crashes:
            await self.ready(pod, True, restarts=plan.crashes)
        elif crashes and self.once(pod, f"crash {crashes}", NEVER):
            waiting = {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}
            last = {"terminated": {"exitCode": 1, "reason": "Error", "message": "CUDA error: out of memory"}}
            await self._status(pod, "Running", {"waiting": waiting}, ready=False, restarts=crashes, last=last)

    async def ready(self, pod: Manifest, ready: bool, *, restarts: int = 0) -> None:
        """A container runs, and answers or not."""
        conditions = {entry["type"]: entry["status"] for entry in pod.get("status", {}).get("conditions") or []}
        word = "True" if ready else "False"
        if conditions.get("Ready") != word and self.once(pod, f"ready {word}"):
            await self._status(pod, "Running", {"running": {"startedAt": now()}}, ready=ready, restarts=restarts)

    async def end(self, pod: Manifest, code: int, message: str = "") -> None:
        """All containers of a pod end."""
        terminated = {"exitCode": code, "reason": "Error" if code else "Completed", "message": message}
        terminated |= {"startedAt": now(), "finishedAt": now()}
        await self._status(pod, "Failed" if code else "Succeeded", {"terminated": terminated}, ready=False)

    async def _status(
        self,
        pod: Manifest,
        phase: str,
        state: Manifest,
        *,
        ready: bool,
        restarts: int = 0,
        last: Manifest | None = None,
    ) -> None:
        container = pod["spec"]["containers"][0]
        status = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": restarts}
        status |= {"ready": ready, "state": state, "lastState": last or {}}
        conditions = [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": now()},
            {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": now()},
        ]
        patch = {"status": {"phase": phase, "containerStatuses": [status], "conditions": conditions}}
        await self.api.patch(pod, patch, "status")

    # --- people ------------------------------------------------------------------------------------------------------

    async def _act(self, action: Action) -> None:
        try:
            while not (self.status.get("phase") == action.phase or (not action.phase and self.job)):
                await asyncio.sleep(TICK_SECONDS)
            self.idle_actions -= 1
            await asyncio.sleep(action.delay)
            for _ in range(20):  # the state may be a little old
                try:
                    await self._do(action)
                    return
                except NOT_NOW:
                    await asyncio.sleep(TICK_SECONDS)
        finally:
            self.busy_actions -= 1

    async def _do(self, action: Action) -> None:
        job = self.job
        if job is None or job["metadata"].get("deletionTimestamp"):
            return
        if action.what == "suspend":
            await self.api.patch(job, {"spec": {"suspend": True}})
            await asyncio.sleep(action.seconds)
            if self.job is not None:
                await self.api.patch(self.job, {"spec": {"suspend": False}})
        elif action.what in ("delete", "recreate"):
            await self.api.delete(job)
            if action.what == "recreate":
                await self.create()
        elif action.what == "edit":
            await self.api.patch(job, {"spec": {"lifecycle": {"backoffLimit": 2}, "ray": {"head": {"template": {}}}}})
        elif action.what == "annotate":
            for number in range(int(action.seconds * 20)):
                await self.api.patch(job, {"metadata": {"annotations": {"team/n": str(number)}}})
                await asyncio.sleep(0.05)
        elif action.what == "delete teacher":
            await self.remove(self.objects("Deployment")[:1])
        elif action.what == "delete pod":
            await self.remove(self.objects("Pod")[:1])

    async def remove(self, found: list[Manifest]) -> None:
        """Deletes from outside, on record."""
        for item in found:
            self.touched.add(item["metadata"]["uid"])
            await self.api.delete(item)
