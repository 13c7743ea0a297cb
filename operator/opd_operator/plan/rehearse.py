"""Before anything is created the API server is asked whether it would take the children: it knows best what a pod may be, it
names the field, and no accelerator is taken for a job that could not have started."""

from __future__ import annotations

from opd_api.vocabulary import ConditionType, FailureClass, Reason, Role
from opd_operator.children import names
from opd_operator.children.config import config_map_name, trainer_config
from opd_operator.children.network import network_policy
from opd_operator.children.preflight import check_job
from opd_operator.children.rayjob import ray_job
from opd_operator.children.teacher import deployment, served
from opd_operator.model import Diagnosis, Manifest, ObjectRef
from opd_operator.plan.draft import Draft
from opd_operator.plan.outcome import fail
from opd_operator.planned import Rehearsal


def rehearsed(draft: Draft) -> bool:
    """True when the API server would take the children of this generation of the spec, or did so at the start."""
    if draft.start_time is not None or draft.observation.memory.rehearsed == draft.job.generation:
        return True
    seconds = draft.spec.lifecycle.pre_running_deadline_seconds
    if draft.passed(draft.since(ConditionType.ACCEPTED), seconds):
        late = Diagnosis(
            FailureClass.DEADLINE,
            Reason.PRE_RUNNING_DEADLINE_EXCEEDED,
            f"the API server did not say within {seconds} s whether it takes the objects of the job",
            "Raise lifecycle.preRunningDeadlineSeconds.",
        )
        fail(draft, draft.diagnosis or late)
    else:
        draft.rehearse.extend(children(draft))
    return False


def children(draft: Draft) -> list[Rehearsal]:
    """What holds words of the user's that only Kubernetes understands: pods and the NetworkPolicy."""
    context = draft.context
    config = trainer_config(context, draft.attempt)
    name = config_map_name(context, config)
    found: list[Manifest] = []
    if draft.spec.preflight.enabled:
        found.append(check_job(context, name))
    if draft.spec.network_policy.enabled:
        found.append(network_policy(context))
    found += [deployment(context, teacher, restart=0) for teacher in served(draft.spec)]
    student = ray_job(context, draft.attempt, name, config.content_hash)
    found.append(student)
    cluster = student["spec"]["rayClusterSpec"]
    pods = {"head": cluster["headGroupSpec"]["template"], "worker": cluster["workerGroupSpecs"][0]["template"]}
    ray = ObjectRef.of(student)
    return [
        *(Rehearsal(item, ObjectRef.of(item)) for item in found),
        *(Rehearsal(_trial(draft, role, template), ray) for role, template in pods.items()),
    ]


def _trial(draft: Draft, role: str, template: Manifest) -> Manifest:
    """A Job with a Ray pod's template: the CRD of RayJobs knows the types in it, the API server's own kinds know the rules."""
    name = names.bounded(f"{names.ray_job(draft.job.name, draft.attempt)}-{role}", names.DNS_LIMIT)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": draft.context.metadata(name, Role(role)),
        "spec": {"template": template},
    }
