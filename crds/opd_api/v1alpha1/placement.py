"""Where and how pods run: runtime defaults, placement of a role, storage."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from opd_api.v1alpha1.base import ApiModel, KubernetesObject, Name, Path, Quantity, ShortText
from opd_api.v1alpha1.enums import Device, PullPolicy

NVIDIA_GPU = "nvidia.com/gpu"


class Toleration(ApiModel):
    """A toleration as in a pod spec."""

    key: ShortText | None = Field(
        None, description="Taint key that is tolerated; empty with operator Exists means every key."
    )
    operator: ShortText | None = Field(None, description="Exists or Equal (Kubernetes' default).")
    value: ShortText | None = Field(None, description="Taint value to match when the operator is Equal.")
    effect: ShortText | None = Field(None, description="NoSchedule, PreferNoSchedule or NoExecute; empty matches all.")
    toleration_seconds: int | None = Field(None, description="How long a NoExecute taint is tolerated, in seconds.")


class Resources(ApiModel):
    """Compute resources of the role's main container."""

    requests: Annotated[dict[str, Quantity | int], Field(max_length=16)] = Field(
        default_factory=dict, description="Requested resources, for example {cpu: 8, memory: 64Gi}."
    )
    limits: Annotated[dict[str, Quantity | int], Field(max_length=16)] = Field(
        default_factory=dict, description="Resource limits. Accelerators are added by the operator, not written here."
    )


class Placement(ApiModel):
    """Placement of one role; a role's own value overrides runtime's."""

    node_selector: Annotated[dict[str, ShortText], Field(max_length=32)] | None = Field(
        None, description="Labels that a node must carry."
    )
    tolerations: Annotated[list[Toleration], Field(max_length=32)] | None = Field(
        None,
        description="Tolerations. Roles with accelerators also get {key: acceleratorResource, operator: Exists, effect: NoSchedule}.",
    )
    affinity: KubernetesObject | None = Field(None, description="Affinity as in a pod spec.")
    topology_spread: Annotated[list[KubernetesObject], Field(max_length=8)] | None = Field(
        None, description="topologySpreadConstraints as in a pod spec."
    )
    resources: Resources | None = Field(None, description="Requests and limits of the main container.")


class TemplatedPlacement(Placement):
    """Placement with a pod template that is merged last."""

    template: KubernetesObject | None = Field(
        None,
        description="PodTemplateSpec merged over the generated one: containers and volumes by name, maps by key, other lists replaced.",
    )


class LocalReference(ApiModel):
    """Reference to an object of the same namespace."""

    name: Name = Field(description="Name of the object.")


class SecretKeyReference(ApiModel):
    """One key of a Secret in the job's namespace."""

    name: Name = Field(description="Name of the Secret.")
    key: Name = Field(description="Key inside the Secret.")


class EnvVar(ApiModel):
    """An environment variable of every pod of the job. Secrets belong into valueFrom."""

    name: Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = Field(
        description="Name of the variable."
    )
    value: Annotated[str, Field(max_length=4096)] | None = Field(None, description="Literal value; never a secret.")
    value_from: KubernetesObject | None = Field(
        None, description="EnvVarSource as in a pod spec, for example secretKeyRef."
    )


class Runtime(Placement):
    """What all pods of the job share."""

    image: Name | None = Field(
        None, description="Trainer image; default is the operator's setting (chart images.trainer)."
    )
    image_pull_policy: PullPolicy | None = Field(
        None, description="Always, IfNotPresent or Never; default is the operator's setting."
    )
    image_pull_secrets: Annotated[list[LocalReference], Field(max_length=8)] = Field(
        default_factory=list, description="Pull secrets of every pod."
    )
    device: Device = Field(Device.CUDA, description="What torch and the engines use: cuda or cpu.")
    accelerator_resource: Annotated[str, Field(max_length=128)] | None = Field(
        None,
        description="Resource name that pods with accelerators request. Default nvidia.com/gpu for cuda, none for cpu.",
    )
    env: Annotated[list[EnvVar], Field(max_length=64)] = Field(
        default_factory=list, description="Environment of every pod."
    )
    service_account_name: Name | None = Field(
        None, description="ServiceAccount of the check, probe and teacher pods; the Ray head has one of its own."
    )
    priority_class_name: Name | None = Field(None, description="PriorityClass of every pod.")
    security_context: KubernetesObject | None = Field(
        None,
        description="Pod securityContext that replaces the default (uid, gid and fsGroup 1000, seccomp RuntimeDefault).",
    )

    @property
    def effective_accelerator_resource(self) -> str | None:
        """The resource name to request, or None when no accelerator units are asked for."""
        return accelerator_resource_of(self.accelerator_resource, self.device)


def accelerator_resource_of(named: str | None, device: str) -> str | None:
    """Resource that pods request for an accelerator: the one that `runtime.acceleratorResource` names, else the device's."""
    return named or (NVIDIA_GPU if device == Device.CUDA else None)


class ExtraVolume(ApiModel):
    """A further volume mounted by every role."""

    name: Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] = Field(
        description="Volume name."
    )
    mount_path: Path = Field(description="Where it is mounted.")
    read_only: bool = Field(True, description="Mount read-only.")
    source: KubernetesObject = Field(
        description="Volume source as in a pod spec, for example {hostPath: {path: /models}}."
    )


class Storage(ApiModel):
    """Where models are read from and runs are written to."""

    claim_name: Name | None = Field(
        None, description="PersistentVolumeClaim that every role mounts. `opd run` ignores it."
    )
    mount_path: Path = Field("/data", description="Where the claim is mounted.")
    run_path: Path = Field("opd", description="Folder below mountPath for run directories: <namespace>/<name>-<uid8>.")
    extra_volumes: Annotated[list[ExtraVolume], Field(max_length=16)] = Field(
        default_factory=list, description="Further volumes of every role, for example a node-local model cache."
    )


class Preflight(Placement):
    """Checks before accelerators are taken, and the placement of the check and probe Jobs."""

    enabled: bool = Field(True, description="Run the input check and the teacher probe.")
    download: bool = Field(True, description="Download hub ids once into <mountPath>/hf; false requires local paths.")
    samples: Annotated[int, Field(ge=1, le=64)] = Field(4, description="Prompts that the teacher probe scores.")
    max_mean_diff_nats: Annotated[float, Field(gt=0)] = Field(
        0.02, description="Largest mean difference in nats between two scores of one sequence."
    )
    max_p99_diff_nats: Annotated[float, Field(gt=0)] = Field(
        0.5, description="Largest 99th percentile of that difference; one bf16 unit of a logit is 0.06-0.12 nats."
    )
    check_tokenizer: bool = Field(True, description="Compare tokenizer maps, special ids and EOS sets.")
    check_context_length: bool = Field(True, description="Ask the teacher for a sequence of full length.")
