"""The learner group: N Ray actors that move together. The controller knows this class and nothing behind it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from opd_api.trainer_config import TrainerConfig
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import Failure, TrainerError
from opd_trainer.interfaces import StepResult
from opd_trainer.learner.actor import RankActor
from opd_trainer.learner.checkpoints import check_step
from opd_trainer.learner.rank import RankFacts
from opd_trainer.learner.step import RankResult
from opd_trainer.learner.work import split
from opd_trainer.sample import Sample

logger = logging.getLogger(__name__)

_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.2
#: When a rank reports that its peers are gone, how long to wait for Ray to say which one died.
_BLAME_SECONDS = 3.0
#: The ranks finish a call that nobody waits for any more. After one of these nobody knows which step their weights are of.
_CHANGES_WEIGHTS = frozenset({"step"})


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long the group waits, in seconds."""

    placement: float = 600.0
    start: float = 1800.0
    step: float = 1800.0
    files: float = 1800.0

    @classmethod
    def of(cls, config: TrainerConfig) -> Deadlines:
        """A call that outlasts the stall time-out counts as hung."""
        stall = float(config.lifecycle.stall_timeout_seconds)
        return cls(placement=min(600.0, stall), start=stall, step=stall, files=stall)


class _RankDiedError(TrainerError):
    """The process of a rank is gone: the cause of what the others complain of."""


