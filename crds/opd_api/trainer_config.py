"""TrainerConfig: an explicit projection of the spec onto what the trainer reads.

Operator-only fields are not in it, so editing a TTL renames nothing. Every default is filled in. `tests/unit/api` asserts
that the projection covers the spec except for a listed set, and `tests/unit/trainer` that the trainer reads every leaf.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

from pydantic import Field

from opd_api.v1alpha1 import (
    Data,
    Device,
    Diagnostics,
    Distillation,
    Model,
    OPDJobSpec,
    Rollout,
    Routing,
    Student,
    Task,
    TeacherBackend,
    Training,
)
from opd_api.v1alpha1.base import ApiModel, Path, PositiveInt, Seconds, ShortText, TeacherName, Url


class TeacherAddress(ApiModel):
    """Where a teacher answers. A DNS name stands for all its addresses."""

    name: TeacherName = Field(description="Name of the teacher.")
    urls: Annotated[list[Url], Field(max_length=32)] = Field(
        default_factory=list, description="Base URLs; empty for inprocess."
    )
    api_key_env: ShortText | None = Field(None, description="Environment variable with the API key.")
    #: Model id the server reports; None where it cannot be known beforehand (external teachers).
    served_model: Path | None = Field(None, description="Model id that the server must report.")


class Run(ApiModel):
    """Identity and place of one attempt."""

    namespace: ShortText = Field(description="Namespace; `local` for opd run.")
    name: ShortText = Field(description="Name of the OPDJob.")
    uid8: Annotated[str, Field(min_length=8, max_length=8)] = Field(description="First eight characters of the UID.")
    attempt: Annotated[int, Field(ge=1)] = Field(description="Attempt number.")
    directory: Path = Field(description="Run directory.")
    mount_path: Path = Field(description="Where the claim is mounted; hub models live in <mountPath>/hf.")
    progress_config_map: ShortText | None = Field(None, description="ConfigMap to report to; None writes files only.")
    teachers: Annotated[list[TeacherAddress], Field(max_length=32)] = Field(description="Addresses of the teachers.")


class TrainerTeacher(ApiModel):
    """What the trainer needs to know of one teacher."""

    name: TeacherName = Field(description="Name of the teacher.")
    backend: TeacherBackend = Field(description="Protocol, or inprocess.")
    model: Model | None = Field(None, description="Model, where known.")
    tokenizer: Path | None = Field(None, description="Tokenizer source, where known.")
    replicas: PositiveInt = Field(description="Replicas.")
    max_context_tokens: PositiveInt | None = Field(None, description="Context length, where known.")
    request_timeout_seconds: Seconds = Field(description="Deadline of one request, in seconds.")
    max_retries: int = Field(description="Retries after errors of reachable replicas.")
    max_concurrency: PositiveInt = Field(description="Requests in flight per replica.")
    max_tokens_in_flight: PositiveInt | None = Field(None, description="Tokens in flight per replica.")
    weight: float = Field(description="Weight in an ensemble.")
    prefix_caching: bool = Field(description="Send logprob_start_len P-1 (true) or 0.")


class TrainerLifecycle(ApiModel):
    """The deadlines that the trainer itself keeps."""

    teacher_ready_deadline_seconds: Seconds = Field(
        description="How long samples are held for a lost teacher, in seconds."
    )
    preemption_grace_seconds: Seconds = Field(description="Time to save when asked to stop, in seconds.")
    stall_timeout_seconds: Seconds = Field(description="Time without any activity, in seconds.")


class TrainerPreflight(ApiModel):
    """What check and probe do."""

    download: bool = Field(description="Download hub ids once into <mountPath>/hf.")
    samples: PositiveInt = Field(description="Prompts that the teacher probe scores.")
    max_mean_diff_nats: float = Field(description="Largest mean difference of two scores, in nats.")
    max_p99_diff_nats: float = Field(description="Largest 99th percentile of that difference, in nats.")
    check_tokenizer: bool = Field(description="Compare tokenizers.")
    check_context_length: bool = Field(description="Ask for a sequence of full length.")


class TrainerConfig(ApiModel):
    """/etc/opd/job.json."""

    run: Run
    device: Device
    #: True when actors request accelerator units from Ray (num_gpus); False counts CPU actors.
    accelerators: bool
    student: Student
    teachers: list[TrainerTeacher]
    routing: Routing
    distillation: Distillation
    task: Task
    data: Data
    rollout: Rollout
    training: Training
    lifecycle: TrainerLifecycle
    preflight: TrainerPreflight
    diagnostics: Diagnostics

    def to_json(self) -> str:
        """Canonical JSON: the hash in the ConfigMap's name is computed from it."""
        return self.model_dump_json(by_alias=True, indent=1)

    @property
    def content_hash(self) -> str:
        """First ten hex digits of the sha256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:10]

    @property
    def hub_directory(self) -> str:
        """Where downloaded hub models live (HF_HOME)."""
        return f"{self.run.mount_path.rstrip('/')}/hf"


def project(spec: OPDJobSpec, run: Run) -> TrainerConfig:
    """The projection of a spec for one attempt."""
    return TrainerConfig(
        run=run,
        device=spec.runtime.device,
        accelerators=spec.runtime.effective_accelerator_resource is not None,
        student=spec.student,
        teachers=[
            TrainerTeacher(
                name=teacher.name,
                backend=teacher.backend,
                model=teacher.model,
                tokenizer=teacher.tokenizer,
                replicas=teacher.replicas,
                max_context_tokens=teacher.max_context_tokens,
                request_timeout_seconds=teacher.request_timeout_seconds,
                max_retries=teacher.max_retries,
                max_concurrency=teacher.max_concurrency,
                max_tokens_in_flight=teacher.max_tokens_in_flight,
                weight=teacher.weight,
                prefix_caching=teacher.prefix_caching,
            )
            for teacher in spec.teachers
        ],
        routing=spec.routing,
        distillation=spec.distillation,
        task=spec.task,
        data=spec.data,
        rollout=spec.rollout,
        training=spec.training,
        lifecycle=TrainerLifecycle(
            teacher_ready_deadline_seconds=spec.lifecycle.teacher_ready_deadline_seconds,
            preemption_grace_seconds=spec.lifecycle.preemption_grace_seconds,
            stall_timeout_seconds=spec.lifecycle.stall_timeout_seconds,
        ),
        preflight=TrainerPreflight(
            download=spec.preflight.download,
            samples=spec.preflight.samples,
            max_mean_diff_nats=spec.preflight.max_mean_diff_nats,
            max_p99_diff_nats=spec.preflight.max_p99_diff_nats,
            check_tokenizer=spec.preflight.check_tokenizer,
            check_context_length=spec.preflight.check_context_length,
        ),
        diagnostics=spec.diagnostics,
    )
