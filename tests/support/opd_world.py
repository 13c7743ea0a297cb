"""A cluster in memory for the operator's pure half: plans are executed on a dictionary, controllers are played by methods.

Nothing here decides anything: it does what an API server, the built-in controllers and KubeRay would do, when a test says so.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from opd_api.progress import FINAL_KEY, PROGRESS_KEY
from opd_operator.model import Kind, Manifest, Memory, ObjectRef, Snapshot, WriteProblem, WriteProblemKind
from opd_operator.observe import observe
from opd_operator.plan import plan
from opd_operator.planned import Plan
from opd_operator.settings import Settings

START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
UID = "0123abcd-0000-0000-0000-000000000000"
SNAPSHOT_FIELDS = {
    Kind.DEPLOYMENT: "deployments",
    Kind.SERVICE: "services",
    Kind.JOB: "jobs",
    Kind.POD: "pods",
    Kind.RAY_JOB: "ray_jobs",
    Kind.RAY_CLUSTER: "ray_clusters",
    Kind.CONFIG_MAP: "config_maps",
    Kind.NETWORK_POLICY: "network_policies",
}
#: Kinds that the operator creates but does not watch.
UNWATCHED = frozenset({"Secret", "ServiceAccount", "Role", "RoleBinding"})


def job_document(**sections: Any) -> Manifest:
    """A small valid OPDJob; keyword sections (camelCase fields) are merged over its spec."""
    spec: dict[str, Any] = {
        "student": {"model": {"source": "/data/student"}},
        "teachers": [{"name": "big", "model": {"source": "/data/teacher"}}],
        "data": {"source": "/data/prompts.jsonl"},
        "rollout": {"maxStaleness": 1},
        "training": {"steps": 10, "gpus": 1},
        "storage": {"claimName": "opd"},
    }
    for name, value in sections.items():
        spec[name] = {**spec[name], **value} if isinstance(value, dict) and isinstance(spec.get(name), dict) else value
    return {
        "apiVersion": "opd.dev/v1alpha1",
        "kind": "OPDJob",
        "metadata": {
            "name": "math",
            "namespace": "team",
            "uid": UID,
            "generation": 1,
            "creationTimestamp": "2026-03-01T11:59:59Z",
        },
        "spec": spec,
    }


def final(outcome: str = "Succeeded", attempt: int = 1, **more: Any) -> str:
    """A final document as JSON."""
    document: dict[str, Any] = {"attempt": attempt, "outcome": outcome, "message": "", "step": 10, **more}
    if outcome == "Succeeded" and "checkpoint" not in more:
        document["checkpoint"] = {"step": 10, "path": f"checkpoints/step-10.a{attempt}"}
    return json.dumps(document)


class KilledError(Exception):
    """The operator's process dies at a write."""


