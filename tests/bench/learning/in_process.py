"""The trainer's parts in one process, without Ray: the real controller, engine, teacher server, teacher client and learner.

Only the wrapping differs from a run on a cluster: the engine's generator and the learner's rank are called here and not
through actors, nothing is checkpointed, and every published version is kept for the measurement from outside.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from aiohttp import web
from numpy.typing import NDArray

from opd_api.trainer_config import TrainerConfig
from opd_trainer.controller import Parts
from opd_trainer.errors import Failure
from opd_trainer.interfaces import GenerateResult, StepResult
from opd_trainer.learner.process_group import open_store
from opd_trainer.learner.rank import LearnerRank
from opd_trainer.learner.work import split
from opd_trainer.rollout.data import PromptEncoder, PromptStream, load_records
from opd_trainer.rollout.engines.decoding import Decoder, Row
from opd_trainer.rollout.engines.generator import Generator
from opd_trainer.rollout.engines.sampling import SamplingSettings
from opd_trainer.rollout.engines.student_model import end_tokens, load_student, load_weights
from opd_trainer.sample import Sample, SampleState
from opd_trainer.teachers.pool import TeacherPool
from opd_trainer.teachers.scoring import TeacherModel
from opd_trainer.teachers.server import ServerSettings, TeacherServer

#: Requests in flight; more than a step has.
CONCURRENCY = 64


class Engine:
    """`interfaces.RolloutEngine` around one generator."""

    concurrency = CONCURRENCY

    def __init__(self, config: TrainerConfig, started: Callable[[], None]) -> None:
        self._config, self._started = config, started
        self._generator: Generator | None = None

    def prepare(self) -> None:
        """Nothing comes up beforehand."""

    async def start(self, weights: Path, version: int) -> None:
        """Load the published weights; the last thing before the first rollout."""
        self._generator = await asyncio.to_thread(self._load, weights, version)
        self._started()

    def _load(self, weights: Path, version: int) -> Generator:
        sampling = self._config.rollout.sampling
        model = load_student(weights, dtype=self._config.training.dtype.value, device="cpu", trust_remote_code=False)
        decoder = Decoder(
            model,
            settings=SamplingSettings(sampling.temperature, sampling.top_p, sampling.top_k),
            end_ids=end_tokens(weights),
            pad_id=0,
            seed=self._config.training.seed,
        )
        return Generator(decoder, lambda folder: load_weights(model, folder), version=version, max_batch=CONCURRENCY)

    async def generate(
        self, prompt_ids: NDArray[np.int32], *, group_id: int, max_tokens: int, top_k: int = 0
    ) -> GenerateResult:
        """One response."""
        assert self._generator is not None
        return await asyncio.wrap_future(self._generator.submit(Row(prompt_ids.astype(np.int64), max_tokens, top_k)))

    async def update_weights(self, weights: Path, version: int, *, abort: bool) -> None:
        """Between two batches."""
        assert self._generator is not None
        await asyncio.wrap_future(self._generator.load(weights, version, abort=abort))

    async def stop(self) -> None:
        """End the generator's thread."""
        if self._generator is not None:
            await asyncio.to_thread(self._generator.stop)


class Learner:
    """`interfaces.Learner` around one rank in a thread of its own."""

    def __init__(self, config: TrainerConfig, total_steps: int) -> None:
        self._config = config
        self._rank = LearnerRank(config, total_steps=total_steps)
        self._thread = ThreadPoolExecutor(1, "learner")

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def start(self, checkpoint: Path | None) -> None:
        """A process group of one, and the models."""
        store = open_store("127.0.0.1", 1, timedelta(seconds=120))
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        self._layout = (await self._call(self._rank.start, checkpoint)).layout

    async def step(self, samples: list[Sample], step: int) -> StepResult:
        """As the group of ranks does it."""
        [work] = split(self._config, samples, ranks=1, layout=self._layout)
        result = await self._call(self._rank.step, work)
        return StepResult(result.metrics, result.old_logprobs, result.teacher_logprobs)

    async def publish(self, directory: Path) -> None:
        """Weights for the engine."""
        await self._call(self._rank.publish, directory)

    async def save(self, directory: Path) -> None:
        """No checkpoints here."""

    async def export(self, directory: Path) -> None:
        """The student after the last step."""
        await self._call(self._rank.export, directory)

    async def stop(self) -> None:
        """Leave the process group."""
        self._thread.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()


class NoStore:
    """`Store` that keeps nothing."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def begin(self, step: int) -> Path:
        """A folder that stays empty."""
        return self._directory

    def commit(self, path: Path, controller_state: dict[str, Any]) -> Path:
        """Nothing to name."""
        return path


class StepClock:
    """Both observers of the controller: seconds of wall and processor at the end of each step, from the first rollout."""

    def __init__(self, weights: Path, keep: Path, every: int) -> None:
        self._weights, self._keep, self._every = weights, keep, every
        self.steps: list[dict[str, float]] = []

    def start(self) -> None:
        """Time counts from here."""
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def step(
        self, step: int, metrics: dict[str, float], samples: list[Sample], states: Mapping[SampleState, int]
    ) -> None:
        """The controller calls this when a step's weights are with the engine."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        lengths = [sample.response_length for sample in samples]
        self.steps.append(
            {
                "step": step,
                "seconds": wall,
                "cpu_seconds": cpu,
                "length": sum(lengths) / len(lengths),
            }
        )
        print(f"step {step}: {wall:.1f} s, " + ", ".join(f"{k} {v:.3g}" for k, v in sorted(metrics.items())))

    def published(self, version: int) -> None:
        """Keep a version: its files get a second name before they are pruned."""
        if version % self._every == 0:
            self.keep(version, self._weights / f"v{version}")

    def keep(self, version: int, folder: Path) -> None:
        """Link a folder of weights into the kept ones."""
        target = self._keep / str(version)
        target.mkdir(parents=True)
        for file in folder.iterdir():
            os.link(file, target / file.name)

    def evaluation(self, step: int, metrics: dict[str, float], samples: list[Sample]) -> None:
        """Not asked for."""

    def generated(self, sample: Sample, seconds: float) -> None:
        """Not recorded."""

    def discarded(self, tokens: int) -> None:
        """Not recorded."""

    def scored(self, sample: Sample, seconds: float) -> None:
        """Not recorded."""

    def failed(self, sample: Sample, failure: Failure) -> None:
        """A benchmark in which samples fail is none."""
        raise RuntimeError(f"sample {sample.sample_id} failed: {failure}")


@asynccontextmanager
async def teacher_server(folder: Path, port_of: Callable[[int], None]) -> Any:
    """The transformers teacher server on a free port of this process."""
    model = await asyncio.to_thread(TeacherModel, str(folder), dtype="fp32", device="cpu")
    settings = ServerSettings("teacher", model.context, max_batch_tokens=4096, max_waiting=4096, api_key=None)
    runner = web.AppRunner(TeacherServer(model, settings).application(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port_of(runner.addresses[0][1])
        yield
    finally:
        await runner.cleanup()


def parts(config: TrainerConfig, tokenizer: Any, clock: StepClock, scratch: Path) -> Parts:
    """Everything that the controller works with."""
    steps = config.training.steps
    assert steps is not None
    return Parts(
        engine=Engine(config, clock.start),
        scorer=TeacherPool(config),
        learner=Learner(config, steps),
        store=NoStore(scratch),
        stream=PromptStream(
            load_records(config.data.source, config.data.split), PromptEncoder(tokenizer, None), config.data
        ),
        log=clock,
        total_steps=steps,
    )
