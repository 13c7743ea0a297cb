"""Joining Ray: what is asked for, what is missing, and when to try again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from controller_fakes import trainer_config

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer import ray_runtime
from opd_trainer.errors import TrainerError
from opd_trainer.ray_runtime import Demand, demand_of, in_cluster, start_ray, wait_for_resources


class FakeRay:
    """Stands for the functions of `ray` that the module calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, resources: dict[str, float]) -> None:
        self.resources = resources
        self.inits: list[dict[str, Any]] = []
        self.failures = 0
        monkeypatch.setattr(ray, "init", self.init)
        monkeypatch.setattr(ray, "shutdown", lambda: None)
        monkeypatch.setattr(ray, "cluster_resources", lambda: self.resources)
        monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": False}])

    def init(self, **options: Any) -> None:
        self.inits.append(options)
        if len(self.inits) <= self.failures:
            raise Exception("The current node timed out during startup")


def test_the_demand_is_one_unit_a_rank_and_the_engines(tmp_path: Path) -> None:
    config = trainer_config(
        tmp_path,
        runtime={"device": "cpu", "acceleratorResource": "nvidia.com/gpu"},
        rollout={"replicas": 2, "tensorParallelSize": 4},
        training={"gpus": 3},
    )
    assert demand_of(config) == Demand("GPU", 11)
    assert demand_of(trainer_config(tmp_path)) == Demand("CPU", 2)


def test_what_is_missing_is_named_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRay(monkeypatch, {"GPU": 4.0, "CPU": 64.0})
    with pytest.raises(TrainerError, match="need 8 GPU, 4 are registered on 1 nodes") as error:
        wait_for_resources(Demand("GPU", 8), seconds=0)
    assert (error.value.failure.failure_class, error.value.failure.reason) == (
        FailureClass.INFRASTRUCTURE,
        Reason.PLACEMENT_FAILED,
    )


def test_workers_that_join_late_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch, {})
    monkeypatch.setattr(ray_runtime.time, "sleep", lambda _seconds: fake.resources.update(GPU=8.0))
    wait_for_resources(Demand("GPU", 8), seconds=60)


def test_inside_a_ray_job_the_cluster_is_joined_and_none_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRay(monkeypatch, {"CPU": 8.0})
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    config = trainer_config(tmp_path)
    assert in_cluster(config)
    start_ray(config)
    assert [options["address"] for options in fake.inits] == ["auto"]


def test_a_local_ray_has_room_for_every_actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch, {"CPU": 8.0})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    start_ray(trainer_config(tmp_path, training={"gpus": 2}))
    (options,) = fake.inits
    assert options["address"] == "local"
    assert options["num_cpus"] >= 3


def test_a_start_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch, {"CPU": 8.0})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    fake.failures = 2
    start_ray(trainer_config(tmp_path))
    assert len(fake.inits) == 3


def test_a_ray_that_never_starts_is_an_infrastructure_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch, {})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    fake.failures = 1000
    with pytest.raises(TrainerError, match="timed out during startup") as error:
        start_ray(trainer_config(tmp_path))
    assert error.value.failure.failure_class is FailureClass.INFRASTRUCTURE
    assert len(fake.inits) == ray_runtime.START_TRIES
