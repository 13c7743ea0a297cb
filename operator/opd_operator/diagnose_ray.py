"""How a RayJob ended when the trainer left no final document: KubeRay 1.6 and 1.7 status -> Diagnosis. Pure.

A RayJob's entrypoint is a child of a Ray actor: it has no pod exit code. Ray puts the code into its message, which KubeRay
copies into the RayJob's status.
"""

from __future__ import annotations

import re

from opd_api.vocabulary import CLASS_OF_EXIT_CODE, ExitCode, FailureClass, Reason
from opd_operator.diagnose import RESUME, last_words
from opd_operator.model import Diagnosis, RayJobView

EXIT_CODE = re.compile(r"exit code:? (-?\d+)")
#: Ray's own words for "the head or the supervisor went away", which KubeRay files under application failures.
HEAD_LOST = re.compile(
    r"job not found in RayCluster|head pod not found|supervisor .*died|node .*(?:died|lost)|actor died unexpectedly|"
    r"job supervisor|Failed to schedule",
    re.I,
)
#: RayJob reasons that tell of KubeRay or the network, not of user code.
INFRASTRUCTURE_REASONS = frozenset({"SubmissionFailed", "JobStatusCheckTimeoutExceeded"})
#: RayJob states that the operator never asks for: it deletes what it wants to stop.
SUSPENDED = frozenset({"Suspending", "Suspended"})
LOOK = "See <run directory>/logs/attempt-<n>/ on the claim."


def refused(job: RayJobView) -> Diagnosis | None:
    """KubeRay's own validation: no retry can help."""
    if job.deployment_status != "ValidationFailed":
        return None
    return Diagnosis(
        FailureClass.CONFIG,
        Reason.RAY_JOB_INVALID,
        f"KubeRay refuses the RayJob: {last_words(job.message)}",
        "Correct ray.head.template, ray.workers.template or ray.rayVersion.",
    )


def no_kuberay(message: str) -> Diagnosis:
    """The kind RayJob is not there (yet, or any more)."""
    return Diagnosis(
        FailureClass.CAPACITY,
        Reason.KUBERAY_MISSING,
        message,
        "Install KubeRay 1.6 or newer; the job goes on by itself.",
    )


def not_admitted() -> Diagnosis:
    """Whoever suspends RayJobs has not let this one begin."""
    return Diagnosis(
        FailureClass.CAPACITY,
        Reason.NOT_ADMITTED,
        "the RayJob is suspended from outside: a queue has not admitted it",
        "See the queue's Workloads and its quota.",
    )


def suspended_by_queue() -> Diagnosis:
    """Whoever suspends RayJobs has taken this one's place: KubeRay removes its pods."""
    return Diagnosis(
        FailureClass.INFRASTRUCTURE,
        Reason.PREEMPTED_BY_SCHEDULER,
        "the RayJob was suspended from outside: a queue took its place",
        f"Use spec.suspend to stop a job. {RESUME}",
    )


def ended(job: RayJobView) -> bool:
    """True when KubeRay will not change this RayJob any more."""
    return job.deployment_status in ("Complete", "Failed")


def succeeded(job: RayJobView) -> bool:
    """Complete alone is not success: KubeRay says Complete for STOPPED too."""
    return job.deployment_status == "Complete" and job.job_status == "SUCCEEDED"


def without_document(job: RayJobView, detail: str = "") -> Diagnosis:
    """Class of an ended RayJob that left no readable final document.

    `detail` says why there is none when something was written but could not be read.
    """
    if job.disruption is not None and job.disruption.failure_class is FailureClass.INFRASTRUCTURE:
        return job.disruption
    if job.reason in INFRASTRUCTURE_REASONS or HEAD_LOST.search(job.message):
        return Diagnosis(
            FailureClass.INFRASTRUCTURE, Reason.HEAD_LOST, f"{job.reason}: {last_words(job.message)}", RESUME
        )
    if job.job_status == "STOPPED":
        return Diagnosis(
            FailureClass.INFRASTRUCTURE,
            Reason.RAY_JOB_STOPPED,
            "the Ray job was stopped from outside",
            f"Use spec.suspend to stop a job. {RESUME}",
        )
    match = EXIT_CODE.search(job.message)
    if match and int(match.group(1)) != ExitCode.OK:
        return _of_exit_code(int(match.group(1)), job)
    if succeeded(job) or match:
        return Diagnosis(
            FailureClass.INTERNAL,
            Reason.NO_FINAL_DOCUMENT,
            f"the RayJob ended with success but the trainer left no final document {detail}".strip(),
            LOOK,
        )
    if job.disruption is not None:
        return job.disruption
    return Diagnosis(
        FailureClass.INTERNAL,
        Reason.RAY_JOB_FAILED,
        f"the RayJob ended as {job.deployment_status}/{job.job_status or '-'} {job.reason}: {last_words(job.message)} {detail}".strip(),
        LOOK,
    )


def _of_exit_code(code: int, job: RayJobView) -> Diagnosis:
    if code < 0 or code in (137, 143):
        # A signal from outside the program: the kernel's memory killer, kubelet or Ray.
        return Diagnosis(
            FailureClass.INFRASTRUCTURE,
            Reason.RAY_JOB_FAILED,
            f"the trainer was killed by a signal (exit code {code})",
            f"Raise ray.head.resources.limits.memory if it ran out of memory. {RESUME}",
        )
    found = CLASS_OF_EXIT_CODE.get(code, FailureClass.INTERNAL)
    reason = {
        FailureClass.CONFIG: Reason.CONFIG_ERROR,
        FailureClass.DATA: Reason.DATA_ERROR,
        FailureClass.TEACHER: Reason.TEACHER_ERROR,
    }.get(found, Reason.RAY_JOB_FAILED)
    return Diagnosis(found, reason, f"the trainer ended with exit code {code}: {last_words(job.message)}", LOOK)