class LearnerGroup:
    """`interfaces.Learner` over Ray. Every call goes to all ranks at once, in the same order.

    Ray must be initialised. After a TrainerError the group is dead: `stop` it.
    """

    def __init__(self, config: TrainerConfig, *, total_steps: int, deadlines: Deadlines | None = None) -> None:
        """`total_steps` of the whole run: the schedule of the learning rate ends there."""
        self._config = config
        self._total_steps = total_steps
        self._deadlines = deadlines or Deadlines.of(config)
        self._placement: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._facts: RankFacts | None = None
        self._dead: TrainerError | None = None
        # Calls to the ranks end in collectives; two at a time must reach all ranks in the same order, one by one.
        self._turn = asyncio.Lock()

    @property
    def processes(self) -> list[int]:
        """Process ids of the ranks, where they run."""
        return [int(pid) for pid in ray.get([actor.pid.remote() for actor in self._actors], timeout=_STOP_SECONDS)]

    # --- interfaces.Learner --------------------------------------------------------------------------------------------
    async def start(self, checkpoint: Path | None) -> None:
        """Place the actors, join them to a process group, load the model (or a checkpoint's `learner` folder).

        Raises TrainerError: no place, a rank that failed, or a checkpoint whose two halves are of different steps.
        """
        try:
            await self._place()
            host, port = (await self._call("open_store", self._deadlines.start, ranks=[0]))[0]
            await self._call("join", self._deadlines.start, host, port)
            facts = await self._call("start", self._deadlines.start, None if checkpoint is None else str(checkpoint))
            if checkpoint is not None:
                await asyncio.to_thread(check_step, checkpoint, facts[0].steps)
        except BaseException:
            await self.stop()
            raise
        self._facts = facts[0]
        logger.info(
            "%d learner ranks hold %d parameters (%s micro-batches, %s head)",
            len(self._actors),
            facts[0].parameters,
            facts[0].layout,
            "fused" if facts[0].fused_head else "unfused",
        )

    async def step(self, samples: list[Sample], step: int) -> StepResult:
        """One step on the samples. Raises TrainerError: missing rewards, infinite gradients, a lost rank."""
        assert self._facts is not None, "start the group first"
        works = await asyncio.to_thread(
            split, self._config, samples, ranks=len(self._actors), layout=self._facts.layout
        )
        results: list[RankResult] = await self._call_each("step", self._deadlines.step, [(work,) for work in works])
        merged = StepResult(metrics={**results[0].metrics})
        for result in results:
            merged.old_logprobs.update(result.old_logprobs)
            merged.teacher_logprobs.update(result.teacher_logprobs)
        logger.debug("step %d: %s", step, merged.metrics)
        return merged

    async def publish(self, directory: Path) -> None:
        """Weights for the engines, complete when this returns."""
        await self._call("publish", self._deadlines.files, str(directory))

    async def save(self, directory: Path) -> None:
        """DCP shards, complete when this returns; the caller commits them."""
        await self._call("save", self._deadlines.files, str(directory))

    async def export(self, directory: Path) -> None:
        """The final student."""
        await self._call("export", self._deadlines.files, str(directory))

    async def stop(self) -> None:
        """End every rank and free its place; idempotent."""
        actors, self._actors = self._actors, []
        placement, self._placement = self._placement, None
        for actor in actors:
            ray.kill(actor, no_restart=True)
        if placement is not None:
            await asyncio.to_thread(remove_placement_group, placement)

    # --- placement -----------------------------------------------------------------------------------------------------
    async def _place(self) -> None:
        ranks = self._config.training.gpus
        bundle = {"GPU": 1.0} if self._config.accelerators else {"CPU": 1.0}
        self._placement = placement_group([bundle] * ranks, strategy="PACK")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._deadlines.placement
        while not await asyncio.to_thread(self._placement.wait, _POLL_SECONDS):
            if loop.time() > deadline:
                raise TrainerError(
                    FailureClass.INFRASTRUCTURE,
                    Reason.PLACEMENT_FAILED,
                    await asyncio.to_thread(_what_is_missing, bundle, ranks, self._deadlines.placement),
                )
        resources = {"num_gpus": 1, "num_cpus": 0} if self._config.accelerators else {"num_cpus": 1}
        remote = ray.remote(RankActor)
        for rank in range(ranks):
            strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank)
            self._actors.append(
                remote.options(**resources, max_restarts=0, scheduling_strategy=strategy).remote(
                    self._config.to_json(), rank, ranks, self._total_steps, self._deadlines.step
                )
            )

    # --- calls ---------------------------------------------------------------------------------------------------------
    async def _call(
        self, method: str, seconds: float, *arguments: Any, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        wanted = range(len(self._actors)) if ranks is None else ranks
        return await self._call_each(method, seconds, [arguments for _ in wanted], ranks=list(wanted))

    async def _call_each(
        self, method: str, seconds: float, arguments: Sequence[tuple[Any, ...]], *, ranks: list[int] | None = None
    ) -> list[Any]:
        """Results of all ranks. The first failure of any rank ends the call: the others wait in a collective for it."""
        ranks = ranks or list(range(len(self._actors)))
        async with self._turn:
            if self._dead is not None:
                raise self._dead
            tasks = {
                rank: asyncio.ensure_future(_answer(getattr(self._actors[rank], method).remote(*values)))
                for rank, values in zip(ranks, arguments, strict=True)
            }
            try:
                self._dead = await self._wait(method, seconds, tasks)
            except asyncio.CancelledError:
                if method in _CHANGES_WEIGHTS:
                    self._dead = _cut_off(method)
                raise
        if self._dead is not None:
            raise self._dead
        return [tasks[rank].result() for rank in ranks]

    async def _wait(self, method: str, seconds: float, tasks: dict[int, asyncio.Future[Any]]) -> TrainerError | None:
        pending = set(tasks.values())
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            while pending:
                left = deadline - asyncio.get_running_loop().time()
                done, pending = await asyncio.wait(pending, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    late = sorted(rank for rank, task in tasks.items() if task in pending)
                    return TrainerError(
                        FailureClass.INFRASTRUCTURE,
                        Reason.LEARNER_FAILED,
                        f"learner ranks {late} did not finish {method} within {seconds:.0f} s",
                    )
                if (failure := _first_failure(tasks, done)) is not None:
                    return await _blame(tasks, pending, failure)
            return None
        finally:
            for task in pending:
                task.cancel()


def _first_failure(tasks: dict[int, asyncio.Future[Any]], done: set[asyncio.Future[Any]]) -> TrainerError | None:
    """A dead rank is a better explanation than the complaint of a rank that lost it."""
    failures = [f for rank, task in tasks.items() if task in done and (f := _failure(rank, task))]
    return min(failures, key=lambda failure: not isinstance(failure, _RankDiedError), default=None)


async def _blame(
    tasks: dict[int, asyncio.Future[Any]], pending: set[asyncio.Future[Any]], failure: TrainerError
) -> TrainerError:
    """The failure of the rank that is to blame: the survivors notice a closed connection before Ray notices the death."""
    if failure.failure.reason is not Reason.LEARNER_FAILED or isinstance(failure, _RankDiedError) or not pending:
        return failure
    until = asyncio.get_running_loop().time() + _BLAME_SECONDS
    while pending and (left := until - asyncio.get_running_loop().time()) > 0:
        done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        named = _first_failure(tasks, done)
        if named is not None and isinstance(named, _RankDiedError):
            return named
    return failure


async def _answer(reference: Any) -> Any:
    return await reference


def _failure(rank: int, task: asyncio.Future[Any]) -> TrainerError | None:
    """What a finished call says, if it is bad."""
    error = task.exception()
    if isinstance(error, RayActorError):
        return _RankDiedError(
            FailureClass.INFRASTRUCTURE,
            Reason.LEARNER_FAILED,
            f"learner rank {rank} died: {_first_line(error)}; out of memory, an evicted pod or a lost node are usual causes",
        )
    if isinstance(error, RayError):
        return TrainerError(FailureClass.INTERNAL, Reason.LEARNER_FAILED, f"learner rank {rank}: {_first_line(error)}")
    if error is not None:
        raise error
    value = task.result()
    if isinstance(value, Failure):
        return TrainerError(value.failure_class, value.reason, value.message, teacher=value.teacher)
    return None


def _cut_off(method: str) -> TrainerError:
    return TrainerError(
        FailureClass.INTERNAL,
        Reason.LEARNER_FAILED,
        f"nobody waited for the end of a {method} of the learner ranks, so their weights belong to no step that is in the books;"
        " the last checkpoint stands",
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _what_is_missing(bundle: dict[str, float], ranks: int, seconds: float) -> str:
    name = next(iter(bundle))
    total, free = ray.cluster_resources().get(name, 0.0), ray.available_resources().get(name, 0.0)
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    return (
        f"{ranks} learner ranks need 1 {name} each, but of {total:g} {name} on {nodes} Ray nodes {free:g} are free after"
        f" {seconds:.0f} s: {max(0.0, ranks - free):g} {name} are missing; lower training.gpus, or look at the Ray workers"
    )
