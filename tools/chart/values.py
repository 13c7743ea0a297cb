"""The values of charts/opd-operator as models; values.schema.json is generated from them.

`python tools/chart/values.py` writes the schema, with `--check` it fails when the checked-in one is stale. The defaults here
and in values.yaml are the same (tests/unit/chart compares them).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

CHART = Path(__file__).resolve().parents[2] / "charts" / "opd-operator"
SCHEMA_FILE = CHART / "values.schema.json"

Labels = dict[str, str]
KubernetesObject = dict[str, Any]
Name = Annotated[str, Field(pattern=r"^$|^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
Namespace = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Image = Annotated[str, Field(pattern=r"^\S+$", min_length=1)]
Seconds = Annotated[float, Field(gt=0)]
Interval = Annotated[str, Field(pattern=r"^[0-9]+(ms|s|m|h)$")]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]


class Values(BaseModel):
    """Base of all: camelCase names, unknown values refused."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", populate_by_name=True)


class Images(Values):
    """Full references."""

    operator: Image = Field("opd-operator:0.1.0", description="Image of the operator.")
    trainer: Image = Field("opd-trainer:0.1.0", description="Image of trainers, checks and transformers teachers.")
    sglang: Image = Field("lmsysorg/sglang:v0.5.23", description="Image of sglang teachers.")
    vllm: Image = Field("vllm/vllm-openai:v0.33.0", description="Image of vllm teachers.")
    lmdeploy: Image = Field("openmmlab/lmdeploy:v0.18.0", description="Image of lmdeploy teachers.")
    pull_policy: PullPolicy = Field("IfNotPresent", description="Pull policy of the operator's image.")
    pull_secrets: list[Name] = Field(default_factory=list, description="Secrets for the operator's image.")


class Crds(Values):
    """The CRD."""

    enabled: bool = Field(True, description="Install and upgrade the CRD with the chart.")
    keep: bool = Field(True, description="Leave the CRD and all OPDJobs when the chart is uninstalled.")


class LeaderElection(Values):
    """The Lease."""

    enabled: bool = Field(True, description="Elect one active replica.")
    duration_seconds: Seconds = Field(15, description="Term of the Lease, in seconds.")
    renew_seconds: Seconds = Field(10, description="A leader that could not renew for so long stops, in seconds.")
    retry_seconds: Seconds = Field(2, description="Time between two looks at the Lease, in seconds.")


class ServiceAccount(Values):
    """The operator's account."""

    create: bool = Field(True, description="Create it.")
    name: Name = Field("", description="Its name; default is the chart's full name.")
    annotations: Labels = Field(default_factory=dict, description="Annotations on it.")


class Rbac(Values):
    """Rights."""

    create: bool = Field(True, description="Create the roles and their bindings.")
    aggregate: bool = Field(True, description="Add OPDJobs to the built-in roles view, edit and admin.")


class Defaults(Values):
    """What OPDJobs inherit."""

    image_pull_policy: PullPolicy = Field("IfNotPresent", description="Pull policy of the jobs' images.")
    ray_version: str = Field("2.60.0", description="Ray version in the trainer image.")
    cluster_domain: str = Field("cluster.local", description="DNS domain of the cluster.")
    kuberay_operator_name: str = Field(
        "kuberay-operator", description="Label app.kubernetes.io/name of the KubeRay operator's pods."
    )


class Operator(Values):
    """Pace of the operator."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Log level.")
    workers: Annotated[int, Field(ge=1, le=256)] = Field(8, description="Jobs that are worked on at the same time.")
    api_timeout_seconds: Seconds = Field(30, description="Deadline of one call to the API server, in seconds.")
    resync_seconds: Seconds = Field(600, description="Time between two full lists, in seconds.")
    watch_stale_seconds: Seconds = Field(300, description="Silence of a watch that fails liveness, in seconds.")
    retry_backoff_seconds: Seconds = Field(10, description="Wait before the first retry of a job, in seconds.")
    retry_backoff_max_seconds: Seconds = Field(600, description="Longest wait before a retry, in seconds.")
    capacity_backoff_min_seconds: Seconds = Field(60, description="Shortest wait for capacity, in seconds.")
    capacity_backoff_max_seconds: Seconds = Field(600, description="Longest wait for capacity, in seconds.")
    training_status_seconds: Seconds = Field(30, description="Time between two writes of progress, in seconds.")


class MetricsService(Values):
    """Service of the operator's metrics."""

    enabled: bool = Field(True, description="Create it.")


