"""TrainerConfigs for tests: a small valid job, changed by keyword."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opd_api.trainer_config import Run, TeacherAddress, TrainerConfig, project
from opd_api.v1alpha1 import OPDJob


def trainer_config(
    root: Path,
    *,
    urls: dict[str, list[str]] | None = None,
    teachers: list[dict[str, Any]] | None = None,
    student: str = "/models/student",
    served_models: dict[str, str] | None = None,
    progress_config_map: str | None = None,
    **sections: Any,
) -> TrainerConfig:
    """`urls`: teacher name -> addresses; `sections`: parts of the spec in camelCase."""
    urls = urls or {"teacher": ["http://127.0.0.1:1"]}
    spec: dict[str, Any] = {
        "runtime": {"device": "cpu"},
        "student": {"model": {"source": student, "dtype": "fp32"}},
        "teachers": teachers
        or [{"name": name, "backend": "transformers", "endpoints": addresses} for name, addresses in urls.items()],
        "data": {"source": str(root / "prompts.jsonl"), "maxPromptTokens": 64},
        "rollout": {"engine": "transformers", "maxResponseTokens": 32},
        "training": {"steps": 1, "dtype": "fp32"},
    }
    for name, value in sections.items():
        spec[name] = {**spec.get(name, {}), **value} if isinstance(value, dict) else value
    job = OPDJob.parse({"apiVersion": "opd.dev/v1alpha1", "kind": "OPDJob", "metadata": {"name": "tiny"}, "spec": spec})
    run = Run(
        namespace="local",
        name="tiny",
        uid8="0123abcd",
        attempt=1,
        directory=str(root / "run"),
        mount_path=str(root),
        progress_config_map=progress_config_map,
        teachers=[
            TeacherAddress(name=name, urls=addresses, served_model=(served_models or {}).get(name))
            for name, addresses in urls.items()
        ],
    )
    return project(job.spec, run)
