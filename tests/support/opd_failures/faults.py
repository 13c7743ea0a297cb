"""Faults that are done to the world in memory (opd_world): what the trainer, KubeRay, the kubelet or the clock does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opd_world import World, final

from opd_operator.model import Manifest, WriteProblemKind

Fault = Callable[[World], None]

OOM: dict[str, Any] = {"exitCode": 137, "reason": "OOMKilled"}
NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available."
OVER_QUOTA = 'pods "x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: 8, limited: 8'
#: Longer than a pod's grace and shorter than every deadline.
SETTLED = 6


def waiting(word: str, said: str = "", restarts: int = 0, last: dict[str, Any] | None = None) -> dict[str, Any]:
    """Status of a pod whose container waits."""
    return {
        "containerStatuses": [
            {
                "name": "teacher",
                "image": "lmsysorg/sglang:v0",
                "restartCount": restarts,
                "state": {"waiting": {"reason": word, "message": said}},
                "lastState": {"terminated": last} if last else {},
            }
        ]
    }


# --- before anything runs ---


def refused(kind: str, problem: WriteProblemKind, message: str) -> Fault:
    """The API server does not take objects of a kind."""

    def fault(world: World) -> None:
        world.refuse[kind] = (problem, message)
        world.settle()

    return fault


def edited(problem: WriteProblemKind | None = None, **teacher: Any) -> Fault:
    """Somebody edits the teacher of the started job; `problem` is the API server's answer to its new Deployment."""

    def fault(world: World) -> None:
        if problem is not None:
            world.refuse["Deployment"] = (problem, "spec.template.spec.dnsPolicy: Unsupported value")
        world.edit(teachers=[{**world.job["spec"]["teachers"][0], **teacher}]).settle()

    return fault


def no_kuberay(world: World) -> None:
    world.kuberay_missing = True
    world.end_job("check", final())
    world.settle()


# --- check and probe Jobs ---


def step_says(role: str, failure_class: str, reason: str, **more: Any) -> Fault:
    """The check or probe ends with a document."""

    def fault(world: World) -> None:
        document = final(
            "Failed", failureClass=failure_class, reason=reason, message=f"{reason} and the remedy", **more
        )
        world.end_job(role, document, ok=False)
        world.settle()

    return fault


def step_ends(role: str, document: str | None, *, ok: bool = False, **container: Any) -> Fault:
    """The check or probe ends without a document that can be read."""

    def fault(world: World) -> None:
        world.end_job(role, document, ok=ok, **container)
        world.settle()

    return fault


def step_evicted(world: World) -> None:
    world.end_job("check", None, ok=False)
    world.objects["Pod", "math-check-inputs-x"]["status"] = {"phase": "Failed", "reason": "Evicted"}
    world.settle()


def _check_pod(world: World, **status: Any) -> Manifest:
    job = world.get("Job", "math-check-inputs")
    labels = {"opd.dev/role": "check", "batch.kubernetes.io/controller-uid": job["metadata"]["uid"]}
    return world.pod("math-check-inputs-x", job, labels, phase="Pending", **status)


def check_unscheduled(message: str) -> Fault:
    def fault(world: World) -> None:
        world.unscheduled(_check_pod(world), message)
        world.settle()

    return fault


def check_waits(reason: str, message: str) -> Fault:
    def fault(world: World) -> None:
        _check_pod(world, **waiting(reason, message))
        world.settle()

    return fault


def check_unmounted(message: str) -> Fault:
    def fault(world: World) -> None:
        pod = _check_pod(world, **waiting("ContainerCreating"))
        subject = {"uid": pod["metadata"]["uid"]}
        world.events.append({"involvedObject": subject, "reason": "FailedMount", "message": message})
        world.settle()

    return fault


def nothing_happens(world: World) -> None:
    world.settle()


# --- teachers ---


def teacher_pod(world: World, **status: Any) -> Manifest:
    """A pod of the teacher that is not ready."""
    item = world.get("Deployment", "math-teacher-big")
    generation = item["metadata"].get("generation", 1)
    item["status"] = {"observedGeneration": generation, "replicas": 1, "updatedReplicas": 1}
    return world.pod(
        "math-teacher-big-x", item, item["spec"]["template"]["metadata"]["labels"], phase="Pending", **status
    )


def teacher_waits(word: str, said: str = "", restarts: int = 0, last: dict[str, Any] | None = None) -> Fault:
    def fault(world: World) -> None:
        teacher_pod(world, **waiting(word, said, restarts, last))
        world.settle()

    return fault


def teacher_unscheduled(world: World) -> None:
    world.unscheduled(teacher_pod(world), NO_GPU)
    world.settle()


def teacher_over_quota(world: World) -> None:
    condition = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": OVER_QUOTA}
    world.get("Deployment", "math-teacher-big")["status"] = {"conditions": [condition]}
    world.settle()


def teacher_unmounted(message: str) -> Fault:
    def fault(world: World) -> None:
        pod = teacher_pod(world, **waiting("ContainerCreating"))
        subject = {"uid": pod["metadata"]["uid"]}
        world.events.append({"involvedObject": subject, "reason": "FailedMount", "message": message})
        world.settle()

    return fault


def teacher_slow(world: World) -> None:
    teacher_pod(world)
    world.settle()


# --- the student before it runs ---


def student_unscheduled(world: World) -> None:
    world.ray_starts(world.status["attempt"])
    world.unscheduled(world.objects["Pod", f"math-{world.status['attempt']}-worker"], NO_GPU)
    world.settle()


