"""The two Jobs that run before accelerators are taken: check-inputs (no teacher needed) and probe-teachers."""

from __future__ import annotations

from collections.abc import Sequence

from opd_api.paths import CONFIG_FILE
from opd_api.vocabulary import ExitCode, Role
from opd_operator.children import names
from opd_operator.children.context import JobContext, with_spec_hash
from opd_operator.children.pods import PodParts, pod_template
from opd_operator.children.teacher import client_variables
from opd_operator.model import Manifest

#: The operator's own deadline comes first, while the pod still shows what it waits for.
DEADLINE_EXTRA_SECONDS = 60
#: Exit codes that a second pod would only repeat.
FINAL_EXIT_CODES = [ExitCode.CONFIG, ExitCode.DATA, ExitCode.TEACHER]


def check_job(job: JobContext, config_map: str) -> Manifest:
    """Job check-inputs: the only pod of a job that may reach a model hub."""
    return _job(
        job,
        role=Role.CHECK,
        name=names.check_job(job.name),
        command=["opd-trainer", "check", "--config", CONFIG_FILE],
        config_map=config_map,
        deadline_seconds=job.spec.lifecycle.pre_running_deadline_seconds,
        online=True,
    )


def probe_job(job: JobContext, config_map: str, probed: Sequence[str]) -> Manifest:
    """Job probe-teachers for exactly the pods (or endpoints) in `probed`."""
    return _job(
        job,
        role=Role.PROBE,
        name=names.probe_job(job.name, probed),
        command=["opd-trainer", "probe", "--config", CONFIG_FILE],
        config_map=config_map,
        deadline_seconds=job.spec.lifecycle.teacher_ready_deadline_seconds,
        env=client_variables(job),
    )


def _job(
    job: JobContext,
    *,
    role: Role,
    name: str,
    command: list[str],
    config_map: str,
    deadline_seconds: int,
    env: list[Manifest] | None = None,
    online: bool = False,
) -> Manifest:
    template = pod_template(
        job,
        PodParts(
            role=role,
            placement=job.spec.preflight,
            env=env or [],
            config_map=config_map,
            online=online,
            container={"name": role.value, "image": job.image, "command": command},
            pod={"restartPolicy": "Never"},
        ),
    )
    manifest: Manifest = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": job.metadata(name, role),
        "spec": {
            "backoffLimit": 1,
            "activeDeadlineSeconds": deadline_seconds + DEADLINE_EXTRA_SECONDS,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": role.value, "operator": "In", "values": FINAL_EXIT_CODES},
                    },
                ]
            },
            "template": template,
        },
    }
    return with_spec_hash(manifest)
