"""Settings of the operator: read once from the environment, units in the names, checked when read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, get_type_hints

from opd_api.v1alpha1 import PullPolicy, TeacherBackend

#: Every setting is read from this prefix and the field's name in capitals: OPD_OPERATOR_TRAINER_IMAGE.
PREFIX = "OPD_OPERATOR_"
TRUE_WORDS = MappingProxyType({"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False})


class SettingsError(ValueError):
    """A setting cannot be used; the message names the variable and what it may be."""


@dataclass(frozen=True)
class Settings:
    """What decisions depend on (first part) and how the process runs (second part)."""

    # --- children ---
    trainer_image: str = "opd-trainer:0.1.0"
    sglang_image: str = "lmsysorg/sglang:v0.5.23"
    vllm_image: str = "vllm/vllm-openai:v0.33.0"
    lmdeploy_image: str = "openmmlab/lmdeploy:v0.18.0"
    image_pull_policy: PullPolicy = PullPolicy.IF_NOT_PRESENT
    ray_version: str = "2.60.0"
    cluster_domain: str = "cluster.local"
    #: Value of app.kubernetes.io/name of the KubeRay operator's pods, which may reach the Ray dashboard.
    kuberay_operator_name: str = "kuberay-operator"

    # --- pace ---
    retry_backoff_seconds: float = 10.0
    retry_backoff_max_seconds: float = 600.0
    capacity_backoff_min_seconds: float = 60.0
    capacity_backoff_max_seconds: float = 600.0
    #: status.training is patched at most this often while nothing else changes.
    training_status_seconds: float = 30.0
    #: Two watches may tell of one happening in any order; how long one waits for the other.
    settle_seconds: float = 5.0
    head_not_ready_seconds: float = 60.0
    #: Added to preemptionGraceSeconds before a new attempt starts though pods of the old one are still there.
    old_pods_extra_seconds: float = 60.0
    #: A teacher container that restarted so often will not become ready by waiting.
    teacher_crash_restarts: int = 5

    # --- process ---
    #: Namespaces to watch; empty means all.
    watch_namespaces: tuple[str, ...] = ()
    workers: int = 8
    resync_seconds: float = 600.0
    api_timeout_seconds: float = 30.0
    leader_election: bool = True
    lease_name: str = "opd-operator"
    lease_namespace: str = "opd-system"
    lease_duration_seconds: float = 15.0
    lease_renew_seconds: float = 10.0
    lease_retry_seconds: float = 2.0
    #: Name of this process in the Lease; the pod's name in a cluster.
    identity: str = "opd-operator"
    http_port: int = 8080
    watch_stale_seconds: float = 300.0
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        """Refuse values that no cluster could live with. Raises SettingsError."""
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise SettingsError(f"{PREFIX}{item.name.upper()} must be greater than 0, not {value}")
        if self.capacity_backoff_min_seconds > self.capacity_backoff_max_seconds:
            raise SettingsError(f"{PREFIX}CAPACITY_BACKOFF_MIN_SECONDS must not exceed …MAX_SECONDS")
        if self.retry_backoff_seconds > self.retry_backoff_max_seconds:
            raise SettingsError(f"{PREFIX}RETRY_BACKOFF_SECONDS must not exceed {PREFIX}RETRY_BACKOFF_MAX_SECONDS")
        if not self.lease_retry_seconds < self.lease_renew_seconds < self.lease_duration_seconds:
            raise SettingsError("lease seconds must satisfy retry < renew < duration")

    def image_of(self, backend: TeacherBackend) -> str:
        """Image of a managed teacher that names none."""
        return {
            TeacherBackend.SGLANG: self.sglang_image,
            TeacherBackend.VLLM: self.vllm_image,
            TeacherBackend.LMDEPLOY: self.lmdeploy_image,
        }.get(backend, self.trainer_image)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Read OPD_OPERATOR_*. Raises SettingsError for an unknown variable or a value of the wrong form."""
        hints = get_type_hints(cls)
        names = {PREFIX + item.name.upper(): item.name for item in fields(cls)}
        values: dict[str, Any] = {}
        for variable, text in environment.items():
            if not variable.startswith(PREFIX):
                continue
            if variable not in names:
                raise SettingsError(f"{variable} is no setting; the settings are {', '.join(sorted(names))}")
            name = names[variable]
            values[name] = _parse(variable, text, hints[name])
        return cls(**values)


def _parse(variable: str, text: str, kind: Any) -> Any:
    """One value of the environment as the type of its field."""
    if kind is bool:
        if text.lower() not in TRUE_WORDS:
            raise SettingsError(f"{variable} must be true or false, not {text!r}")
        return TRUE_WORDS[text.lower()]
    if kind == tuple[str, ...]:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return kind(text)
    except ValueError as error:
        raise SettingsError(f"{variable}={text!r} cannot be read as {kind.__name__}") from error