class World:
    """See the module."""

    def __init__(
        self, document: Manifest | None = None, settings: Settings | None = None, *, ignore_rules: bool = False
    ) -> None:
        self.job = document or job_document()
        self.ignore_rules = ignore_rules
        self.settings = settings or Settings()
        self.now = START
        self.memory = Memory()
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.events: list[Manifest] = []
        self.said: list[tuple[str, str]] = []
        self.plans: list[Plan] = []
        self.stops: list[int] = []
        self.refuse: dict[str, tuple[WriteProblemKind, str]] = {}
        self.created: list[str] = []
        self.writes = 0
        #: The operator dies just before its write of this number.
        self.kill_at: int | None = None
        self.kills = 0
        self.deleted = False
        self.phases: list[str] = []
        self._uids = 0

    # --- passes ---

    def step(self) -> Plan:
        """One pass: observe, plan, execute."""
        observation = observe(self.snapshot(), self.now, self.memory)
        if self.ignore_rules:
            observation = replace(observation, job=replace(observation.job, findings=()))
        made = plan(observation, self.now, self.settings)
        try:
            self.memory = observation.memory.with_problems(self._execute(made))
        except KilledError:
            self.restart_operator()
        self.plans.append(made)
        if made.status is not None and (not self.phases or self.phases[-1] != made.status["phase"]):
            self.phases.append(made.status["phase"])
        return made

    def settle(self) -> World:
        """Passes until nothing is left to do now."""
        for _ in range(20):
            before = self.memory.problems
            made = self.step()
            idle = not (made.delete or made.create or made.apply or made.annotate or made.status)
            if self.deleted or idle or (self.memory.problems and self.memory.problems == before and not made.status):
                return self
        last = self.plans[-1]
        writes = [item["metadata"]["name"] for item in (*last.create, *last.apply)] + [
            item.ref.name for item in last.delete
        ]
        raise AssertionError(f"the plan never comes to rest: {writes}, problems {self.memory.problems}, {last.status}")

    def after(self, seconds: float) -> World:
        """Let time pass, then settle."""
        self.now += timedelta(seconds=seconds)
        return self.settle()

    def snapshot(self) -> Snapshot:
        """What the cache would hold. No copies: the pure half changes nothing, which a test of its own proves."""
        found: dict[str, list[Manifest]] = {field: [] for field in SNAPSHOT_FIELDS.values()}
        for (kind, _), item in sorted(self.objects.items()):
            if kind not in UNWATCHED:
                found[SNAPSHOT_FIELDS[Kind(kind)]].append(item)
        return Snapshot(
            job=self.job,
            events=tuple(self.events),
            **{field: tuple(items) for field, items in found.items()},  # type: ignore[arg-type]
        )

    def edit(self, **sections: Any) -> World:
        """A user changes the spec."""
        for name, value in sections.items():
            old = self.job["spec"].get(name)
            self.job["spec"][name] = {**old, **value} if isinstance(value, dict) and isinstance(old, dict) else value
        self.job["metadata"]["generation"] += 1
        return self

    def restart_operator(self) -> World:
        """A new process remembers nothing."""
        self.memory = Memory()
        return self

    # --- what is there ---

    @property
    def status(self) -> Manifest:
        """Status of the OPDJob."""
        status: Manifest = self.job.get("status", {})
        return status

    @property
    def phase(self) -> str:
        """Phase of the OPDJob."""
        return str(self.status.get("phase"))

    def condition(self, kind: str) -> Manifest:
        """A condition by type."""
        return next(item for item in self.status["conditions"] if item["type"] == kind)

    def attempt(self, number: int) -> Manifest:
        """The record of an attempt."""
        return next(item for item in self.status["attempts"] if item["number"] == number)

    def names(self, kind: str) -> list[str]:
        """Names of the objects of a kind that are not being deleted."""
        return sorted(
            name
            for (found, name), item in self.objects.items()
            if found == kind and not item["metadata"].get("deletionTimestamp")
        )

    def get(self, kind: str, name: str) -> Manifest:
        """An object."""
        return self.objects[kind, name]

    def reasons(self) -> list[str]:
        """Reasons of the events so far."""
        return [reason for reason, _ in self.said]

    def accelerator_pods(self) -> list[str]:
        """Pods of teachers and students that exist."""
        return [
            name
            for (kind, name), item in self.objects.items()
            if kind == "Pod" and item["metadata"]["labels"].get("opd.dev/role") in ("teacher", "head", "worker")
        ]

    # --- controllers ---

    def pod(
        self, name: str, owner: Manifest, labels: dict[str, str], *, phase: str = "Running", **status: Any
    ) -> Manifest:
        """A pod on a node, ready when it runs; a Deployment's has the annotations of its template."""
        template = owner.get("spec", {}).get("template", {}) if owner["kind"] == "Deployment" else {}
        ready = phase == "Running"
        conditions = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": self._stamp()}]
        conditions.append({"type": "Ready", "status": "True" if ready else "False"})
        item: Manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": "team",
                "uid": self._uid(),
                "labels": labels,
                "annotations": dict(template.get("metadata", {}).get("annotations", {})),
                "creationTimestamp": self._stamp(),
                "ownerReferences": [{"uid": owner["metadata"]["uid"], "kind": owner["kind"], "controller": True}],
            },
            "spec": {
                "nodeName": "node-1",
                "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
            },
            "status": {"phase": phase, "conditions": conditions, **status},
        }
        self.objects["Pod", name] = item
        return item

    def unscheduled(self, pod: Manifest, message: str) -> None:
        """The scheduler finds no node for a pod."""
        pod["spec"].pop("nodeName", None)
        pod["status"] = {
            "phase": "Pending",
            "conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message},
                {"type": "Ready", "status": "False"},
            ],
        }

    def end_job(self, role: str, document: str | None, *, ok: bool = True, **container: Any) -> None:
        """The Job of a role ends, with a termination message."""
        job = next(
            item
            for (kind, _), item in self.objects.items()
            if kind == "Job" and item["metadata"]["labels"]["opd.dev/role"] == role and "status" not in item
        )
        ended = {"exitCode": 0 if ok else 70, "message": document or "", **container}
        self.pod(
            f"{job['metadata']['name']}-x",
            job,
            {
                **job["spec"]["template"]["metadata"]["labels"],
                "batch.kubernetes.io/controller-uid": job["metadata"]["uid"],
            },
            phase="Succeeded" if ok else "Failed",
            containerStatuses=[{"name": role, "state": {"terminated": ended}}],
        )
        job["status"] = {"conditions": [{"type": "Complete" if ok else "Failed", "status": "True"}]}

    def teacher_up(self, name: str = "big", pods: int = 1) -> None:
        """Every replica of a teacher becomes ready (new pods)."""
        item = self.objects["Deployment", f"math-teacher-{name}"]
        self.remove_pods(f"{item['metadata']['name']}-")
        generation = item["metadata"].get("generation", 1)
        for index in range(pods):
            self.pod(
                f"{item['metadata']['name']}-{self._uids}-{index}", item, item["spec"]["template"]["metadata"]["labels"]
            )
        item["status"] = {
            "observedGeneration": generation,
            "replicas": pods,
            "updatedReplicas": pods,
            "readyReplicas": pods,
        }

    def teacher_down(self, name: str = "big") -> None:
        """All pods of a teacher vanish."""
        item = self.objects["Deployment", f"math-teacher-{name}"]
        self.remove_pods(f"{item['metadata']['name']}-")
        item["status"] = {"observedGeneration": item["metadata"].get("generation", 1), "replicas": 0}

    def ray_starts(
        self, attempt: int = 1, *, deployment_status: str = "Initializing", head: str = "Running"
    ) -> Manifest:
        """KubeRay makes a RayCluster with a head and a worker."""
        job = self.objects["RayJob", f"math-{attempt}"]
        cluster: Manifest = {
            "apiVersion": "ray.io/v1",
            "kind": "RayCluster",
            "metadata": {
                "name": f"math-{attempt}-abcde",
                "namespace": "team",
                "uid": self._uid(),
                "labels": job["metadata"]["labels"],
                "ownerReferences": [{"uid": job["metadata"]["uid"], "kind": "RayJob", "controller": True}],
                "creationTimestamp": self._stamp(),
            },
            "status": {},
        }
        self.objects["RayCluster", cluster["metadata"]["name"]] = cluster
        templates = job["spec"]["rayClusterSpec"]
        self.pod(
            f"math-{attempt}-head", cluster, templates["headGroupSpec"]["template"]["metadata"]["labels"], phase=head
        )
        self.pod(f"math-{attempt}-worker", cluster, templates["workerGroupSpecs"][0]["template"]["metadata"]["labels"])
        job["status"] = {"jobDeploymentStatus": deployment_status, "jobStatus": ""}
        return cluster

    def ray_runs(self, attempt: int = 1) -> None:
        """The Ray cluster is ready and the entrypoint runs."""
        if ("RayCluster", f"math-{attempt}-abcde") not in self.objects:
            self.ray_starts(attempt)
        self.objects["RayCluster", f"math-{attempt}-abcde"]["status"] = {"state": "ready", "head": {"podName": "head"}}
        self.ray(attempt, jobDeploymentStatus="Running", jobStatus="RUNNING")

    def ray(self, attempt: int = 1, **status: str) -> None:
        """KubeRay writes the RayJob's status."""
        self.objects["RayJob", f"math-{attempt}"]["status"] = status

    def heartbeat(self, step: int = 1, *, attempt: int = 1, phase: str = "Training", **more: Any) -> None:
        """The trainer reports; sequence and activity grow unless given."""
        data = self.objects["ConfigMap", "math-progress"].setdefault("data", {})
        before = json.loads(data.get(PROGRESS_KEY, "{}"))
        fresh = before.get("attempt") != attempt
        document = {
            "attempt": attempt,
            "sequence": 1 if fresh else before["sequence"] + 1,
            "activity": 1 if fresh else before["activity"] + 1,
            "phase": phase,
            "step": step,
            "totalSteps": 10,
            **more,
        }
        data[PROGRESS_KEY] = json.dumps(document)

    def final(self, outcome: str = "Succeeded", attempt: int = 1, **more: Any) -> None:
        """The trainer leaves its final document."""
        self.objects["ConfigMap", "math-progress"].setdefault("data", {})[FINAL_KEY] = final(outcome, attempt, **more)

    def remove_pods(self, prefix: str) -> None:
        """Pods vanish."""
        for key in [key for key in self.objects if key[0] == "Pod" and key[1].startswith(prefix)]:
            del self.objects[key]

    def terminate(self, pod: str, **condition: str) -> Manifest:
        """A pod gets a deletionTimestamp, and a DisruptionTarget condition when one is given."""
        item = self.objects["Pod", pod]
        item["metadata"]["deletionTimestamp"] = self._stamp()
        if condition:
            item["status"]["conditions"].append({"type": "DisruptionTarget", "status": "True", **condition})
        return item

    # --- the way to a point ---

    def checked(self) -> World:
        """Go on until the input check has passed."""
        self.settle()
        self.end_job("check", final())
        return self.settle()

    def ready(self) -> World:
        """Go on until the teachers are ready."""
        self.checked()
        for name in [item["name"] for item in self.job["spec"]["teachers"]]:
            if ("Deployment", f"math-teacher-{name}") in self.objects:
                self.teacher_up(name)
        return self.settle()

    def probed(self) -> World:
        """Go on until the RayJob exists."""
        self.ready()
        self.end_job("probe", final())
        return self.settle()

    def training(self, step: int = 1) -> World:
        """Go on until the trainer reports."""
        self.probed()
        self.ray_runs()
        self.settle()
        self.heartbeat(step)
        return self.settle()

    # --- the API server ---

    def _write(self) -> None:
        """Count a write; die instead of it when told so."""
        self.writes += 1
        if self.writes == self.kill_at:
            self.kill_at = None
            self.kills += 1
            raise KilledError

    def _execute(self, made: Plan) -> tuple[WriteProblem, ...]:
        problems: list[WriteProblem] = []
        for deletion in made.delete:
            self._delete(deletion.ref, deletion.uid)
        for request in made.secrets:
            self._post(request.manifest, problems)
        for manifest in made.create:
            self._post(manifest, problems)
        for manifest in made.apply:
            self._put(manifest, problems)
        for stop in made.annotate:
            self._write()
            item = self.objects["ConfigMap", stop.config_map.name]
            item["metadata"].setdefault("annotations", {})["opd.dev/stop"] = str(stop.attempt)
            self.stops.append(stop.attempt)
        if made.status is not None:
            self._write()
            self.job["status"] = json.loads(json.dumps(made.status))
        for _ in made.events:
            self._write()
        self.said += [(event.reason, event.message) for event in made.events]
        return tuple(problems)

    def _refused(self, manifest: Manifest, problems: list[WriteProblem]) -> bool:
        problem = self.refuse.get(manifest["kind"])
        if problem is None:
            return False
        problems.append(WriteProblem(ObjectRef.of(manifest), *problem))
        return True

    def _post(self, manifest: Manifest, problems: list[WriteProblem]) -> None:
        self._write()
        key = (manifest["kind"], manifest["metadata"]["name"])
        if self._refused(manifest, problems) or self._exists(manifest, problems):
            return
        item = copy.deepcopy(manifest)
        item["metadata"] |= {"uid": self._uid(), "creationTimestamp": self._stamp(), "generation": 1}
        self.objects[key] = item
        self.created.append("/".join(key))

    def _exists(self, manifest: Manifest, problems: list[WriteProblem]) -> bool:
        """AlreadyExists, and the GET that follows."""
        known = self.objects.get((manifest["kind"], manifest["metadata"]["name"]))
        if known is None:
            return False
        owners = known["metadata"].get("ownerReferences", [])
        if all(owner["uid"] != self.job["metadata"]["uid"] for owner in owners):
            going = bool(known["metadata"].get("deletionTimestamp"))
            kind = WriteProblemKind.BEING_DELETED if going else WriteProblemKind.COLLISION
            problems.append(WriteProblem(ObjectRef.of(manifest), kind))
        return True

    def _put(self, manifest: Manifest, problems: list[WriteProblem]) -> None:
        key = (manifest["kind"], manifest["metadata"]["name"])
        known = self.objects.get(key)
        if known is None:
            self._post(manifest, problems)
            return
        self._write()
        count = len(problems)
        if self._exists(manifest, problems) and len(problems) > count:
            return
        item = copy.deepcopy(manifest)
        changed = item.get("spec") != known.get("spec")
        item["metadata"] = {**known["metadata"], **item["metadata"]}
        item["metadata"]["generation"] = known["metadata"]["generation"] + changed
        item["status"] = known.get("status", {})
        self.objects[key] = item

    def _delete(self, ref: ObjectRef, uid: str) -> None:
        self._write()
        if ref.kind == "OPDJob":
            self.deleted = True
            return
        item = self.objects.get((ref.kind, ref.name))
        if item is None or item["metadata"]["uid"] != uid:
            return
        del self.objects[ref.kind, ref.name]
        self._collect(uid)

    def _collect(self, owner: str) -> None:
        """Garbage collection of what an object owned."""
        for key, item in list(self.objects.items()):
            references = item["metadata"].get("ownerReferences", ())
            if any(reference["uid"] == owner for reference in references):
                self.objects.pop(key, None)
                self._collect(item["metadata"]["uid"])

    def _uid(self) -> str:
        self._uids += 1
        return f"uid-{self._uids:04d}"

    def _stamp(self) -> str:
        return self.now.strftime("%Y-%m-%dT%H:%M:%SZ")
