"""The controllers of the world in memory (see opd_world): kubelet, scheduler, Deployments, Jobs, KubeRay and the trainer."""

from __future__ import annotations

import json
from typing import Any

from opd_world_api import ApiServer

from opd_api.progress import FINAL_KEY, PROGRESS_KEY
from opd_operator.model import Manifest


def final(outcome: str = "Succeeded", attempt: int = 1, **more: Any) -> str:
    """A final document as JSON."""
    document: dict[str, Any] = {"attempt": attempt, "outcome": outcome, "message": "", "step": 10, **more}
    if outcome == "Succeeded" and "checkpoint" not in more:
        document["checkpoint"] = {"step": 10, "path": f"checkpoints/step-10.a{attempt}"}
    return json.dumps(document)


class Controllers(ApiServer):
    """Does what they would do, when a test says so."""

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
