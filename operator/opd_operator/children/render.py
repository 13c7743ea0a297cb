"""All children of a job's first attempt, as `opd render` prints them."""

from __future__ import annotations

from opd_api.v1alpha1 import OPDJob
from opd_operator.children import names
from opd_operator.children.access import head_access
from opd_operator.children.config import config_map, config_map_name, progress_config_map, trainer_config
from opd_operator.children.context import JobContext
from opd_operator.children.network import network_policy
from opd_operator.children.preflight import check_job, probe_job
from opd_operator.children.rayjob import ray_job
from opd_operator.children.teacher import deployment, keys_secret, probed, served, service
from opd_operator.model import Manifest
from opd_operator.settings import Settings

#: UID of a job that no API server has seen.
NO_UID = "00000000-0000-0000-0000-000000000000"


def render(job: OPDJob, settings: Settings) -> list[Manifest]:
    """Children in the order of their creation. The Secret has no values; names that hold a UID hold zeros."""
    extra = job.metadata.model_extra or {}
    context = JobContext(
        name=job.metadata.name,
        namespace=job.metadata.namespace or "default",
        uid=str(extra.get("uid") or NO_UID),
        spec=job.spec,
        settings=settings,
    )
    config = trainer_config(context, attempt=1)
    name = config_map_name(context, config)
    found = [config_map(context, config)]
    if job.spec.preflight.enabled:
        found.append(check_job(context, name))
    if job.spec.network_policy.enabled:
        found.append(network_policy(context))
    if served(job.spec):
        found.append(keys_secret(context).manifest)
    for teacher in served(job.spec):
        found += [service(context, teacher), deployment(context, teacher, restart=0)]
    if job.spec.preflight.enabled and probed(job.spec):
        found.append(
            probe_job(context, name, probed=[names.teacher(context.name, item.name) for item in probed(job.spec)])
        )
    found.append(progress_config_map(context))
    found += head_access(context)
    found.append(ray_job(context, 1, name, config.content_hash))
    return found