class ServiceMonitor(Values):
    """Scrapes the operator."""

    enabled: bool = Field(False, description="Create it; needs the Prometheus operator.")
    interval: Interval = Field("30s", description="Scrape interval.")
    labels: Labels = Field(default_factory=dict, description="Further labels, as Prometheus selects by.")


class PodMonitor(Values):
    """Scrapes heads and teachers of all jobs."""

    enabled: bool = Field(False, description="Create it; needs the Prometheus operator.")
    interval: Interval = Field("15s", description="Scrape interval.")
    labels: Labels = Field(default_factory=dict, description="Further labels, as Prometheus selects by.")


class Metrics(Values):
    """Monitoring."""

    service: MetricsService = Field(default_factory=MetricsService, description="Service of the operator's metrics.")
    service_monitor: ServiceMonitor = Field(default_factory=ServiceMonitor, description="Scrapes the operator.")
    pod_monitor: PodMonitor = Field(default_factory=PodMonitor, description="Scrapes heads and teachers of all jobs.")


class PodDisruptionBudget(Values):
    """For several replicas."""

    enabled: bool = Field(False, description="Create a PodDisruptionBudget with maxUnavailable 1.")


class ChartValues(Values):
    """Values of charts/opd-operator."""

    fullname_override: Name = Field("", description="Name of everything that the chart creates.")
    images: Images = Field(default_factory=Images, description="Images.")
    watch_namespaces: list[Namespace] = Field(default_factory=list, description="Namespaces to serve; empty: all.")
    crds: Crds = Field(default_factory=Crds, description="The OPDJob CRD.")
    replicas: Annotated[int, Field(ge=0, le=10)] = Field(1, description="Replicas of the operator.")
    leader_election: LeaderElection = Field(
        default_factory=LeaderElection, description="Election of the active replica."
    )
    service_account: ServiceAccount = Field(default_factory=ServiceAccount, description="The operator's account.")
    rbac: Rbac = Field(default_factory=Rbac, description="Rights.")
    defaults: Defaults = Field(default_factory=Defaults, description="What OPDJobs inherit.")
    operator: Operator = Field(default_factory=Operator, description="Pace of the operator.")
    metrics: Metrics = Field(default_factory=Metrics, description="Monitoring.")
    pod_disruption_budget: PodDisruptionBudget = Field(
        default_factory=PodDisruptionBudget, description="For several replicas."
    )
    resources: KubernetesObject = Field(
        default_factory=lambda: {"requests": {"cpu": "100m", "memory": "192Mi"}, "limits": {"memory": "512Mi"}},
        description="Resources of the operator.",
    )
    pod_security_context: KubernetesObject = Field(
        default_factory=lambda: {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        description="Security context of the operator's pod.",
    )
    security_context: KubernetesObject = Field(
        default_factory=lambda: {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        description="Security context of the operator's container.",
    )
    priority_class_name: Name = Field("", description="PriorityClass of the operator.")
    node_selector: Labels = Field(default_factory=dict, description="Node selector of the operator.")
    tolerations: list[KubernetesObject] = Field(default_factory=list, description="Tolerations of the operator.")
    affinity: KubernetesObject = Field(default_factory=dict, description="Affinity of the operator.")
    pod_annotations: Labels = Field(default_factory=dict, description="Annotations of the operator's pod.")
    pod_labels: Labels = Field(default_factory=dict, description="Labels of the operator's pod.")
    common_labels: Labels = Field(default_factory=dict, description="Labels on everything that the chart creates.")
    global_: KubernetesObject = Field(
        default_factory=dict, alias="global", description="Set by Helm in a parent chart; not used."
    )


def schema_text() -> str:
    """values.schema.json. Helm checks a user's values against it before it renders anything."""
    schema = ChartValues.model_json_schema(by_alias=True)
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    # draft 7 calls them definitions
    return json.dumps(schema, indent=2).replace('"$defs"', '"definitions"').replace("#/$defs/", "#/definitions/") + "\n"


def main() -> int:
    """Writes the schema, or with --check compares it."""
    text = schema_text()
    if "--check" not in sys.argv[1:]:
        SCHEMA_FILE.write_text(text)
        return 0
    if not SCHEMA_FILE.exists() or SCHEMA_FILE.read_text() != text:
        print(f"{SCHEMA_FILE.name} is stale: run make generate", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
