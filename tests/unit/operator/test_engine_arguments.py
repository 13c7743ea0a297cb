"""What the operator writes on a server's command line is either refused in `args`, or may be overridden on purpose."""

from __future__ import annotations

from typing import Any

import pytest
from opd_world import UID, job_document

from opd_api.rules.arguments import OWNED
from opd_api.v1alpha1 import OPDJob, TeacherBackend
from opd_operator.children import JobContext
from opd_operator.children.engines import engine
from opd_operator.children.rayjob import ray_job
from opd_operator.settings import Settings

#: Choices of ours that a user may know better, and switches that are the same when they stand twice.
ADJUSTABLE = {
    "--mem-fraction-static",
    "--max-total-tokens",
    "--attention-backend",
    "--sampling-backend",
    "--disable-overlap-schedule",
    "--enable-fp32-lm-head",
    "--enable-metrics",
    "--skip-server-warmup",
    # Rule 4 looks at it.
    "--max-logprobs",
}


def context(**sections: Any) -> JobContext:
    job = OPDJob.parse(job_document(**sections))
    return JobContext("math", "team", UID, job.spec, Settings())


@pytest.mark.parametrize("backend", [item for item in TeacherBackend if item is not TeacherBackend.INPROCESS])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_flag_of_an_engine_is_owned_or_adjustable(backend: TeacherBackend, device: str) -> None:
    model = {"source": "/data/teacher", "revision": "main", "trustRemoteCode": True}
    teacher = {"name": "big", "backend": backend.value, "model": model, "maxContextTokens": 9000}
    for caching in (True, False):
        job = context(teachers=[{**teacher, "prefixCaching": caching}], runtime={"device": device})
        flags = [item for item in engine(job, job.spec.teachers[0], "keys").args if item.startswith("-")]
        assert flags
        assert set(flags) - set(OWNED[backend]) <= ADJUSTABLE


@pytest.mark.parametrize("role", ["head", "workers"])
def test_ray_pods_never_restart_whatever_a_template_says(role: str) -> None:
    job = context(ray={role: {"template": {"spec": {"restartPolicy": "Always", "priority": 1}}}})
    cluster = ray_job(job, 1, "config", "hash")["spec"]["rayClusterSpec"]
    group = cluster["headGroupSpec"] if role == "head" else cluster["workerGroupSpecs"][0]
    assert group["template"]["spec"]["restartPolicy"] == "Never"
    assert group["template"]["spec"]["priority"] == 1
