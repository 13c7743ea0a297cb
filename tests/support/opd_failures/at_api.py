"""The failures of the table where the API server, its controllers, RBAC and the operator's process are real.

Kubelet, KubeRay and trainer are played (operator_player): a failure is what one of them would write.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from operator_jobs import Job
from operator_player import Script, now

from opd_api.progress import FINAL_KEY
from opd_failures import FAILURES, faults
from opd_failures.row import Failure, Step, Then

Manifest = dict[str, Any]
Act = Callable[[Job, Script], Awaitable[None]]
#: The test that brings all of them about; its parameter is the group.
AT_API_TEST = "tests/integration/operator/test_failures.py::test_failures_are_told_answered_and_cleaned_up"
#: Long enough for a busy machine to bring a job to its failure, short enough to wait for.
PATIENCE = 40
SHORT_START = {"preRunningDeadlineSeconds": PATIENCE}
SHORT_TEACHER = {"teacherReadyDeadlineSeconds": PATIENCE}


@dataclass(frozen=True)
class Played:
    """How a failure is brought about."""

    script: dict[str, Any] = field(default_factory=dict)
    lifecycle: dict[str, Any] = field(default_factory=dict)
    #: Done once the job stands at the failure's step.
    act: Act | None = None


def _document(failure: Failure) -> Manifest:
    words = {"failureClass": failure.failure_class, "reason": failure.reason, "message": "it broke; the remedy"}
    return {"outcome": "Failed", **words}


# --- what the trainer leaves ---


def _leaves(document: Manifest) -> Act:
    async def act(job: Job, script: Script) -> None:
        progress = await job.api.get("v1", "ConfigMap", job.namespace, f"{job.name}-progress")
        assert progress is not None
        final = {"attempt": 1, "step": 1, "message": "", **document}
        await job.api.patch(progress, {"data": {FINAL_KEY: json.dumps(final)}})

    return act


async def _falls_silent(job: Job, script: Script) -> None:
    script.mute = True


async def _does_nothing(job: Job, script: Script) -> None:
    script.idle = True


# --- what KubeRay writes ---


def _ray(**status: str) -> Act:
    async def act(job: Job, script: Script) -> None:
        (ray_job,) = await job.children("ray.io/v1", "RayJob")
        await job.api.patch(ray_job, {"status": status}, "status")

    return act


def _ray_failed(reason: str, message: str = "") -> Act:
    return _ray(jobDeploymentStatus="Failed", jobStatus="FAILED", reason=reason, message=message)


def _exit(code: int) -> Act:
    return _ray_failed("AppFailed", f"Job entrypoint command failed with exit code {code}")


def _both(*acts: Act) -> Act:
    async def act(job: Job, script: Script) -> None:
        for one in acts:
            await one(job, script)

    return act


async def _head_is_not_ready(job: Job, script: Script) -> None:
    (cluster,) = await job.children("ray.io/v1", "RayCluster")
    condition = {"type": "HeadPodReady", "status": "False", "reason": "ContainersNotReady", "message": ""}
    stamped = condition | {"lastTransitionTime": cluster["metadata"]["creationTimestamp"]}
    await job.api.patch(cluster, {"status": {"conditions": [stamped]}}, "status")


# --- what happens to pods and objects ---


async def _pod(job: Job, role: str) -> Manifest:
    found = [pod for pod in await job.children("v1", "Pod") if pod["metadata"]["labels"]["opd.dev/role"] == role]
    return found[0]


def _fails(role: str, reason: str = "", phase: str = "Failed", container: Manifest | None = None) -> Act:
    async def act(job: Job, script: Script) -> None:
        pod = await _pod(job, role)
        script.hands_off.add(pod["metadata"]["name"])
        status: Manifest = {"phase": phase, "conditions": [{"type": "Ready", "status": "False"}]}
        if reason:
            status["reason"] = reason
        if container:
            ended = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:01Z", **container}
            known = pod["status"]["containerStatuses"][0]
            status["containerStatuses"] = [known | {"ready": False, "state": {"terminated": ended}}]
        await job.api.patch(pod, {"status": status}, "status")

    return act


def _goes(role: str, reason: str = "") -> Act:
    """Terminating for longer than the grace: nobody ends it."""

    async def act(job: Job, script: Script) -> None:
        pod = await _pod(job, role)
        script.hands_off.add(pod["metadata"]["name"])
        if reason:
            # With its time: the disruption controller takes back one that is older than two minutes.
            told = {"reason": reason, "message": "told by the cluster", "lastTransitionTime": now()}
            conditions = [*pod["status"]["conditions"], {"type": "DisruptionTarget", "status": "True", **told}]
            await job.api.patch(pod, {"status": {"conditions": conditions}}, "status")
        await job.api.delete(pod)

    return act


async def _head_vanishes(job: Job, script: Script) -> None:
    await job.api.delete(await _pod(job, "head"), grace_seconds=0)


async def _ray_job_is_deleted(job: Job, script: Script) -> None:
    (ray_job,) = await job.children("ray.io/v1", "RayJob")
    await job.api.delete(ray_job)


async def _time_is_up(job: Job, script: Script) -> None:
    await job.patch({"lifecycle": {"activeDeadlineSeconds": 1}})


def _waits(role: str, word: str, said: str = "", restarts: int = 0, last: Manifest | None = None) -> Manifest:
    """Script: the pods of a role stay in this state."""
    (container,) = faults.waiting(word, said, restarts, last)["containerStatuses"]
    known = {key: container[key] for key in ("state", "restartCount", "lastState")}
    return {"statuses": {role: {"phase": "Pending", "containerStatuses": [known]}}}


def _ends(role: str, phase: str = "Failed", **terminated: Any) -> Manifest:
    return {"statuses": {role: {"phase": phase, "containerStatuses": [{"state": {"terminated": terminated}}]}}}


def _by_document(step: Step, ids: Iterable[str]) -> dict[str, Played]:
    """Failures that check, probe or trainer tell of in their own document."""
    rows = [failure for failure in FAILURES if failure.id in set(ids)]
    if step is Step.TRAINING:
        return {row.id: Played(act=_leaves(_document(row))) for row in rows}
    return {row.id: Played(script={"check" if step is Step.CHECK else "probe": _document(row)}) for row in rows}


def _documented(step: Step) -> list[str]:
    """Rows whose words are the document's."""
    told = (Then.NOT_COUNTED, Then.HOLDS)
    return [row.id for row in FAILURES if row.step is step and row.no_hint and row.then not in told and not row.job]


