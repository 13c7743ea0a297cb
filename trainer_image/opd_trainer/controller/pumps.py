"""The two pumps. `rollout` opens groups as the staleness gate allows, `train` takes complete batches.

Synchronous training is maxStaleness 0 of the same code: the gate then opens exactly one batch for each version.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from opd_api.vocabulary import FailureClass, Reason, TrainerTask
from opd_trainer.controller.admission import Admission
from opd_trainer.controller.batch_metrics import batch_metrics, rounded_seconds
from opd_trainer.controller.checkpointing import Checkpointer
from opd_trainer.controller.evaluation import Evaluation, Evaluator
from opd_trainer.controller.groups import GroupRunner
from opd_trainer.controller.state import RunState
from opd_trainer.controller.weights import Publisher
from opd_trainer.errors import TrainerError
from opd_trainer.interfaces import Learner, RolloutEngine
from opd_trainer.rollout.buffer import Group, GroupBuffer
from opd_trainer.rollout.data import PromptStream
from opd_trainer.sample import EXITS, Sample, SampleState


class StepLog(Protocol):
    """Where the numbers of a step go."""

    def step(
        self, step: int, metrics: dict[str, float], samples: list[Sample], states: Mapping[SampleState, int]
    ) -> None: ...

    def evaluation(self, step: int, metrics: dict[str, float], samples: list[Sample]) -> None: ...

    def published(self, version: int) -> None: ...


T = TypeVar("T")
#: Engine and learner give the same token log-probabilities that differ by hundredths; by this much they are two models.
MISMATCH_NATS = 1.0


def _same_weights(metrics: dict[str, float]) -> None:
    """A canary of every weight update: on samples of the current version, engine and learner must agree.

    Raises TrainerError(Internal, EngineFailed).
    """
    gap = metrics.get("mismatch_abs", 0.0)
    if metrics.get("staleness_max", 0.0) == 0 and gap > MISMATCH_NATS:
        raise TrainerError(
            FailureClass.INTERNAL,
            Reason.ENGINE_FAILED,
            f"log-probabilities of engine and learner differ by {gap:.2f} nats a token on samples of the current weights: "
            "the engines do not serve what was published",
        )


def _outcome(task: asyncio.Future[T]) -> T:
    """Result of a task that nobody asked to end. Raises what it raised.

    Raises TrainerError(Internal) when it ended cancelled all the same: something that it waited for was cancelled. As a
    CancelledError it would pass for a stop that somebody asked for, and a group would be missing without a word.
    """
    if task.cancelled():
        name = task.get_name() if isinstance(task, asyncio.Task) else "work"
        raise TrainerError(
            FailureClass.INTERNAL,
            Reason.INTERNAL_ERROR,
            f"{name} was cancelled though nobody asked for it: a part that it waited for was shut down under it",
        )
    return task.result()


class PhaseClock:
    """Seconds of a step by what the trainer waited for; says what it waits for now."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self.seconds: dict[str, float] = {}

    @asynccontextmanager
    async def measure(self, task: TrainerTask) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._state.task = task
        try:
            yield
        finally:
            self.seconds[task] = self.seconds.get(task, 0.0) + loop.time() - started

    def take(self) -> dict[str, float]:
        """Seconds since the last call, by phase."""
        seconds, self.seconds = self.seconds, {}
        return seconds


