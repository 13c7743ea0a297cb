"""A manifest, mapped to this machine."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from opd_api.v1alpha1 import Device
from opd_api.vocabulary import ExitCode, FailureClass
from opd_trainer.errors import TrainerError
from opd_trainer.local import run_local
from opd_trainer.local.plan import API_KEY_ENV, LocalJob, TeacherProcess, map_paths, plan, teacher_process

MANIFEST: dict[str, Any] = {
    "apiVersion": "opd.dev/v1alpha1",
    "kind": "OPDJob",
    "metadata": {"name": "quick"},
    "spec": {
        "runtime": {
            "device": "cpu",
            "acceleratorResource": "nvidia.com/gpu",
            "env": [{"name": "MODE", "value": "x"}],
        },
        "storage": {"claimName": "claim", "mountPath": "/data"},
        "student": {"model": {"source": "/data/models/student"}},
        "teachers": [
            {
                "name": "math",
                "backend": "transformers",
                "replicas": 2,
                "maxContextTokens": 512,
                "model": {"source": "/data/models/teacher", "revision": "v2", "dtype": "fp32"},
            },
            {
                "name": "far",
                "backend": "vllm",
                "endpoints": ["http://far:8000"],
                "apiKeySecretRef": {"name": "s", "key": "k"},
            },
        ],
        "routing": {"map": {"a": "math", "b": "far"}},
        "data": {"source": "/data/prompts.jsonl"},
        "rollout": {"engine": "transformers"},
        "training": {"steps": 2, "promptsPerStep": 4},
    },
}


def write(directory: Path, document: dict[str, Any]) -> Path:
    file = directory / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


@pytest.fixture
def job(tmp_path: Path) -> LocalJob:
    return plan(write(tmp_path, MANIFEST), tmp_path / "data")


def processes(job: LocalJob) -> list[TeacherProcess]:
    return [
        teacher_process(teacher, replica, 21000 + replica, device=Device.CPU, api_key="geheim", keys=job.configs)
        for teacher in job.served_teachers()
        for replica in range(teacher.replicas)
    ]


def test_the_mount_path_stands_for_the_data_folder(job: LocalJob, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    assert job.spec.student.model.source == f"{data}/models/student"
    assert job.spec.data.source == f"{data}/prompts.jsonl"
    assert job.environment["HF_HOME"] == f"{data}/hf"
    assert job.environment["MODE"] == "x"


def test_only_paths_below_the_mount_path_move() -> None:
    value = {"a": "/data", "b": ["/data/x", "/database/x", "org/model"], "mountPath": "/data"}
    assert map_paths(value, "/data", "/home/me") == {
        "a": "/home/me",
        "b": ["/home/me/x", "/database/x", "org/model"],
        "mountPath": "/data",
    }


def test_the_run_directory_follows_the_file_so_that_a_second_run_resumes(job: LocalJob, tmp_path: Path) -> None:
    uid8 = hashlib.sha256(str(tmp_path / "job.yaml").encode()).hexdigest()[:8]
    assert job.directory == tmp_path / "data" / "opd" / "local" / f"quick-{uid8}"


def test_attempts_count_up(job: LocalJob) -> None:
    assert job.next_attempt() == 1
    job.configs.mkdir(parents=True)
    for name in ("job.a1.json", "job.a10.json", "check.a11.json"):
        (job.configs / name).touch()
    assert job.next_attempt() == 11


def test_the_configuration_names_the_teachers_that_run_now(job: LocalJob) -> None:
    config = job.trainer_config(3, processes(job))
    math, far = config.run.teachers
    assert math.urls == ["http://127.0.0.1:21000", "http://127.0.0.1:21001"]
    assert math.api_key_env == API_KEY_ENV
    assert math.served_model == job.spec.teachers[0].model.source  # type: ignore[union-attr]
    assert far.urls == ["http://far:8000"]
    assert far.api_key_env == f"{API_KEY_ENV}_FAR"
    assert (config.run.attempt, config.run.namespace, config.run.progress_config_map) == (3, "local", None)
    assert not config.accelerators, "a laptop has no device plugin"


def test_the_key_of_a_teacher_is_never_in_argv(job: LocalJob) -> None:
    for process in processes(job):
        assert "geheim" not in " ".join(process.command)
        assert process.environment[API_KEY_ENV] == "geheim"
        assert "--revision v2" in " ".join(process.command)
        assert "--max-context-tokens 512" in " ".join(process.command)


def test_sglang_reads_its_key_from_a_private_file(tmp_path: Path) -> None:
    document = {**MANIFEST, "spec": {**MANIFEST["spec"], "teachers": [{"name": "t", "model": {"source": "/data/t"}}]}}
    document["spec"]["routing"] = {}
    job = plan(write(tmp_path, document), tmp_path / "data")
    (process,) = processes(job)
    assert process.key_file is not None
    assert f"--config {process.key_file}" in " ".join(process.command)
    assert "geheim" not in " ".join(process.command)


def test_a_backend_that_cannot_run_here_says_what_to_use(tmp_path: Path) -> None:
    teachers = [{"name": "t", "backend": "vllm", "model": {"source": "/data/t"}}]
    document = {**MANIFEST, "spec": {**MANIFEST["spec"], "teachers": teachers, "routing": {}}}
    job = plan(write(tmp_path, document), tmp_path / "data")
    with pytest.raises(TrainerError, match="use transformers or sglang, or give endpoints"):
        job.served_teachers()


def test_a_teacher_that_needs_an_engine_that_is_not_installed_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teachers = [{"name": "t", "model": {"source": "/data/t"}}]
    document = {**MANIFEST, "spec": {**MANIFEST["spec"], "teachers": teachers, "routing": {}}}
    job = plan(write(tmp_path, document), tmp_path / "data")
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(
        TrainerError, match=r"teacher t: .*opd\[trainer,sglang\].*or write backend: transformers"
    ) as raised:
        job.served_teachers()
    assert raised.value.failure.failure_class is FailureClass.CONFIG


@pytest.mark.parametrize("text", ["", "kind: ConfigMap", "a: [", "kind: OPDJob\n---\nkind: OPDJob"])
def test_a_file_without_exactly_one_job_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(TrainerError) as error:
        plan(file, tmp_path)
    assert error.value.failure.failure_class is FailureClass.CONFIG


def test_a_job_may_stand_among_other_documents(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("kind: ConfigMap\n---\n" + yaml.safe_dump(MANIFEST))
    assert plan(file, tmp_path).name == "quick"


def test_relative_data_folders_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = plan(Path(os.path.relpath(write(tmp_path, MANIFEST))), Path("opd-data"))
    assert job.spec.data.source == str(tmp_path / "opd-data" / "prompts.jsonl")


def test_a_mistyped_data_folder_is_refused_and_not_created(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typo = tmp_path / "tpyo"
    teacher = {"name": "math", "backend": "transformers", "model": {"source": "/data/models/teacher"}}
    manifest = MANIFEST | {"spec": MANIFEST["spec"] | {"teachers": [teacher], "routing": {}}}
    assert run_local(str(write(tmp_path, manifest)), data=str(typo)) == ExitCode.CONFIG
    assert not typo.exists()
    said = capsys.readouterr().out
    assert f"the folder {typo} does not exist" in said
    assert f"mkdir -p {typo}" in said


@pytest.mark.parametrize("section", ["storage", "runtime", "preflight"])
def test_a_section_whose_lines_are_all_commented_out_is_one_that_is_not_there(tmp_path: Path, section: str) -> None:
    spec = {**MANIFEST["spec"], section: None}
    assert plan(write(tmp_path, {**MANIFEST, "spec": spec}), tmp_path / "data").spec.storage.mount_path == "/data"


@pytest.mark.parametrize(("section", "value"), [("storage", [1]), ("storage", {"mountPath": 3}), ("training", None)])
def test_a_section_of_a_wrong_form_is_refused_by_its_path(tmp_path: Path, section: str, value: object) -> None:
    spec = {**MANIFEST["spec"], section: value}
    with pytest.raises(TrainerError, match=f"spec.{section}"):
        plan(write(tmp_path, {**MANIFEST, "spec": spec}), tmp_path / "data")


def test_a_file_that_is_no_utf8_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes("kind: OPDJob".encode("utf-16"))
    with pytest.raises(TrainerError, match=r"job\.yaml"):
        plan(file, tmp_path)
