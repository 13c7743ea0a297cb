"""Plays KubeRay and the trainer of one job, with the faults of its schedule. Words and order are KubeRay 1.6's."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from opd_api.progress import FINAL_KEY, PROGRESS_KEY
from opd_chaos.schedule import NEVER, Attempt, Teacher

if TYPE_CHECKING:
    from opd_chaos.world import World

Manifest = dict[str, Any]
LOST_TEACHER_SECONDS = 2.0
#: Ends of the entrypoint that leave no final document: RayJob status.
SILENT_ENDS: dict[str, Manifest] = {
    "exit 75 without a document": {
        "jobStatus": "FAILED",
        "jobDeploymentStatus": "Failed",
        "reason": "AppFailed",
        "message": "Job entrypoint command failed with exit code 75",
    },
    "stopped": {"jobStatus": "STOPPED", "jobDeploymentStatus": "Complete", "message": "Job was intentionally stopped."},
    "complete without a document": {
        "jobStatus": "SUCCEEDED",
        "jobDeploymentStatus": "Complete",
        "message": "Job finished successfully.",
    },
}
#: Ends with a final document: its failure class.
TOLD_ENDS = {"exit 70": "Internal", "data": "Data", "teacher": "Teacher"}


#: Faults that are over once the trainer runs.
BEFORE_TRAINING = frozenset({"no room", "invalid"})


class Student:
    """RayJobs, RayClusters, their pods, and the documents of the trainer."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._steps: dict[str, int] = {}
        self._sequence = 0
        self._beat: dict[str, float] = {}
        self._done: set[tuple[str, str]] = set()
        self._lost: dict[str, float] = {}

    # --- what the schedule says --------------------------------------------------------------------------------------

    def _plan(self, found: Manifest) -> Attempt:
        return self.world.life.attempt(int(found["metadata"]["labels"].get("opd.dev/attempt", "1")))

    def lingers(self, pod: Manifest) -> float:
        """How long its pods take to go; one on a lost node longer than anybody waits for it."""
        return 12.0 if self._plan(pod).fault == "node lost" else self.world.life.lingers

    def start_after(self, pod: Manifest) -> float:
        """Until a student's pod runs."""
        return self._plan(pod).start_after

    def room_after(self, pod: Manifest) -> float:
        """Until a worker finds room."""
        return 8.0 if self._plan(pod).fault == "no room" else 0.0

    def loses(self, teacher: Teacher) -> bool:
        """Whether a teacher is away for a while just now."""
        if teacher.lost_at_step is None or not self._steps:
            return False
        if max(self._steps.values()) >= teacher.lost_at_step:
            self._lost.setdefault(teacher.name, time.monotonic())
        since = self._lost.get(teacher.name)
        return since is not None and time.monotonic() - since < LOST_TEACHER_SECONDS

    def _first(self, found: Manifest, what: str) -> bool:
        key = (found["metadata"]["uid"], what)
        if key in self._done:
            return False
        self._done.add(key)
        return True

    # --- KubeRay -----------------------------------------------------------------------------------------------------

    async def kuberay(self) -> None:
        """One look at every RayJob."""
        for job in self.world.objects("RayJob"):
            if job["metadata"].get("deletionTimestamp"):
                continue
            state = job.get("status", {}).get("jobDeploymentStatus", "")
            clusters = [item for item in self.world.objects("RayCluster") if _owned(item, job)]
            if state in ("Complete", "Failed", "ValidationFailed"):
                for cluster in clusters:
                    if not cluster["metadata"].get("deletionTimestamp") and self.world.once(cluster, "shut down"):
                        await self.world.api.delete(cluster)
            elif not clusters:
                await self._begin(job)
            else:
                await self._go_on(job, state, clusters[0])

    async def _begin(self, job: Manifest) -> None:
        if self._plan(job).fault == "invalid":
            if self.world.once(job, "invalid"):
                await self._say(job, jobDeploymentStatus="ValidationFailed", message="The RayJob spec is invalid: x")
            return
        if not self.world.once(job, "cluster", NEVER):
            return
        name, spec = job["metadata"]["name"], job["spec"]["rayClusterSpec"]
        metadata = {
            "name": f"{name}-{job['metadata']['uid'][:5]}",
            "namespace": self.world.namespace,
            "labels": job["metadata"]["labels"],
            "ownerReferences": [_owner(job)],
        }
        body = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec}
        cluster = await self.world.api.create(body)
        await self._pod(cluster, "head", spec["headGroupSpec"]["template"])
        for group in spec["workerGroupSpecs"]:
            for number in range(group["replicas"]):
                await self._pod(cluster, f"worker-{number}", group["template"])
        await self._say(job, jobDeploymentStatus="Initializing", rayClusterName=metadata["name"])

    async def _pod(self, cluster: Manifest, name: str, template: Manifest) -> None:
        metadata = {
            "name": f"{cluster['metadata']['name']}-{name}",
            "namespace": self.world.namespace,
            "labels": {**template["metadata"]["labels"], "ray.io/cluster": cluster["metadata"]["name"]},
            "ownerReferences": [_owner(cluster)],
        }
        await self.world.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})

    async def _go_on(self, job: Manifest, state: str, cluster: Manifest) -> None:
        if state in ("", "Initializing"):
            pods = [pod for pod in self.world.objects("Pod") if _owned(pod, cluster)]
            up = len(pods) > 1 and all(pod.get("status", {}).get("phase") == "Running" for pod in pods)
            if up and self.world.once(job, "running"):
                conditions = [
                    {"type": "HeadPodReady", "status": "True", "reason": "HeadPodRunningAndReady"},
                    {"type": "RayClusterProvisioned", "status": "True", "reason": "AllPodRunningAndReadyFirstTime"},
                ]
                full = [entry | {"lastTransitionTime": now(), "message": ""} for entry in conditions]
                await self.world.api.patch(cluster, {"status": {"state": "ready", "conditions": full}}, "status")
                await self._say(job, jobDeploymentStatus="Running", jobStatus="RUNNING", startTime=now())
        elif state == "Running" and (final := self._final(job)) and self.world.once(job, "ended"):
            words: Manifest = {
                "jobStatus": "SUCCEEDED",
                "jobDeploymentStatus": "Complete",
                "message": "Job finished successfully.",
            }
            if final["outcome"] != "Succeeded":
                words = SILENT_ENDS["exit 75 without a document"]
            await self._say(job, endTime=now(), **words)

    async def _say(self, job: Manifest, **words: str) -> None:
        await self.world.api.patch(job, {"status": words}, "status")

    # --- trainer -----------------------------------------------------------------------------------------------------

    async def trainer(self) -> None:
        """One look of every trainer that runs."""
        for job in self.world.objects("RayJob"):
            running = job.get("status", {}).get("jobDeploymentStatus") == "Running"
            progress = self._progress(job)
            if running and not job["metadata"].get("deletionTimestamp") and progress and not self._final(job):
                await self._train(job, progress)

    async def _train(self, job: Manifest, progress: Manifest) -> None:
        uid, attempt = job["metadata"]["uid"], int(job["metadata"]["labels"]["opd.dev/attempt"])
        step = self._steps.setdefault(uid, 0)
        plan = self._plan(job)
        head = [pod for pod in self._student_pods(job, "head") if not pod["metadata"].get("deletionTimestamp")]
        if not head:
            return
        asked = (progress["metadata"].get("annotations") or {}).get("opd.dev/stop")
        if asked == str(attempt):
            if self.world.age(job, "stop") >= self.world.life.saves_in and self.world.once(job, "final"):
                await self._finish(progress, attempt, step, "Preempted")
            return
        if time.monotonic() - self._beat.get(uid, 0.0) < self.world.life.step_seconds:
            return
        self._beat[uid] = time.monotonic()
        if plan.fault and plan.fault not in BEFORE_TRAINING and step >= min(plan.at_step, self.world.life.steps - 1):
            await self._fault(job, progress, plan.fault, attempt, step)
        elif step >= self.world.life.steps:
            if self.world.once(job, "final"):
                await self._finish(progress, attempt, step, "Succeeded")
        else:
            away = self._unavailable()
            self._steps[uid] = step if away else step + 1
            exporting = self._steps[uid] == self.world.life.steps
            await self._report(progress, attempt, self._steps[uid], away=away, exporting=exporting)

    async def _fault(self, job: Manifest, progress: Manifest, fault: str, attempt: int, step: int) -> None:
        if fault == "stall":
            await self._report(progress, attempt, step, stalled=True)
        elif fault == "silence":
            return
        elif fault in TOLD_ENDS and self._first(job, "fault"):
            await self._finish(progress, attempt, step, "Failed", TOLD_ENDS[fault])
        elif fault in SILENT_ENDS and self._first(job, "fault"):
            await self._say(job, endTime=now(), **SILENT_ENDS[fault])
        elif fault == "ray job deleted" and self._first(job, "fault"):
            await self.world.remove([job])
        elif fault in ("head lost", "node lost") and self._first(job, "fault"):
            await self.world.remove(self._student_pods(job, "head"))
        elif fault == "worker lost" and self._first(job, "fault"):
            for pod in self._student_pods(job, "worker")[:1]:
                await self.world.end(pod, 137)

    async def _report(
        self,
        progress: Manifest,
        attempt: int,
        step: int,
        *,
        away: str = "",
        stalled: bool = False,
        exporting: bool = False,
    ) -> None:
        self._sequence += 1
        phase = "TeacherUnavailable" if away else "Exporting" if exporting else "Training"
        document: Manifest = {
            "attempt": attempt,
            "sequence": self._sequence,
            "phase": phase,
            "step": step,
            "totalSteps": self.world.life.steps,
            "activity": 1 if stalled else self._sequence,
            "metrics": {"opd_reverse_kl": round(3.0 / (step + 1), 4)},
        }
        if away:
            document["unavailableTeacher"] = away
        if step:
            document["lastCheckpoint"] = _checkpoint(step, attempt)
        await self.world.api.patch(progress, {"data": {PROGRESS_KEY: json.dumps(document)}})

    async def _finish(self, progress: Manifest, attempt: int, step: int, outcome: str, failure: str = "") -> None:
        document: Manifest = {"attempt": attempt, "outcome": outcome, "step": step, "message": outcome}
        if step:
            document["checkpoint"] = _checkpoint(step, attempt)
        if failure:
            document["failureClass"] = failure
        if outcome == "Succeeded":
            document["result"] = {"checkpoint": _checkpoint(step, attempt)["path"], "exportedModel": "/data/export"}
        await self.world.api.patch(progress, {"data": {FINAL_KEY: json.dumps(document)}})

    def _unavailable(self) -> str:
        """A teacher without a replica that answers."""
        for teacher in self.world.life.teachers:
            pods = [
                pod
                for pod in self.world.objects("Pod")
                if pod["metadata"]["labels"].get("opd.dev/teacher") == teacher.name and _is_ready(pod)
            ]
            if not pods:
                return teacher.name
        return ""

    def _student_pods(self, job: Manifest, role: str) -> list[Manifest]:
        attempt = job["metadata"]["labels"]["opd.dev/attempt"]
        return [
            pod
            for pod in self.world.objects("Pod")
            if pod["metadata"]["labels"].get("opd.dev/attempt") == attempt
            and pod["metadata"]["labels"]["opd.dev/role"] == role
            and pod.get("status", {}).get("phase") == "Running"
        ]

    def _progress(self, job: Manifest) -> Manifest | None:
        owner = job["metadata"]["ownerReferences"][0]["uid"]
        for found in self.world.objects("ConfigMap"):
            mine = any(item["uid"] == owner for item in found["metadata"].get("ownerReferences") or ())
            if mine and found["metadata"]["name"] == f"{self.world.life.name}-progress":
                return found
        return None

    def _final(self, job: Manifest) -> Manifest | None:
        """The final document of the RayJob's attempt."""
        text = ((self._progress(job) or {}).get("data") or {}).get(FINAL_KEY)
        document: Manifest | None = json.loads(text) if text else None
        same = document is not None and str(document["attempt"]) == job["metadata"]["labels"]["opd.dev/attempt"]
        return document if same else None


def now() -> str:
    """Now, as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _checkpoint(step: int, attempt: int) -> Manifest:
    return {"step": step, "path": f"/data/opd/checkpoints/step-{step}.a{attempt}"}


def _is_ready(pod: Manifest) -> bool:
    conditions = pod.get("status", {}).get("conditions") or []
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)


def _owned(found: Manifest, owner: Manifest) -> bool:
    references = found["metadata"].get("ownerReferences") or ()
    return any(reference["uid"] == owner["metadata"]["uid"] for reference in references)


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