def student_over_quota(world: World) -> None:
    cluster = world.ray_starts(world.status["attempt"])
    world.remove_pods(f"math-{world.status['attempt']}-worker")
    cluster["status"]["conditions"] = [{"type": "ReplicaFailure", "status": "True", "message": OVER_QUOTA}]
    world.settle()


def student_queued(world: World) -> None:
    world.ray(world.status["attempt"], jobDeploymentStatus="Suspended", jobStatus="")
    world.settle()


def student_waits(reason: str, message: str) -> Fault:
    def fault(world: World) -> None:
        world.ray_starts(world.status["attempt"], head="Pending")
        world.objects["Pod", f"math-{world.status['attempt']}-head"]["status"] |= waiting(reason, message)
        world.settle()

    return fault


def ray_job_refused(world: World) -> None:
    attempt = world.status["attempt"]
    world.ray(attempt, jobDeploymentStatus="ValidationFailed", message="headGroupSpec has no containers")
    world.settle()


def silent_from_the_start(world: World) -> None:
    world.ray_runs(world.status["attempt"])
    world.settle()
    world.after(181)


# --- the student while it runs ---


def says(failure_class: str, **more: Any) -> Fault:
    """The trainer leaves a final document with a class, then the RayJob fails."""

    def fault(world: World) -> None:
        world.final("Failed", world.status["attempt"], failureClass=failure_class, message="it broke", **more)
        world.settle()

    return fault


def queue_evicts(world: World) -> None:
    """A queue suspends the RayJob: KubeRay removes the pods, and no document comes within the grace."""
    attempt = world.status["attempt"]
    world.ray(attempt, jobDeploymentStatus="Suspending", jobStatus="RUNNING")
    world.settle()
    going("head")(world)


def preempted(world: World) -> None:
    world.final("Preempted", world.status["attempt"], message="saved step 3")
    world.settle()


def kuberay(**status: str) -> Fault:
    """KubeRay reports an end without a document."""

    def fault(world: World) -> None:
        world.ray(world.status["attempt"], **status)
        world.settle()
        world.after(SETTLED)

    return fault


def kuberay_failed(reason: str, message: str = "") -> Fault:
    return kuberay(jobDeploymentStatus="Failed", jobStatus="FAILED", reason=reason, message=message)


def exit_code(code: int) -> Fault:
    words = f"Job entrypoint command failed with exit code {code}, last available logs:\n  boom"
    return kuberay_failed("AppFailed", words)


def head_gone(world: World) -> None:
    world.remove_pods(f"math-{world.status['attempt']}-head")
    world.settle()
    world.after(SETTLED)


def pod_failed(role: str, reason: str, container: dict[str, Any] | None = None) -> Fault:
    """The pod of a role is Failed; a worker's end is waited for within the grace."""

    def fault(world: World) -> None:
        pod = world.objects["Pod", f"math-{world.status['attempt']}-{role}"]
        pod["status"] |= {"phase": "Failed", "reason": reason}
        if container:
            pod["status"]["containerStatuses"] = [{"name": f"ray-{role}", "state": {"terminated": container}}]
        world.settle()
        world.after(SETTLED if role == "head" else 121)

    return fault


def pod_succeeded(role: str) -> Fault:
    """The pod of a role ends with exit code 0 in the middle of the run."""

    def fault(world: World) -> None:
        world.objects["Pod", f"math-{world.status['attempt']}-{role}"]["status"]["phase"] = "Succeeded"
        world.settle()
        world.after(SETTLED if role == "head" else 121)

    return fault


def going(role: str, **condition: str) -> Fault:
    """A pod is Terminating and no document comes within the grace."""

    def fault(world: World) -> None:
        world.terminate(f"math-{world.status['attempt']}-{role}", **condition)
        world.settle()
        world.after(119)
        assert world.phase == "Training", "the grace was not waited for"
        world.after(2)

    return fault


def silent(world: World) -> None:
    world.after(181)


def failed_and_never_ended(world: World) -> None:
    world.ray(world.status["attempt"], jobDeploymentStatus="Running", jobStatus="FAILED")
    world.settle()
    world.after(181)


def head_not_ready(world: World) -> None:
    cluster = world.objects["RayCluster", f"math-{world.status['attempt']}-abcde"]
    cluster["status"]["conditions"] = [{"type": "HeadPodReady", "status": "False"}]
    world.settle()
    world.after(61)


def ray_job_deleted(world: World) -> None:
    world.vanish("RayJob", f"math-{world.status['attempt']}")
    world.settle()
    world.after(SETTLED)


def stalled(world: World) -> None:
    for _ in range(20):
        world.heartbeat(1, attempt=world.status["attempt"], activity=7)
        world.after(100)
        if world.phase != "Training":
            return


def deadline(world: World) -> None:
    world.edit(lifecycle={"activeDeadlineSeconds": 60})
    world.after(61)


def success_without_checkpoint(world: World) -> None:
    attempt = world.status["attempt"]
    world.final(attempt=attempt, checkpoint=None)
    world.ray(attempt, jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    world.settle()


def success_contradicted(world: World) -> None:
    attempt = world.status["attempt"]
    world.final(attempt=attempt)
    world.ray(attempt, jobDeploymentStatus="Failed", jobStatus="FAILED", message="exit code 1")
    world.settle()


def samples_held(world: World) -> None:
    """Every replica of the teacher is gone, and the trainer says so."""
    world.teacher_down()
    world.heartbeat(
        1, attempt=world.status["attempt"], phase="TeacherUnavailable", activity=7, unavailableTeacher="big"
    )
    world.settle()
