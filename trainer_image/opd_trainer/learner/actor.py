"""The Ray side of one rank. Failures are returned: an exception would lose its class and reason on the way."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from opd_api.trainer_config import TrainerConfig
from opd_api.v1alpha1 import Device
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import Failure, TrainerError
from opd_trainer.learner import process_group
from opd_trainer.learner.rank import LearnerRank, RankFacts
from opd_trainer.learner.step import RankResult, RankWork

logger = logging.getLogger(__name__)

#: A CPU rank shares its machine with engines and teachers.
_MOST_CPU_THREADS = 4


class RankActor:
    """One process of the group. Made by `LearnerGroup` through `ray.remote`."""

    def __init__(self, config: str, rank: int, ranks: int, total_steps: int, collective_seconds: float) -> None:
        self._config = TrainerConfig.model_validate_json(config)
        self._rank = rank
        self._ranks = ranks
        self._total_steps = total_steps
        self._timeout = timedelta(seconds=collective_seconds)
        self._store: dist.TCPStore | None = None
        self._learner: LearnerRank | None = None
        logging.basicConfig(level=logging.INFO)
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, min(_MOST_CPU_THREADS, cores // ranks)))

    def pid(self) -> int:
        """For diagnostics."""
        return os.getpid()

    def open_store(self) -> tuple[str, int] | Failure:
        """Rank 0: address of the store through which the ranks find each other."""

        def run() -> tuple[str, int]:
            host = ray.util.get_node_ip_address()
            self._store = process_group.open_store(host, self._ranks, self._timeout)
            return host, self._store.port

        return self._guarded(run)

    def join(self, host: str, port: int) -> Failure | None:
        """All ranks: into one process group."""
        return self._guarded(
            lambda: process_group.join(
                host=host,
                port=port,
                rank=self._rank,
                world_size=self._ranks,
                device=self._config.device.value,
                timeout=self._timeout,
                store=self._store,
            )
        )

    def start(self, checkpoint: str | None) -> RankFacts | Failure:
        """Load the models."""

        def run() -> RankFacts:
            self._learner = LearnerRank(self._config, total_steps=self._total_steps)
            return self._learner.start(None if checkpoint is None else Path(checkpoint))

        return self._guarded(run)

    def step(self, work: RankWork) -> RankResult | Failure:
        """One step."""
        return self._guarded(lambda: self._ready.step(work))

    def publish(self, directory: str) -> Failure | None:
        """Weights for the engines."""
        return self._guarded(lambda: self._ready.publish(Path(directory)))

    def save(self, directory: str) -> Failure | None:
        """A checkpoint's shards."""
        return self._guarded(lambda: self._ready.save(Path(directory)))

    def export(self, directory: str) -> Failure | None:
        """The final student."""
        return self._guarded(lambda: self._ready.export(Path(directory)))

    @property
    def _ready(self) -> LearnerRank:
        if self._learner is None:
            raise RuntimeError("the rank was not started")
        return self._learner

    def _guarded(self, function: Callable[[], Any]) -> Any:
        """The result, or the failure as a value."""
        try:
            return function()
        except TrainerError as error:
            return error.failure
        except torch.OutOfMemoryError as error:
            return Failure(
                FailureClass.CONFIG,
                Reason.NOT_ENOUGH_MEMORY,
                f"rank {self._rank} ran out of accelerator memory: {str(error).splitlines()[0]}; lower"
                " training.maxTokensPerMicroBatch, or raise training.gpus",
            )
        except dist.DistError as error:
            logger.exception("rank %d lost its peers", self._rank)
            return Failure(
                FailureClass.INFRASTRUCTURE,
                Reason.LEARNER_FAILED,
                f"rank {self._rank} lost the other ranks: {str(error).splitlines()[0]}",
            )
        except Exception as error:
            logger.exception("rank %d failed", self._rank)
            return self._unknown(error)

    def _unknown(self, error: Exception) -> Failure:
        text = str(error).splitlines()
        where = traceback.extract_tb(error.__traceback__)[-1]
        # gloo reports a peer that is gone as a plain RuntimeError.
        lost = isinstance(error, RuntimeError) and any(word in str(error) for word in ("Connection closed", "gloo/"))
        return Failure(
            FailureClass.INFRASTRUCTURE if lost else FailureClass.INTERNAL,
            Reason.LEARNER_FAILED,
            f"rank {self._rank} ({self._device}): {type(error).__name__}: {text[0] if text else ''}"
            f" ({Path(where.filename).name}:{where.lineno})",
        )

    @property
    def _device(self) -> Device:
        return self._config.device
