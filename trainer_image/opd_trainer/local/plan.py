"""Manifest -> what runs locally: mapped paths, run directory, commands of the teachers, trainer configuration."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from opd_api.paths import HUB_FOLDER, run_directory
from opd_api.rules import check_document
from opd_api.trainer_config import Run, TeacherAddress, TrainerConfig, project
from opd_api.v1alpha1 import Device, OPDJobSpec, Storage, Teacher, TeacherBackend
from opd_api.vocabulary import FailureClass, Reason
from opd_api.yaml_documents import YamlError, read_documents
from opd_trainer.errors import TrainerError

NAMESPACE = "local"
API_KEY_ENV = "OPD_TEACHER_API_KEY"
ATTEMPT_FILE = re.compile(r"^job\.a(\d+)\.json$")
OPD_TRAINER = (sys.executable, "-m", "opd_trainer.cli")
LOCAL_BACKENDS = (TeacherBackend.TRANSFORMERS, TeacherBackend.SGLANG)
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def config_error(message: str) -> TrainerError:
    """A fault of the manifest or of the command line."""
    return TrainerError(FailureClass.CONFIG, Reason.CONFIG_ERROR, message)


@dataclass(frozen=True, slots=True)
class TeacherProcess:
    """One replica of a managed teacher."""

    teacher: str
    replica: int
    port: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    startup_seconds: int
    #: File with the API key, read by servers that take it from nowhere else. Written before the start, mode 0600.
    key_file: Path | None = None

    @property
    def name(self) -> str:
        """For logs: `teacher-0`."""
        return f"{self.teacher}-{self.replica}"

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class LocalJob:
    """A manifest, mapped to this machine."""

    name: str
    spec: OPDJobSpec
    data: Path
    directory: Path
    uid8: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def configs(self) -> Path:
        """Folder of the trainer configurations, one for each attempt."""
        return self.directory / "config"

    def next_attempt(self) -> int:
        """One more than the highest that ever started here."""
        found = [int(match[1]) for path in self.configs.glob("job.a*.json") if (match := ATTEMPT_FILE.match(path.name))]
        return max(found, default=0) + 1

    def served_teachers(self) -> list[Teacher]:
        """Teachers that this machine has to serve. Raises TrainerError for backends that cannot run here."""
        served = [teacher for teacher in self.spec.teachers if teacher.served_by_operator and not teacher.external]
        for teacher in served:
            if teacher.backend not in LOCAL_BACKENDS:
                raise config_error(
                    f"teacher {teacher.name}: backend {teacher.backend} cannot be started by opd run; "
                    "use transformers or sglang, or give endpoints of a running server"
                )
            if teacher.backend is TeacherBackend.SGLANG and find_spec("sglang") is None:
                raise config_error(
                    f"teacher {teacher.name}: backend sglang (the default) needs SGLang, which is not installed here; "
                    "install the extra opd[trainer,sglang], or write backend: transformers"
                )
        return served

    def trainer_config(self, attempt: int, processes: list[TeacherProcess]) -> TrainerConfig:
        """The configuration of one attempt, with the addresses of the teachers that run now."""
        addresses = []
        for teacher in self.spec.teachers:
            urls = [process.url for process in processes if process.teacher == teacher.name]
            key = API_KEY_ENV if urls else external_key_variable(teacher)
            addresses.append(
                TeacherAddress(
                    name=teacher.name,
                    urls=urls or list(teacher.endpoints),
                    api_key_env=key,
                    served_model=teacher.model.source if urls and teacher.model else None,
                )
            )
        run = Run(
            namespace=NAMESPACE,
            name=self.name,
            uid8=self.uid8,
            attempt=attempt,
            directory=str(self.directory),
            mount_path=str(self.data),
            teachers=addresses,
        )
        config = project(self.spec, run)
        # A laptop has no device plugin: on CPUs the actors ask for no accelerator, whatever the cluster would count.
        return config.model_copy(update={"accelerators": self.spec.runtime.device is Device.CUDA})


def external_key_variable(teacher: Teacher) -> str | None:
    """Environment variable that holds the key of an external teacher, None when it needs none."""
    if teacher.api_key_secret_ref is None:
        return None
    return f"{API_KEY_ENV}_{teacher.name.upper().replace('-', '_')}"


def load_manifest(file: Path) -> dict[str, Any]:
    """The only OPDJob in a YAML file. Raises TrainerError(Config)."""
    try:
        documents = [d for d in read_documents(file.read_text(encoding="utf-8")) if isinstance(d, dict)]
    except (OSError, UnicodeDecodeError, YamlError) as error:
        raise config_error(f"{file}: {error}") from error
    jobs = [document for document in documents if document.get("kind") == "OPDJob"]
    if len(jobs) != 1:
        raise config_error(f"{file} must hold exactly one OPDJob, found {len(jobs)}")
    return jobs[0]


def plan(file: Path, data: Path) -> LocalJob:
    """Read a manifest and map `storage.mountPath` to `data`. Raises TrainerError(Config)."""
    file, data = file.resolve(), data.resolve()
    document = load_manifest(file)
    mount_path = _mount_path(document)
    job, findings = check_document(
        {**document, "spec": map_paths(document.get("spec"), mount_path, str(data))}, local=True
    )
    if job is None:
        raise config_error(f"{file}: " + "; ".join(f"{finding.path}: {finding.message}" for finding in findings))
    uid8 = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    directory = run_directory(str(data), job.spec.storage.run_path, NAMESPACE, job.metadata.name, uid8)
    plain = {variable.name: variable.value for variable in job.spec.runtime.env if variable.value is not None}
    return LocalJob(
        name=job.metadata.name,
        spec=job.spec,
        data=data,
        directory=Path(directory),
        uid8=uid8,
        environment={**plain, "HF_HOME": str(data / HUB_FOLDER)},
    )


def _mount_path(document: dict[str, Any]) -> str:
    """`storage.mountPath` as written; a section may be empty (all below it commented out), or of a wrong type."""
    spec = document.get("spec")
    storage = spec.get("storage") if isinstance(spec, dict) else None
    written = storage.get("mountPath") if isinstance(storage, dict) else None
    return written if isinstance(written, str) else str(Storage.model_fields["mount_path"].default)


def map_paths(value: Any, mount_path: str, data: str) -> Any:
    """Every string that is `mountPath` or lies below it, moved to `data`."""
    if isinstance(value, dict):
        return {key: item if key == "mountPath" else map_paths(item, mount_path, data) for key, item in value.items()}
    if isinstance(value, list):
        return [map_paths(item, mount_path, data) for item in value]
    if isinstance(value, str) and (value == mount_path or value.startswith(mount_path.rstrip("/") + "/")):
        return data + value[len(mount_path.rstrip("/")) :]
    return value


def teacher_process(
    teacher: Teacher, replica: int, port: int, *, device: Device, api_key: str, keys: Path
) -> TeacherProcess:
    """How one replica is started. The key travels in the environment or in a private file, never in argv."""
    assert teacher.model is not None
    build = _sglang if teacher.backend is TeacherBackend.SGLANG else _transformers
    return build(teacher, replica, port, device, api_key, keys)


def on_port(process: TeacherProcess, port: int) -> TeacherProcess:
    """The same replica on another port."""
    command = list(process.command)
    command[command.index("--port") + 1] = str(port)
    return replace(process, port=port, command=tuple(command))


def _transformers(
    teacher: Teacher, replica: int, port: int, device: Device, api_key: str, _keys: Path
) -> TeacherProcess:
    model = teacher.model
    assert model is not None
    command = [*OPD_TRAINER, "serve", "--model", model.source, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--device", device.value, "--dtype", model.dtype.value]
    if teacher.max_context_tokens is not None:
        command += ["--max-context-tokens", str(teacher.max_context_tokens)]
    if model.revision is not None:
        command += ["--revision", model.revision]
    if model.trust_remote_code:
        command.append("--trust-remote-code")
    environment = {API_KEY_ENV: api_key}
    return TeacherProcess(
        teacher.name, replica, port, (*command, *teacher.args), environment, teacher.startup_timeout_seconds
    )


def _sglang(teacher: Teacher, replica: int, port: int, device: Device, api_key: str, keys: Path) -> TeacherProcess:
    model = teacher.model
    assert model is not None
    key_file = keys / f"sglang-{teacher.name}-{replica}.yaml"
    command = [sys.executable, "-m", "sglang.launch_server", "--config", str(key_file), "--model-path", model.source]
    command += ["--served-model-name", model.source, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--tp-size", str(teacher.tensor_parallel_size), "--skip-server-warmup", "--enable-fp32-lm-head"]
    environment = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false", API_KEY_ENV: api_key}
    if device is Device.CPU:
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        command += ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"]
        command += ["--sampling-backend", "pytorch", "--max-total-tokens", "16384", "--disable-overlap-schedule"]
    else:
        command += ["--dtype", DTYPE_NAMES[model.dtype.value], "--mem-fraction-static", "0.8"]
    if teacher.max_context_tokens is not None:
        command += ["--context-length", str(teacher.max_context_tokens)]
    if model.revision is not None:
        command += ["--revision", model.revision]
    if model.trust_remote_code:
        command.append("--trust-remote-code")
    if not teacher.prefix_caching:
        command.append("--disable-radix-cache")
    return TeacherProcess(
        teacher.name, replica, port, (*command, *teacher.args), environment, teacher.startup_timeout_seconds, key_file
    )
