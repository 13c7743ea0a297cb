"""In-memory parts for the controller: real protocols, simulated latencies, faults on demand."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd_api.trainer_config import Run, TeacherAddress, TrainerConfig, project
from opd_api.v1alpha1 import OPDJobSpec
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.controller import Controller, Parts
from opd_trainer.controller.state import RunState
from opd_trainer.errors import Failure, SampleError
from opd_trainer.interfaces import GenerateResult, StepResult
from opd_trainer.rollout.data import PromptStream
from opd_trainer.sample import Sample, SampleState, VersionSpan
from opd_trainer.storage import RunDirectory


def trainer_config(directory: Path, *, attempt: int = 1, **sections: dict[str, Any]) -> TrainerConfig:
    """A small valid config; keyword sections (camelCase fields) are merged over it."""
    spec: dict[str, Any] = {
        "runtime": {"device": "cpu"},
        "student": {"model": {"source": "/models/student"}},
        "teachers": [{"name": "teacher", "backend": "transformers", "model": {"source": "/models/teacher"}}],
        "data": {"source": "prompts.jsonl", "shuffle": True, "seed": 3},
        "rollout": {"engine": "transformers", "maxResponseTokens": 8},
        "training": {"steps": 4, "promptsPerStep": 4, "gpus": 1},
        "lifecycle": {"preemptionGraceSeconds": 60},
    }
    for name, section in sections.items():
        spec[name] = {**spec.get(name, {}), **section}
    run = Run(
        namespace="default",
        name="job",
        uid8="01234567",
        attempt=attempt,
        directory=str(directory),
        mount_path=str(directory.parent),
        teachers=[TeacherAddress(name="teacher", urls=["http://127.0.0.1:1"])],
    )
    return project(OPDJobSpec.model_validate(spec), run)


class FakeTokenizer:
    """One token per character."""

    chat_template = None

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> str:
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation) + "<assistant>"


class FakeEngine:
    """Answers with tokens that spell the prompt's ticket; latency by a function of the call number."""

    def __init__(self, *, latency: Callable[[int], float] = lambda call: 0.0, concurrency: int = 64) -> None:
        self.latency = latency
        self.concurrency = concurrency
        self.version = -1
        self.calls = 0
        self.top_k = -1
        self.in_flight = 0
        self.most_in_flight = 0
        self.updates: list[int] = []
        self.stopped = False
        self.prepared = False
        self.faults: Callable[[int], Exception | None] = lambda call: None
        self.length = 4
        self._abort = asyncio.Event()

    def prepare(self) -> None:
        self.prepared = True

    async def start(self, weights: Path, version: int) -> None:
        assert self.prepared
        assert (weights / "model.txt").exists()
        self.version = version

    async def generate(
        self, prompt_ids: NDArray[np.int32], *, group_id: int, max_tokens: int, top_k: int = 0
    ) -> GenerateResult:
        call, self.calls = self.calls, self.calls + 1
        self.top_k = top_k
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        version, length, reason = self.version, min(self.length, max_tokens), "stop"
        try:
            fault = self.faults(call)
            if fault is not None:
                raise fault
            try:
                await asyncio.wait_for(self._abort.wait(), self.latency(call))
                length, reason = min(2, max_tokens), "abort"
            except TimeoutError:
                pass
        finally:
            self.in_flight -= 1
        ids = np.full(length, 65 + version, dtype=np.int32)
        return GenerateResult(
            response_ids=ids,
            logprobs=np.full(length, -1.0 - version, dtype=np.float32),
            finish_reason=reason,
            version_spans=(VersionSpan(version, 0, length),),
        )

    async def update_weights(self, weights: Path, version: int, *, abort: bool) -> None:
        assert (weights / "model.txt").exists()
        if abort:
            self._abort.set()
            self._abort = asyncio.Event()
        else:
            assert self.in_flight == 0, "weights changed under a running request"
        self.version = version
        self.updates.append(version)

    async def stop(self) -> None:
        self.stopped = True


class FakeScorer:
    """Scores -0.5 a token after a latency."""

    def __init__(self, *, latency: Callable[[int], float] = lambda call: 0.0, concurrency: int = 1024) -> None:
        self.latency = latency
        self.unavailable: str | None = None
        self.calls = 0
        self.busy_seconds = 0.0
        self.faults: Callable[[Sample], Exception | None] = lambda sample: None
        self._slots = asyncio.Semaphore(concurrency)

    async def start(self) -> None:
        return None

    async def score(self, sample: Sample) -> None:
        call, self.calls = self.calls, self.calls + 1
        async with self._slots:
            while self.unavailable is not None:
                await asyncio.sleep(0.01)
            await asyncio.sleep(self.latency(call))
            self.busy_seconds += self.latency(call)
        fault = self.faults(sample)
        if fault is not None:
            raise fault
        sample.teacher = "teacher"
        sample.teacher_logprobs = np.full(sample.response_length, -0.5, dtype=np.float32)

    async def stop(self) -> None:
        return None


