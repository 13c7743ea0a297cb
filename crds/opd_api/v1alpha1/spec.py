"""OPDJob: metadata, spec and the numbers that follow from it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from opd_api.v1alpha1.base import ApiModel, ShortText
from opd_api.v1alpha1.models import Routing, Student, Teacher
from opd_api.v1alpha1.objective import Distillation, Task
from opd_api.v1alpha1.placement import Preflight, Runtime, Storage
from opd_api.v1alpha1.run import Data, Diagnostics, Lifecycle, NetworkPolicy, Ray, Rollout, Training
from opd_api.v1alpha1.status import OPDJobStatus


class OPDJobSpec(ApiModel):
    """What a user wants."""

    suspend: bool = Field(False, description="true frees every accelerator after a checkpoint; may change at any time.")
    acknowledge: Annotated[list[ShortText], Field(max_length=16)] = Field(
        default_factory=list, description="Codes of overridable rules that the author knowingly breaks."
    )
    runtime: Runtime = Field(
        default_factory=Runtime, description="Image, device, environment and placement shared by all pods."
    )
    storage: Storage = Field(default_factory=Storage, description="Where models are read from and runs are written to.")
    student: Student = Field(description="The model that learns.")
    teachers: Annotated[
        list[Teacher],
        Field(
            min_length=1,
            max_length=32,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = Field(description="The models that score.")
    routing: Routing = Field(default_factory=Routing, description="Which teacher scores which sample.")
    distillation: Distillation = Field(default_factory=Distillation, description="The distillation signal.")
    task: Task = Field(default_factory=Task, description="Task reward and how it is mixed in.")
    data: Data = Field(description="The prompts.")
    rollout: Rollout = Field(default_factory=Rollout, description="How the student writes its answers.")
    training: Training = Field(description="How the student is trained.")
    ray: Ray = Field(default_factory=Ray, description="The Ray cluster of the student.")
    lifecycle: Lifecycle = Field(default_factory=Lifecycle, description="Deadlines, retries and cleanup.")
    preflight: Preflight = Field(default_factory=Preflight, description="Checks before accelerators are taken.")
    diagnostics: Diagnostics = Field(
        default_factory=Diagnostics, description="What the trainer records besides metrics."
    )
    network_policy: NetworkPolicy = Field(default_factory=NetworkPolicy, description="Ingress rules of the job's pods.")

    @property
    def demand(self) -> int:
        """Accelerator units (or CPU actors) of the student: D = training.gpus + rollout.replicas * tensorParallelSize."""
        return self.training.gpus + self.rollout.replicas * self.rollout.tensor_parallel_size

    @property
    def gpus_per_worker(self) -> int:
        """Units of one Ray worker pod: the user's value or min(8, D)."""
        return self.ray.workers.gpus_per_worker or min(8, self.demand)

    @property
    def worker_count(self) -> int:
        """Ray worker pods, by first fit: engines (tensorParallelSize units each) first, then single-unit learners."""
        size = self.gpus_per_worker
        free: list[int] = []
        for need in [self.rollout.tensor_parallel_size] * self.rollout.replicas + [1] * self.training.gpus:
            for index, room in enumerate(free):
                if room >= need:
                    free[index] -= need
                    break
            else:
                free.append(size - need)
        return len(free)


class ObjectMeta(BaseModel):
    """The part of Kubernetes' object metadata that is read; the rest is kept as it is."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(description="Name of the job.")
    namespace: str | None = Field(None, description="Namespace of the job.")
    labels: dict[str, str] = Field(default_factory=dict, description="Labels.")
    annotations: dict[str, str] = Field(default_factory=dict, description="Annotations.")


class OPDJob(ApiModel):
    """One on-policy distillation run."""

    api_version: Literal["opd.dev/v1alpha1"] = Field("opd.dev/v1alpha1", description="opd.dev/v1alpha1.")
    kind: Literal["OPDJob"] = Field("OPDJob", description="OPDJob.")
    metadata: ObjectMeta = Field(description="Object metadata.")
    spec: OPDJobSpec = Field(description="What a user wants.")
    status: OPDJobStatus | None = Field(None, description="What the operator observes.")

    @classmethod
    def parse(cls, document: dict[str, Any]) -> OPDJob:
        """Parse a manifest. Raises pydantic.ValidationError; `opd_api.rules.check_document` turns that into findings."""
        return cls.model_validate(document)
