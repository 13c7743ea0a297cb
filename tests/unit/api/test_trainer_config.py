"""The projection of a spec onto what the trainer reads: complete, explicit, stable."""

from __future__ import annotations

from typing import Any

import pytest
from opd_testing.jobs import job_document
from pydantic import ValidationError

from opd_api.paths import checkpoint_name, run_directory, weights_name
from opd_api.rules.schema import field_paths
from opd_api.trainer_config import Run, TeacherAddress, TrainerConfig, project
from opd_api.v1alpha1 import OPDJob

#: Sections and fields that only the operator reads. A new field of the spec must be projected or stand here.
OPERATOR_ONLY = (
    "suspend",
    "acknowledge",
    "runtime",
    "storage",
    "ray",
    "networkPolicy",
    "lifecycle",
    "preflight.enabled",
    "preflight.nodeSelector",
    "preflight.tolerations",
    "preflight.affinity",
    "preflight.topologySpread",
    "preflight.resources",
    "teachers[].nodeSelector",
    "teachers[].tolerations",
    "teachers[].affinity",
    "teachers[].topologySpread",
    "teachers[].resources",
    "teachers[].template",
    "teachers[].image",
    "teachers[].args",
    "teachers[].tensorParallelSize",
    "teachers[].startupTimeoutSeconds",
    # addresses and keys reach the trainer as run.teachers
    "teachers[].endpoints",
    "teachers[].apiKeySecretRef",
)
#: Fields of the two sections that are projected in part.
LIFECYCLE = {"teacherReadyDeadlineSeconds", "preemptionGraceSeconds", "stallTimeoutSeconds"}


def run_of(attempt: int = 1) -> Run:
    address = TeacherAddress(name="teacher", urls=["http://math-teacher-teacher:30000"])
    return Run(
        namespace="team",
        name="math",
        uid8="0a1b2c3d",
        attempt=attempt,
        directory="/data/opd/team/math-0a1b2c3d",
        mount_path="/data",
        teachers=[address],
    )


def config(changes: dict[str, Any] | None = None) -> TrainerConfig:
    return project(OPDJob.parse(job_document(changes)).spec, run_of())


def operator_only(path: str) -> bool:
    return any(path == item or path.startswith((f"{item}.", f"{item}[]")) for item in OPERATOR_ONLY)


def test_every_field_of_the_spec_is_projected_or_listed() -> None:
    spec = {path.removeprefix("spec.") for path in field_paths(OPDJob, "") if path.startswith("spec.")}
    projected = set(field_paths(TrainerConfig, ""))
    assert {path for path in spec - projected if not operator_only(path)} == set()
    assert {path for path in OPERATOR_ONLY if path not in spec} == set(), "listed, but there is no such field"
    assert {path for path in OPERATOR_ONLY if path in projected and path != "lifecycle"} == set()


def test_the_trainers_deadlines_are_those_of_the_spec() -> None:
    document = config({"spec.lifecycle": {"stallTimeoutSeconds": 77, "preemptionGraceSeconds": 5}}).to_yaml_dict()
    assert set(document["lifecycle"]) == LIFECYCLE
    assert document["lifecycle"]["stallTimeoutSeconds"] == 77
    assert document["lifecycle"]["preemptionGraceSeconds"] == 5


def test_every_default_is_filled_in() -> None:
    document = config().to_yaml_dict()
    assert document["distillation"]["coefficient"] == 1.0
    assert document["training"]["betas"] == [0.9, 0.95]
    assert document["device"] == "cuda"
    assert document["accelerators"] is True


def test_a_cpu_job_without_a_resource_counts_cpu_actors() -> None:
    assert config({"spec.runtime": {"device": "cpu"}}).accelerators is False
    assert config({"spec.runtime": {"device": "cpu", "acceleratorResource": "nvidia.com/gpu"}}).accelerators is True


@pytest.mark.parametrize(
    ("changes", "renamed"),
    [
        ({"spec.lifecycle.ttlSecondsAfterFinished": 60}, False),
        ({"spec.suspend": True}, False),
        ({"spec.teachers.0.args": ["--x"]}, False),
        ({"spec.ray.workers.gpusPerWorker": 4}, False),
        ({"spec.training.learningRate": 2e-6}, True),
        ({"spec.lifecycle.stallTimeoutSeconds": 60}, True),
    ],
)
def test_only_what_the_trainer_reads_changes_the_hash(changes: dict[str, Any], renamed: bool) -> None:
    assert (config(changes).content_hash != config().content_hash) is renamed


def test_the_document_survives_its_journey_and_refuses_strangers() -> None:
    text = config().to_json()
    assert TrainerConfig.model_validate_json(text).to_json() == text
    with pytest.raises(ValidationError):
        TrainerConfig.model_validate_json(text.replace('"device"', '"devices"'))


def test_names_on_the_claim_carry_the_attempt() -> None:
    assert run_directory("/data", "opd", "team", "math", "0a1b2c3d-9999") == "/data/opd/team/math-0a1b2c3d"
    assert (checkpoint_name(40, 2), weights_name(17, 2)) == ("step-40.a2", "a2/v17")


@pytest.mark.parametrize(
    ("gpus", "replicas", "parallel", "per_worker", "workers"),
    [(1, 1, 1, None, 1), (4, 4, 1, None, 1), (8, 4, 2, 8, 2), (4, 1, 4, 6, 2), (2, 3, 4, 6, 3), (1, 1, 1, 1, 2)],
)
def test_workers_are_computed_by_first_fit(
    gpus: int, replicas: int, parallel: int, per_worker: int | None, workers: int
) -> None:
    changes: dict[str, Any] = {
        "spec.training.gpus": gpus,
        "spec.rollout": {"replicas": replicas, "tensorParallelSize": parallel},
    }
    if per_worker is not None:
        changes["spec.ray.workers.gpusPerWorker"] = per_worker
    assert OPDJob.parse(job_document(changes)).spec.worker_count == workers