class FakeLearner:
    """Remembers what it was given; a checkpoint is a JSON file.

    Like actors: one call after the other, and a call goes on when the one who waits for it is cancelled.
    """

    def __init__(self, *, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.batches: list[list[Sample]] = []
        self.updates = 0
        self.metrics: dict[str, float] = {}
        self.faults: Callable[[int], BaseException | None] = lambda step: None
        self.stopped = False
        self._turn = asyncio.Lock()
        self._calls: set[asyncio.Task[Any]] = set()

    async def start(self, checkpoint: Path | None) -> None:
        if checkpoint is not None:
            self.updates = json.loads((checkpoint / "learner.json").read_text())["updates"]

    async def step(self, samples: list[Sample], step: int) -> StepResult:
        return await self._call(self._step, samples, step)

    async def _call(self, method: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        async def in_turn() -> Any:
            async with self._turn:
                return await method(*arguments)

        call = asyncio.create_task(in_turn())
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.shield(call)

    async def _step(self, samples: list[Sample], step: int) -> StepResult:
        assert step == self.updates, f"step {step} on a learner with {self.updates} updates"
        await asyncio.sleep(self.seconds)
        fault = self.faults(step)
        if fault is not None:
            raise fault
        self.batches.append(list(samples))
        self.updates += 1
        old = {s.sample_id: np.full(s.response_length, -0.25, dtype=np.float32) for s in samples}
        return StepResult(metrics={"loss": 1.0 / self.updates, **self.metrics}, old_logprobs=old)

    async def publish(self, directory: Path) -> None:
        await self._call(self._write, directory, "model.txt", lambda: str(self.updates))

    async def save(self, directory: Path) -> None:
        await self._call(self._write, directory, "learner.json", lambda: json.dumps({"updates": self.updates}))

    @staticmethod
    async def _write(directory: Path, name: str, text: Callable[[], str]) -> None:
        directory.mkdir(parents=True)
        (directory / name).write_text(text())

    async def export(self, directory: Path) -> None:
        await self.publish(directory)

    async def stop(self) -> None:
        self.stopped = True
        for call in self._calls:
            call.cancel()


class FakeStore:
    """Checkpoints as folders without manifests."""

    def __init__(self, root: Path, attempt: int) -> None:
        self.root = root
        self.attempt = attempt
        self.committed: list[int] = []

    def begin(self, step: int) -> Path:
        path = self.root / f"tmp-step-{step}.a{self.attempt}"
        path.mkdir(parents=True)
        return path

    def commit(self, path: Path, controller_state: dict[str, Any]) -> Path:
        (path / "controller.json").write_text(json.dumps(controller_state))
        final = path.with_name(path.name.removeprefix("tmp-"))
        path.rename(final)
        self.committed.append(controller_state["step"])
        return final


class RecordingLog:
    """Everything that the controller says about samples and steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.counts: Counter[str] = Counter()
        self.versions: list[int] = []

    def generated(self, sample: Sample, seconds: float) -> None:
        self.counts["generated"] += 1

    def discarded(self, tokens: int) -> None:
        self.counts["discarded"] += tokens

    def scored(self, sample: Sample, seconds: float) -> None:
        self.counts["scored"] += 1

    def failed(self, sample: Sample, failure: Failure) -> None:
        self.counts["failed"] += 1

    def step(
        self, step: int, metrics: dict[str, float], samples: list[Sample], states: Mapping[SampleState, int]
    ) -> None:
        self.steps.append((step, metrics))

    def evaluation(self, step: int, metrics: dict[str, float], samples: list[Sample]) -> None:
        self.evaluations.append((step, metrics))

    def published(self, version: int) -> None:
        self.versions.append(version)


def sample_error(failure_class: FailureClass = FailureClass.DATA, message: str = "bad sample") -> SampleError:
    reason = Reason.TEACHER_ERROR if failure_class is FailureClass.TEACHER else Reason.DATA_ERROR
    return SampleError(Failure(failure_class, reason, message, "teacher"))


class Rig:
    """A controller with fakes around it. Create it inside the running loop."""

    def __init__(
        self,
        directory: Path,
        *,
        config: TrainerConfig | None = None,
        prompts: int = 10,
        engine: FakeEngine | None = None,
        scorer: FakeScorer | None = None,
        learner: FakeLearner | None = None,
        **parts: Any,
    ) -> None:
        self.config = config or trainer_config(directory)
        self.engine = engine or FakeEngine()
        self.scorer = scorer or FakeScorer()
        self.learner = learner or FakeLearner()
        attempt = self.config.run.attempt
        self.directory = RunDirectory(directory, attempt)
        self.store = FakeStore(self.directory.checkpoints, attempt)
        self.log = RecordingLog()
        self.state = RunState(attempt)
        records = [{"prompt": f"prompt {row}", "data_source": "math", "answer": str(row)} for row in range(prompts)]
        self.stream = PromptStream(records, encode_text, self.config.data)
        self.controller = Controller(
            self.config,
            Parts(
                engine=self.engine,
                scorer=self.scorer,
                learner=self.learner,
                store=self.store,
                stream=self.stream,
                log=self.log,
                total_steps=self.config.training.steps or 1,
                **parts,
            ),
            self.directory,
            self.state,
        )

    @property
    def consumed_prompts(self) -> list[str]:
        """Prompt of every consumed sample, in order."""
        return [sample.prompt_text for batch in self.learner.batches for sample in batch]


def resumed(directory: Path, first: Rig, checkpoint: str, **options: Any) -> Rig:
    """The next attempt, from a checkpoint of the first one."""
    path = directory / "checkpoints" / checkpoint
    state = json.loads((path / "controller.json").read_text())
    sections = first.config.model_dump(by_alias=True, mode="json")
    config = TrainerConfig.model_validate({**sections, "run": {**sections["run"], "attempt": 2}})
    return Rig(directory, config=config, resume_from=path, resume_state=state, **options)


def encode_text(text: str) -> tuple[NDArray[np.int32], str]:
    return np.array([ord(character) for character in text], dtype=np.int32), text