AT_API: dict[str, Played] = {
    **_by_document(Step.CHECK, _documented(Step.CHECK)),
    "check-evicted": Played({"statuses": {"check": {"phase": "Failed", "reason": "Evicted"}}}),
    "check-oom": Played(_ends("check", **faults.OOM)),
    "check-crashes": Played(_ends("check", exitCode=1, message="ImportError: no module named opd_trainer")),
    "check-mute": Played(_ends("check", "Succeeded", exitCode=0)),
    "check-no-node": Played({"no_room": {"check": "0/1 nodes are available: 1 Insufficient cpu."}}, SHORT_START),
    "claim-missing": Played({"no_room": {"check": 'persistentvolumeclaim "data" not found'}}, SHORT_START),
    "check-image-missing": Played(_waits("check", "ErrImagePull", "manifest unknown"), SHORT_START),
    "check-too-long": Played({"hold_steps_of": "check"}, SHORT_START),
    "teacher-no-node": Played({"no_room": {"teacher": faults.NO_GPU}}, SHORT_TEACHER),
    "teacher-image-slow": Played(_waits("teacher", "ImagePullBackOff", "429 Too Many Requests"), SHORT_TEACHER),
    "teacher-image-missing": Played(_waits("teacher", "ImagePullBackOff", "x: not found"), SHORT_TEACHER),
    "teacher-secret-missing": Played(
        _waits("teacher", "CreateContainerConfigError", 'secret "nope" not found'), SHORT_TEACHER
    ),
    "teacher-config-map-missing": Played(
        _waits("teacher", "CreateContainerConfigError", 'configmap "nope" not found'), SHORT_TEACHER
    ),
    "teacher-crashes": Played(_waits("teacher", "CrashLoopBackOff", "", 5, {"exitCode": 1, "message": "bad argument"})),
    "teacher-oom": Played(_waits("teacher", "CrashLoopBackOff", "", 5, faults.OOM)),
    "teacher-may-not-write": Played(
        _waits("teacher", "CrashLoopBackOff", "", 5, {"exitCode": 1, "message": "Permission denied: '/data/hf'"})
    ),
    "teacher-late": Played({"teachers_ready": False}, SHORT_TEACHER),
    **_by_document(Step.PROBE, _documented(Step.PROBE)),
    "probe-crashes": Played(_ends("probe", exitCode=1, message="Traceback")),
    "probe-too-long": Played({"hold_steps_of": "probe"}, SHORT_TEACHER),
    "student-no-node": Played({"no_room": {"worker": faults.NO_GPU}}, {"teacherIdleTimeoutSeconds": 3}),
    "student-image-missing": Played(_waits("head", "ErrImagePull", "manifest unknown"), SHORT_START),
    "ray-job-refused": Played(
        {"kuberay": False}, act=_ray(jobDeploymentStatus="ValidationFailed", message="no containers")
    ),
    "student-queued": Played(
        {"kuberay": False}, {"teacherIdleTimeoutSeconds": 3}, act=_ray(jobDeploymentStatus="Suspended", jobStatus="")
    ),
    "student-never-runs": Played({"kuberay": False}, SHORT_START),
    "no-first-heartbeat": Played({"mute": True}, {"heartbeatTimeoutSeconds": 4}),
    "head-gone": Played(act=_head_vanishes),
    "head-ended": Played(act=_fails("head", phase="Succeeded")),
    "worker-ended": Played(act=_fails("worker", phase="Succeeded")),
    "head-oom": Played(act=_fails("head", container=faults.OOM)),
    "worker-oom": Played(act=_fails("worker", container=faults.OOM)),
    "head-evicted": Played(act=_fails("head", "Evicted")),
    "head-node-lost": Played(act=_fails("head", "NodeLost")),
    "head-node-tainted": Played(act=_goes("head", "DeletionByTaintManager")),
    "head-not-admitted": Played(act=_fails("head", "UnexpectedAdmissionError")),
    "head-no-device": Played(act=_fails("head", "OutOfnvidia.com/gpu")),
    "head-deleted": Played(act=_goes("head")),
    "worker-deleted": Played(act=_goes("worker")),
    "drained": Played(act=_goes("worker", "EvictionByEvictionAPI")),
    "scheduler-preempts": Played(act=_goes("worker", "PreemptionByScheduler")),
    "head-not-ready": Played(act=_head_is_not_ready),
    "heartbeats-stop": Played(lifecycle={"heartbeatTimeoutSeconds": 10}, act=_falls_silent),
    "ray-job-deleted": Played(act=_ray_job_is_deleted),
    "preempted": Played(act=_leaves({"outcome": "Preempted", "message": "saved"})),
    "too-long": Played(act=_time_is_up),
    "ray-head-not-found": Played(act=_ray_failed("AppFailed", "Ray head pod not found.")),
    "ray-job-not-found": Played(act=_ray_failed("AppFailed", "Ray job not found in RayCluster.")),
    "dashboard-silent": Played(act=_ray_failed("JobStatusCheckTimeoutExceeded")),
    "submission-failed": Played(act=_ray_failed("SubmissionFailed")),
    "ray-failed-running": Played(
        act=_ray(jobDeploymentStatus="Failed", jobStatus="RUNNING", reason="SubmissionFailed", message="")
    ),
    "ray-never-ends": Played(
        lifecycle={"heartbeatTimeoutSeconds": 30}, act=_both(_falls_silent, _ray(jobStatus="FAILED"))
    ),
    "ray-stopped": Played(act=_ray(jobDeploymentStatus="Complete", jobStatus="STOPPED")),
    "exit-75": Played(act=_exit(75)),
    "killed": Played(act=_exit(-9)),
    "exit-64": Played(act=_exit(64)),
    "exit-65": Played(act=_exit(65)),
    "exit-69": Played(act=_exit(69)),
    "exit-70": Played(act=_exit(70)),
    "exit-1": Played(act=_exit(1)),
    "success-mute": Played(act=_ray(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")),
    "success-empty": Played(act=_leaves({"outcome": "Succeeded"})),
    **_by_document(Step.TRAINING, _documented(Step.TRAINING)),
    "stall-seen": Played(lifecycle={"stallTimeoutSeconds": 8}, act=_does_nothing),
}