class Pumps:
    """Runs until the last step is done or a stop is asked for; the first failure anywhere ends both pumps."""

    def __init__(
        self,
        *,
        stream: PromptStream,
        buffer: GroupBuffer,
        groups: GroupRunner,
        engine: RolloutEngine,
        learner: Learner,
        publisher: Publisher,
        checkpointer: Checkpointer,
        evaluator: Evaluator | None,
        admission: Admission,
        state: RunState,
        log: StepLog,
    ) -> None:
        self._stream = stream
        self._buffer = buffer
        self._groups = groups
        self._engine = engine
        self._learner = learner
        self._publisher = publisher
        self._checkpointer = checkpointer
        self._evaluator = evaluator
        self._admission = admission
        self._state = state
        self._log = log
        self._clock = PhaseClock(state)
        # Numbers of the whole run, known before its first step; a step's own would take their place.
        self._of_the_run = dict(state.metrics)
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake_rollout = asyncio.Event()
        self._wake_train = asyncio.Event()
        self._fatal: asyncio.Future[None] | None = None
        state.on_room = self._wake_rollout.set

    def wake(self) -> None:
        """Something changed that a pump may wait for."""
        self._wake_rollout.set()
        self._wake_train.set()

    async def run(self) -> None:
        """Raises TrainerError; unknown exceptions pass through."""
        self._fatal = asyncio.get_running_loop().create_future()
        rollout = asyncio.create_task(self._rollout(), name="rollout pump")
        train = asyncio.create_task(self._train(), name="train pump")
        stop = asyncio.create_task(self._wake_on_stop(), name="stop")
        try:
            await asyncio.wait({rollout, train, self._fatal}, return_when=asyncio.FIRST_COMPLETED)
            for finished in (self._fatal, rollout, train):
                if finished.done():
                    _outcome(finished)
        finally:
            await self._cancel({rollout, train, stop, *self._tasks})
            self._fatal.cancel()

    @staticmethod
    async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wake_on_stop(self) -> None:
        await self._state.stop.wait()
        self.wake()

    # -- rollout ---------------------------------------------------------------------------------------------------

    async def _rollout(self) -> None:
        """Never ends by itself: until the last step is done a failed or filtered group may need another one."""
        while True:
            self._wake_rollout.clear()
            for _ in range(self._capacity()):
                self._open_group()
            await self._wake_rollout.wait()

    def _missing(self) -> int:
        """Groups that the rest of the run needs and that are not open yet."""
        total = self._state.total_steps * self._buffer.batch
        return total - self._buffer.gate.accepted - self._buffer.running

    def _capacity(self) -> int:
        room = self._engine.concurrency - self._state.rolling
        slots = room // self._buffer.group_size
        if self._state.rolling == 0:
            slots = max(1, slots)  # a group larger than the fleet's concurrency must start too
        if self._state.stop.is_set():
            return 0
        allowed = self._buffer.gate.capacity(
            version=self._admission.version, running=self._buffer.running, free_slots=max(0, slots)
        )
        return min(allowed, self._missing())

    def _open_group(self) -> None:
        group = self._buffer.reserve(self._stream.take(), self._admission.version)
        self._state.rolling += self._buffer.group_size
        task = asyncio.create_task(self._groups.run(group), name=f"group {group.group_id}")
        self._tasks.add(task)
        task.add_done_callback(self._group_done)

    def _group_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.wake()
        if self._fatal is None or self._fatal.done() or task.cancelling():
            return
        try:
            _outcome(task)
        except Exception as error:
            self._fatal.set_exception(error)

    # -- training --------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        await self._evaluate()
        while self._state.step < self._state.total_steps:
            started = asyncio.get_running_loop().time()
            async with self._clock.measure(TrainerTask.ROLLOUT):
                groups = await self._batch()
            if groups is None:
                return
            await self._step(groups)
            self._state.step_seconds.append(asyncio.get_running_loop().time() - started)

    async def _batch(self) -> list[Group] | None:
        """A complete batch, or None when a stop is asked for."""
        while not self._state.stop.is_set():
            self._wake_train.clear()
            groups = self._buffer.select(self._admission.version)
            if groups is not None:
                return groups
            await self._wake_train.wait()
        return None

    async def _step(self, groups: list[Group]) -> None:
        version = self._admission.version
        if version != self._state.step:
            raise TrainerError(
                FailureClass.INTERNAL,
                Reason.INTERNAL_ERROR,
                f"engines serve version {version} at step {self._state.step}",
            )
        async with self._clock.measure(TrainerTask.CHECKPOINT):
            await self._checkpointer.finish()
        samples = [sample for group in groups for sample in group.samples if sample.state not in EXITS]
        async with self._clock.measure(TrainerTask.TRAIN):
            result = await self._learner.step(samples, self._state.step)
        for sample in samples:
            sample.old_logprobs = result.old_logprobs.get(sample.sample_id)
            if sample.sample_id in result.teacher_logprobs:  # an in-process teacher scores in the learner
                sample.teacher_logprobs = result.teacher_logprobs[sample.sample_id]
        self._buffer.consume(groups)
        self._buffer.check()
        self._state.step += 1
        self._state.activity.add(max(1, int(result.metrics.get("micro_batches", 1))))
        await self._after_step()
        metrics = self._of_the_run | batch_metrics(samples, version) | result.metrics
        if "opd_loss" in metrics:
            metrics["loss"] = metrics.pop("opd_loss")
        metrics |= {f"seconds_{phase}": seconds for phase, seconds in self._clock.take().items()}
        metrics = rounded_seconds(metrics)
        _same_weights(metrics)
        self._state.metrics = metrics
        self._log.step(self._state.step, metrics, samples, self._buffer.states())
        await self._evaluate()

    async def _after_step(self) -> None:
        """Publish, and start the checkpoint while the next rollouts run."""
        last = self._state.step == self._state.total_steps
        if (not last or self._evaluator is not None) and not self._state.stop.is_set():
            async with self._clock.measure(TrainerTask.PUBLISH):
                await self._publisher.publish(self._state.step)
            self._log.published(self._state.step)
            self.wake()
        if self._checkpointer.due(self._state.step):
            async with self._clock.measure(TrainerTask.CHECKPOINT):
                await self._checkpointer.save()

    async def _evaluate(self) -> None:
        if self._evaluator is None or not self._evaluator.due(self._state.step) or self._state.stop.is_set():
            return
        async with self._clock.measure(TrainerTask.EVALUATE):
            evaluation = await self._interruptible(self._evaluator)
        if evaluation is not None:
            self._state.note_evaluation(evaluation.metrics)
            self._log.evaluation(self._state.step, evaluation.metrics, evaluation.samples)

    async def _interruptible(self, evaluator: Evaluator) -> Evaluation | None:
        """The result, or None when a stop is asked for first."""
        task = asyncio.create_task(evaluator.run(), name="evaluation")
        stop = asyncio.create_task(self._state.stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            return _outcome(task) if task.done() else None
        finally:
            stop.cancel()
            task.cancel()

    def describe(self) -> dict[str, object]:
        """State dump for the stall watchdog."""
        return {
            "step": self._state.step,
            "version": self._admission.version,
            "generating": self._admission.generating,
            "rolling": self._state.rolling,
            "groups_running": self._buffer.running,
            "groups_ready": self._buffer.ready,
            "gate_accepted": self._buffer.gate.accepted,
            "samples": {state.value: count for state, count in self._buffer.states().items()},
            "oldest_groups": [
                {
                    "group": group.group_id,
                    "ticket": group.prompt.ticket,
                    "version": group.oldest_version,
                    "samples": [sample.state.value for sample in group.samples],
                }
                for group in self._buffer.open_groups()[:20]
            ],
            "tasks": sorted(task.get_name() for task in asyncio.all_tasks())[:200],
        }
