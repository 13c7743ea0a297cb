"""Joining or starting Ray, and waiting until it has room for the actors. Every wait has a deadline and names what is missing."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from dataclasses import dataclass

from opd_api.trainer_config import TrainerConfig
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError
from opd_trainer.process_tree import descendants

logger = logging.getLogger(__name__)
RAY_NAMESPACE = "opd"
#: Ray gives a node half a minute to come up and its agents 15 s, whatever the machine is busy with.
START_TRIES = 5
RESOURCE_SECONDS = 900.0
POLL_SECONDS = 2.0
#: CPU slots of a local Ray beside the actors: its own helpers.
SPARE_CPUS = 2


@dataclass(frozen=True, slots=True)
class Demand:
    """What the actors ask Ray for."""

    resource: str  # GPU or CPU
    amount: int


def demand_of(config: TrainerConfig) -> Demand:
    """One unit a learner rank, tensorParallelSize units an engine replica: D of the API."""
    engines = config.rollout.replicas * config.rollout.tensor_parallel_size
    return Demand("GPU" if config.accelerators else "CPU", config.training.gpus + engines)


def in_cluster(config: TrainerConfig) -> bool:
    """True inside a RayJob: the cluster exists already."""
    return bool(os.environ.get("RAY_ADDRESS")) or config.run.progress_config_map is not None


def start_ray(config: TrainerConfig) -> None:
    """Connect (`auto` inside a RayJob) or start a private local Ray; blocks. Raises TrainerError(Infrastructure)."""
    import ray

    demand = demand_of(config)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's own handler takes SIGTERM for a crash and aborts the process three seconds later, in the middle of a save.
    os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"
    for tries in range(1, START_TRIES + 1):
        before = descendants()
        try:
            if in_cluster(config):
                ray.init(address="auto", namespace=RAY_NAMESPACE, logging_level=logging.WARNING)
            else:
                _start_local(demand)
            break
        except Exception as error:  # Ray raises plain exceptions for nodes that do not come up
            ray.shutdown()
            _kill(descendants() - before)
            text = f"Ray cannot be reached or started: {error}"
            if tries == START_TRIES:
                raise TrainerError(FailureClass.INFRASTRUCTURE, Reason.PLACEMENT_FAILED, text) from error
            logger.warning("%s; try %d of %d", text, tries + 1, START_TRIES)
    wait_for_resources(demand, seconds=RESOURCE_SECONDS)


def _kill(pids: set[int]) -> None:
    """Half a node that Ray forgot would take the processor from the next try."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _start_local(demand: Demand) -> None:
    import ray

    amounts = {"num_gpus" if demand.resource == "GPU" else "num_cpus": demand.amount}
    amounts["num_cpus"] = amounts.get("num_cpus", 0) + SPARE_CPUS
    ray.init(
        address="local",
        namespace=RAY_NAMESPACE,
        include_dashboard=False,
        configure_logging=False,
        logging_level=logging.WARNING,
        # Idle workers would import everything that the actors import, at the same moment.
        _system_config={"prestart_worker_first_driver": False},
        **amounts,
    )


def wait_for_resources(demand: Demand, *, seconds: float) -> None:
    """Block until Ray has registered what the actors need. Raises TrainerError(Infrastructure, PlacementFailed)."""
    import ray

    deadline = time.monotonic() + seconds
    told = 0.0
    while True:
        registered = ray.cluster_resources().get(demand.resource, 0.0)
        if registered >= demand.amount:
            return
        nodes = sum(1 for node in ray.nodes() if node["Alive"])
        text = f"the actors need {demand.amount} {demand.resource}, {registered:g} are registered on {nodes} nodes"
        now = time.monotonic()
        if now >= deadline:
            raise TrainerError(
                FailureClass.INFRASTRUCTURE,
                Reason.PLACEMENT_FAILED,
                f"{text} after {seconds:.0f} s; look at the Ray worker pods (Pending, image, readiness)",
            )
        if now - told > 30:
            logger.info("waiting for Ray workers: %s", text)
            told = now
        time.sleep(POLL_SECONDS)


def stop_ray() -> None:
    """Leave the cluster, or end the local one."""
    import ray

    if ray.is_initialized():
        ray.shutdown()
