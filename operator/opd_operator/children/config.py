"""ConfigMaps: the immutable trainer configuration of one attempt, and the place where the trainer reports."""

from __future__ import annotations

from opd_api.paths import CONFIG_FILE, run_directory
from opd_api.trainer_config import Run, TrainerConfig, project
from opd_api.vocabulary import Annotation, Role
from opd_operator.children import names
from opd_operator.children.context import JobContext
from opd_operator.children.teacher import address
from opd_operator.model import Manifest

CONFIG_KEY = CONFIG_FILE.rpartition("/")[2]


def trainer_config(job: JobContext, attempt: int) -> TrainerConfig:
    """The projection of the spec for an attempt."""
    storage = job.spec.storage
    return project(
        job.spec,
        Run(
            namespace=job.namespace,
            name=job.name,
            uid8=job.uid8,
            attempt=attempt,
            directory=run_directory(storage.mount_path, storage.run_path, job.namespace, job.name, job.uid),
            mount_path=storage.mount_path,
            progress_config_map=names.progress_config_map(job.name),
            teachers=[address(job, teacher) for teacher in job.spec.teachers],
        ),
    )


def config_map_name(job: JobContext, config: TrainerConfig) -> str:
    """Name of the ConfigMap that holds this configuration."""
    return names.config_map(job.name, config.content_hash)


def config_map(job: JobContext, config: TrainerConfig) -> Manifest:
    """Immutable: an attempt can never see another attempt's settings."""
    metadata = job.metadata(config_map_name(job, config), Role.CONFIG, attempt=config.run.attempt)
    metadata["annotations"] = {Annotation.CONFIG_HASH.value: config.content_hash}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "immutable": True,
        "data": {CONFIG_KEY: config.to_json()},
    }


def progress_config_map(job: JobContext) -> Manifest:
    """Empty until the trainer's first heartbeat."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": job.metadata(names.progress_config_map(job.name), Role.CONFIG),
    }
