"""Engines that write the student's responses: a fleet of replicas over Ray."""

from __future__ import annotations

from pathlib import Path

from opd_api.trainer_config import TrainerConfig
from opd_api.v1alpha1 import Device, RolloutEngine
from opd_trainer.rollout.engines.fleet import Fleet
from opd_trainer.rollout.engines.replica import ReplicaHandle, ReplicaSettings
from opd_trainer.rollout.engines.sampling import SamplingSettings

#: Requests that are useful in flight at one replica.
MAX_BATCH = {
    (RolloutEngine.TRANSFORMERS, Device.CPU): 64,
    (RolloutEngine.TRANSFORMERS, Device.CUDA): 256,
    (RolloutEngine.SGLANG, Device.CPU): 16,
    (RolloutEngine.SGLANG, Device.CUDA): 512,
}

__all__ = ["Fleet", "create_engine", "replica_settings"]


def replica_settings(config: TrainerConfig, index: int) -> ReplicaSettings:
    """What replica `index` has to know."""
    sampling = config.rollout.sampling
    return ReplicaSettings(
        index=index,
        device=config.device,
        dtype=config.training.dtype.value,
        tensor_parallel_size=config.rollout.tensor_parallel_size,
        sampling=SamplingSettings(sampling.temperature, sampling.top_p, sampling.top_k),
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
        max_batch=MAX_BATCH[config.rollout.engine, config.device],
        seed=config.training.seed,
        trust_remote_code=config.student.model.trust_remote_code,
        log_directory=Path(config.run.directory) / "logs" / f"attempt-{config.run.attempt}",
        start_deadline_seconds=float(config.lifecycle.stall_timeout_seconds),
    )


def create_engine(config: TrainerConfig) -> Fleet:
    """The fleet of a run. Ray must be initialised when it starts."""
    from opd_trainer.rollout.engines import actors

    tensor_parallel_size = config.rollout.tensor_parallel_size

    def make(index: int) -> ReplicaHandle:
        return actors.RayReplica(
            config.rollout.engine,
            replica_settings(config, index),
            accelerators=config.accelerators,
        )

    return Fleet(
        make,
        replicas=config.rollout.replicas,
        concurrency_per_replica=MAX_BATCH[config.rollout.engine, config.device],
        start_deadline=float(config.lifecycle.stall_timeout_seconds),
        drain_deadline=float(config.lifecycle.stall_timeout_seconds),
        describe_resources=lambda: actors.missing_resources(
            accelerators=config.accelerators, tensor_parallel_size=tensor_parallel_size
        ),
    )
