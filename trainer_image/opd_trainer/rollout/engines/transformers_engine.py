"""The in-process engine: Hugging Face model and our own continuous batching. For CPUs and for models without an engine."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from opd_api.v1alpha1 import Device
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import Failure
from opd_trainer.interfaces import GenerateResult
from opd_trainer.rollout.engines.decoding import Decoder, Row
from opd_trainer.rollout.engines.generator import Generator
from opd_trainer.rollout.engines.replica import ReplicaSettings, ReplicaStatus
from opd_trainer.rollout.engines.student_model import end_tokens, load_student, load_weights

log = logging.getLogger(__name__)

#: One step or one prefill that takes longer than this is taken for a hang.
STALLED_SECONDS = 300.0


def _failure(message: str, failure_class: FailureClass = FailureClass.INFRASTRUCTURE) -> Failure:
    return Failure(failure_class, Reason.ENGINE_FAILED, message)


class TransformersReplica:
    """A replica that holds the model itself; the Ray actor is the process to watch."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._generator: Generator | None = None
        self._vocabulary = 0

    async def start(self, weights: str, version: int) -> Failure | None:
        """Load the model and start the generator's thread."""
        try:
            await asyncio.to_thread(self._start, Path(weights), version)
        except (OSError, ValueError) as error:
            return _failure(f"the student cannot be loaded from {weights}: {error}", FailureClass.CONFIG)
        except torch.OutOfMemoryError as error:
            return _failure(f"the student does not fit: {error}", FailureClass.CONFIG)
        return None

    def _start(self, folder: Path, version: int) -> None:
        settings = self._settings
        if settings.device is Device.CPU:
            # Ray sets OMP_NUM_THREADS to the actor's CPU share, which may be one; rollouts and updates take turns.
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))
        model = load_student(
            folder, dtype=settings.dtype, device=settings.device.value, trust_remote_code=settings.trust_remote_code
        )
        end_ids = end_tokens(folder, trust_remote_code=settings.trust_remote_code)
        if not end_ids:
            log.warning("no end-of-sequence token is known: every response runs to its limit")
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        decoder = Decoder(
            model,
            settings=settings.sampling,
            end_ids=end_ids,
            pad_id=0,
            seed=(settings.seed << 16) + settings.index,
        )
        self._generator = Generator(
            decoder, lambda path: load_weights(model, path), version=version, max_batch=settings.max_batch
        )

    async def generate(self, prompt_ids: NDArray[np.int32], max_tokens: int, top_k: int) -> GenerateResult | Failure:
        """One response; a prompt that the model cannot take is a DATA failure."""
        if self._generator is None:
            return _failure("the engine is not started")
        if int(prompt_ids.max()) >= self._vocabulary or int(prompt_ids.min()) < 0:
            return Failure(
                FailureClass.DATA, Reason.DATA_ERROR, f"the prompt has a token id outside 0..{self._vocabulary - 1}"
            )
        row = Row(prompt_ids.astype(np.int64), max_tokens, min(top_k, self._vocabulary))
        try:
            return await asyncio.wrap_future(self._generator.submit(row))
        except RuntimeError as error:
            return _failure(str(error))

    async def load(self, weights: str, version: int, abort: bool) -> Failure | None:
        """New weights between two batches."""
        if self._generator is None:
            return _failure("the engine is not started")
        try:
            await asyncio.wrap_future(self._generator.load(Path(weights), version, abort=abort))
        except (OSError, ValueError, RuntimeError) as error:
            return _failure(f"weights {version} cannot be loaded: {error}")
        return None

    async def status(self) -> ReplicaStatus:
        """Alive while the generator's thread is."""
        if self._generator is None or not self._generator.alive:
            return ReplicaStatus(False, None, "the generator's thread has ended")
        stalled = self._generator.stalled_seconds()
        message = f"no token for {stalled:.0f} s" if stalled > STALLED_SECONDS else ""
        return ReplicaStatus(True, self._generator.version, message, answers=not message)

    async def stop(self) -> None:
        """End the thread."""
        if self._generator is not None:
            await asyncio.to_thread(self._generator.stop)
