"""How each teacher backend is started and asked for its health."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from importlib import resources
from pathlib import PurePosixPath

from opd_api.v1alpha1 import SET_SELECTIONS, Device, Dtype, Model, Teacher, TeacherBackend, TokenSelection
from opd_api.vocabulary import Port
from opd_operator.children.context import JobContext
from opd_operator.children.pods import secret_variable
from opd_operator.model import Manifest

API_KEY_VARIABLE = "OPD_TEACHER_API_KEY"
ADMIN_KEY_VARIABLE = "OPD_TEACHER_ADMIN_KEY"
API_KEY = "apiKey"
ADMIN_KEY = "adminKey"
KEY_FOLDER = str(PurePosixPath("/run/opd"))
DTYPE_NAMES = {Dtype.BF16: "bfloat16", Dtype.FP16: "float16", Dtype.FP32: "float32"}
#: vLLM refuses more log-probabilities per position than this unless told otherwise.
VLLM_MAX_LOGPROBS = 20
PROBE_PERIOD_SECONDS = 10


@dataclass(frozen=True)
class Engine:
    """Command, environment and probes of a teacher server."""

    command: list[str]
    args: list[str]
    env: list[Manifest] = field(default_factory=list)
    #: Folder in memory for a file with keys.
    key_folder: bool = False
    startup_path: str = "/health"
    startup_timeout_seconds: int = 10
    readiness: tuple[str, int, int, int] = ("/health", 10, 10, 3)
    liveness: tuple[str, int, int, int] = ("/health", 10, 30, 10)

    def probes(self, startup_budget_seconds: int) -> Manifest:
        """startupProbe, readinessProbe and livenessProbe. Liveness is patient: a long prefill is no death."""
        return {
            "startupProbe": _probe(
                self.startup_path,
                self.startup_timeout_seconds,
                PROBE_PERIOD_SECONDS,
                math.ceil(startup_budget_seconds / PROBE_PERIOD_SECONDS),
            ),
            "readinessProbe": _probe(*self.readiness),
            "livenessProbe": _probe(*self.liveness),
        }


def engine(job: JobContext, teacher: Teacher, secret: str) -> Engine:
    """The engine of a teacher that the operator serves."""
    build = {
        TeacherBackend.SGLANG: _sglang,
        TeacherBackend.VLLM: _vllm,
        TeacherBackend.LMDEPLOY: _lmdeploy,
        TeacherBackend.TRANSFORMERS: _transformers,
    }[teacher.backend]
    return build(job, teacher, secret)


def _sglang(job: JobContext, teacher: Teacher, secret: str) -> Engine:
    model = _model(teacher)
    cpu = job.spec.runtime.device is Device.CPU
    args = ["--model-path", model.source, "--served-model-name", model.source, *_revision(teacher)]
    args += ["--host", "0.0.0.0", "--port", str(Port.TEACHER)]  # noqa: S104 - a pod's own address
    args += ["--tp-size", str(teacher.tensor_parallel_size)]
    args += ["--dtype", "float32" if cpu else DTYPE_NAMES[model.dtype]]
    args += ["--enable-fp32-lm-head", "--enable-metrics", "--skip-server-warmup"]
    args += _when(teacher.max_context_tokens, "--context-length") + _flag(model.trust_remote_code)
    if not teacher.prefix_caching:
        args.append("--disable-radix-cache")
    env = {
        # Readiness asks /health_generate; /health must stay a sign of life that a long prefill cannot delay.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        # Log-probabilities of a long prompt are computed in rows of this many, not [tokens, vocabulary] at once.
        "SGLANG_ENABLE_LOGPROB_CHUNK": "1",
        "SGLANG_LOGPROB_CHUNK_SIZE": "2048",
    }
    if cpu:
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        args += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        # Without a bound the KV pool takes most of the node's memory.
        args += ["--max-total-tokens", "16384", "--disable-overlap-schedule"]
    else:
        # Log-probabilities need memory outside the static pool.
        args += ["--mem-fraction-static", "0.8"]
    return Engine(
        command=["python3", "-c", bootstrap_text()],
        args=["sglang", *args, *teacher.args],
        env=[*_plain(env), *_keys(secret)],
        key_folder=True,
        startup_path="/health_generate",
        startup_timeout_seconds=30,
        readiness=("/health_generate", 25, 30, 3),
    )


def _vllm(job: JobContext, teacher: Teacher, secret: str) -> Engine:
    model = _model(teacher)
    distillation = job.spec.distillation
    wanted = (distillation.top_k or 0) if distillation.token_selection in SET_SELECTIONS else 0
    args = [model.source, "--served-model-name", model.source, *_revision(teacher)]
    args += ["--host", "0.0.0.0", "--port", str(Port.TEACHER)]  # noqa: S104
    args += ["--tensor-parallel-size", str(teacher.tensor_parallel_size), "--dtype", DTYPE_NAMES[model.dtype]]
    args += ["--max-logprobs", str(max(VLLM_MAX_LOGPROBS, wanted))]
    args += _when(teacher.max_context_tokens, "--max-model-len") + _flag(model.trust_remote_code)
    if not teacher.prefix_caching:
        args.append("--no-enable-prefix-caching")
    env = _plain({"VLLM_NO_USAGE_STATS": "1", "VLLM_CACHE_ROOT": "/home/opd/.cache/vllm"})
    if distillation.token_selection in (TokenSelection.STUDENT_TOPK, TokenSelection.UNION, TokenSelection.INTERSECTION):
        # Scores at given ids per position exist in the second model runner only.
        env += _plain({"VLLM_USE_V2_MODEL_RUNNER": "1"})
    return Engine(
        command=["vllm", "serve"],
        args=[*args, *teacher.args],
        env=[*env, secret_variable("VLLM_API_KEY", secret, API_KEY)],
    )


def _lmdeploy(job: JobContext, teacher: Teacher, secret: str) -> Engine:
    model = _model(teacher)
    args = [model.source, "--model-name", model.source, *_revision(teacher)]
    args += ["--server-name", "0.0.0.0", "--server-port", str(Port.TEACHER)]  # noqa: S104
    # Input log-probabilities exist in the PyTorch engine only, and only in this mode.
    args += ["--backend", "pytorch", "--logprobs-mode", "raw_logprobs"]
    args += ["--tp", str(teacher.tensor_parallel_size), "--dtype", DTYPE_NAMES[model.dtype]]
    args += _when(teacher.max_context_tokens, "--session-len") + _flag(model.trust_remote_code)
    if teacher.prefix_caching:
        args.append("--enable-prefix-caching")
    return Engine(
        command=["python3", "-c", bootstrap_text()],
        args=["lmdeploy", *args, *teacher.args],
        env=_keys(secret),
    )


def _transformers(job: JobContext, teacher: Teacher, secret: str) -> Engine:
    model = _model(teacher)
    args = ["--model", model.source, *_revision(teacher), "--port", str(Port.TEACHER)]
    args += ["--device", job.spec.runtime.device.value, "--dtype", model.dtype.value]
    args += _when(teacher.max_context_tokens, "--max-context-tokens") + _flag(model.trust_remote_code)
    return Engine(
        command=["opd-trainer", "serve"],
        args=[*args, *teacher.args],
        env=[secret_variable(API_KEY_VARIABLE, secret, API_KEY)],
    )


def bootstrap_text() -> str:
    """The program that starts an engine without showing its keys, without its module docstring."""
    text = resources.files("opd_operator.children").joinpath("bootstrap_engine.py").read_text()
    return text.split('"""\n', 1)[1].lstrip()


def _model(teacher: Teacher) -> Model:
    if teacher.model is None:
        raise ValueError(f"teacher {teacher.name} has no model to serve")
    return teacher.model


def _revision(teacher: Teacher) -> list[str]:
    return _when(teacher.model.revision if teacher.model else None, "--revision")


def _when(value: object, option: str) -> list[str]:
    return [] if value is None else [option, str(value)]


def _flag(trust: bool) -> list[str]:
    return ["--trust-remote-code"] if trust else []


def _plain(values: dict[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _keys(secret: str) -> list[Manifest]:
    return [
        secret_variable(API_KEY_VARIABLE, secret, API_KEY),
        secret_variable(ADMIN_KEY_VARIABLE, secret, ADMIN_KEY),
    ]


def _probe(path: str, timeout: int, period: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "http"},
        "timeoutSeconds": timeout,
        "periodSeconds": period,
        "failureThreshold": failures,
    }
