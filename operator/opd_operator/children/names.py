"""Names and labels of children: deterministic, bounded, and free of collisions between jobs of one namespace.

Limits: 47 for a RayJob (KubeRay appends a suffix for the RayCluster and its pods), 63 for what becomes a label or DNS name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from opd_api.vocabulary import Label, Role

RAY_JOB_LIMIT = 47
DNS_LIMIT = 63
#: Deployments append two hashes to make a pod's name, which should stay a DNS label.
DEPLOYMENT_LIMIT = 46
HASH_LENGTH = 8


def short_hash(text: str) -> str:
    """First eight hex digits of the sha256."""
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]


def bounded(name: str, limit: int) -> str:
    """The name, or where it is too long its beginning and a hash of the whole."""
    if len(name) <= limit:
        return name
    return f"{name[: limit - HASH_LENGTH - 1].rstrip('-')}-{short_hash(name)}"


def job_label(job: str) -> str:
    """Value of opd.dev/job."""
    return bounded(job, DNS_LIMIT)


def check_job(job: str) -> str:
    """Job that checks the inputs."""
    return bounded(f"{job}-check-inputs", DNS_LIMIT)


def probe_job(job: str, probed: Iterable[str]) -> str:
    """Job that probes the teachers. `probed` identifies what it probes, so that other pods mean another Job."""
    return bounded(f"{job}-probe-teachers-{short_hash(' '.join(sorted(probed)))}", DNS_LIMIT)


def teacher(job: str, name: str) -> str:
    """Deployment and Service of a teacher."""
    return bounded(f"{job}-teacher-{name}", DEPLOYMENT_LIMIT)


def config_map(job: str, content_hash: str) -> str:
    """Immutable trainer configuration."""
    return bounded(f"{job}-config-{content_hash}", DNS_LIMIT)


def progress_config_map(job: str) -> str:
    """What the trainer reports."""
    return bounded(f"{job}-progress", DNS_LIMIT)


def keys_secret(job: str, uid8: str) -> str:
    """API keys of the job's teachers. The UID in it makes AlreadyExists a proof of ownership."""
    return bounded(f"{job}-{uid8}-keys", DNS_LIMIT)


def ray_job(job: str, attempt: int) -> str:
    """RayJob of an attempt."""
    return bounded(f"{job}-{attempt}", RAY_JOB_LIMIT)


def head_account(job: str) -> str:
    """ServiceAccount, Role and RoleBinding of the Ray head."""
    return bounded(f"{job}-head", DNS_LIMIT)


def network_policy(job: str) -> str:
    """NetworkPolicy of the job."""
    return bounded(job, DNS_LIMIT)


def labels(job: str, role: Role, *, attempt: int | None = None, teacher: str | None = None) -> dict[str, str]:
    """Labels of a child and of its pods."""
    found = {
        Label.NAME.value: "opd",
        Label.INSTANCE.value: job_label(job),
        Label.COMPONENT.value: role.value,
        Label.MANAGED_BY.value: "opd-operator",
        Label.JOB.value: job_label(job),
        Label.ROLE.value: role.value,
    }
    if attempt is not None:
        found[Label.ATTEMPT.value] = str(attempt)
    if teacher is not None:
        found[Label.TEACHER.value] = teacher
    return found
