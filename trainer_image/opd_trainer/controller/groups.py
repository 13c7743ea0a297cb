"""The way of one group: rollout -> teacher and reward (or rollout -> reward -> filter -> teacher) -> buffer.

Teacher scoring starts per sample the moment its rollout ends; nothing waits for a batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from opd_api.trainer_config import TrainerConfig
from opd_api.v1alpha1 import TokenSelection
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.controller.admission import Admission
from opd_trainer.controller.failures import FailureBook
from opd_trainer.controller.state import RunState
from opd_trainer.errors import Failure, SampleError, TrainerError
from opd_trainer.interfaces import GenerateResult, RolloutEngine, Scorer
from opd_trainer.rollout.buffer import Group, GroupBuffer
from opd_trainer.sample import EXITS, Sample, SampleState, TokenSet, VersionSpan

#: Rounds in which failed samples of a group are replaced before the group is given up.
REPLACEMENT_ROUNDS = 2
#: Groups that a filter may refuse in a row before the run is called hopeless, in batches.
FILTERED_BATCHES = 20

Reward = Callable[[Sample], Awaitable[float]]
Filter = Callable[[list[Sample]], Awaitable[bool]]
STUDENT_SETS = frozenset({TokenSelection.STUDENT_TOPK, TokenSelection.UNION, TokenSelection.INTERSECTION})


class Observer(Protocol):
    """What is told about every sample on its way (metrics and diagnostics)."""

    def generated(self, sample: Sample, seconds: float) -> None: ...

    def discarded(self, tokens: int) -> None: ...

    def scored(self, sample: Sample, seconds: float) -> None: ...

    def failed(self, sample: Sample, failure: Failure) -> None: ...


def student_top_k(config: TrainerConfig) -> int:
    """Tokens per position that the engine returns: the selection's, else the diagnostics', else none."""
    if config.distillation.token_selection in STUDENT_SETS:
        return config.distillation.top_k or 0
    return config.diagnostics.topk_stats_k if config.diagnostics.topk_stats else 0


@dataclass(slots=True)
class _Parts:
    """What several requests of one response add up to (partial rollout)."""

    pieces: list[GenerateResult]

    @property
    def length(self) -> int:
        return sum(len(piece.response_ids) for piece in self.pieces)

    def spans(self) -> tuple[VersionSpan, ...]:
        offset, spans = 0, []
        for piece in self.pieces:
            spans += [VersionSpan(s.version, s.start + offset, s.end + offset) for s in piece.version_spans]
            offset += len(piece.response_ids)
        return tuple(spans)

    def topk(self) -> TokenSet | None:
        sets = [piece.topk for piece in self.pieces if piece.topk is not None]
        if len(sets) != len(self.pieces) or not sets:
            return None
        return TokenSet(
            ids=np.concatenate([s.ids for s in sets]),
            logprobs=np.concatenate([s.logprobs for s in sets]),
            valid=np.concatenate([s.valid for s in sets]),
        )


class SampleRunner:
    """Runs single samples against engine, scorer and reward; used for training and for evaluation."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        engine: RolloutEngine,
        scorer: Scorer,
        reward: Reward | None,
        decode: Callable[[Sample], str] | None,
        admission: Admission,
        state: RunState,
        observer: Observer,
    ) -> None:
        self._config = config
        self._engine = engine
        self._scorer = scorer
        self._reward = reward
        self._decode = decode
        self._admission = admission
        self._state = state
        self._observer = observer
        self._top_k = student_top_k(config)

    async def generate(self, sample: Sample) -> None:
        """Fill the rollout's fields. Raises SampleError for an empty prompt or response, and what the engine raises."""
        try:
            await self._generate(sample)
        finally:
            self._state.rollout_ended()

    async def _generate(self, sample: Sample) -> None:
        if len(sample.prompt_ids) == 0:
            raise _data_failure(f"prompt {sample.record.get('id', sample.group_id)} has no tokens")
        sample.state = SampleState.RUNNING
        started = asyncio.get_running_loop().time()
        parts = await self._request(sample)
        sample.response_ids = np.concatenate([piece.response_ids for piece in parts.pieces])
        sample.rollout_logprobs = np.concatenate([piece.logprobs for piece in parts.pieces])
        sample.version_spans = parts.spans()
        sample.student_topk = parts.topk()
        sample.finish_reason = parts.pieces[-1].finish_reason
        if sample.finish_reason == "abort":  # the last piece filled the response to its limit before it was aborted
            sample.finish_reason = "length"
        if sample.response_length == 0:
            raise _data_failure(f"the student answered with no token (group {sample.group_id})")
        sample.loss_mask = np.ones(sample.response_length, dtype=np.float32)
        if self._decode is not None:
            sample.response_text = self._decode(sample)
        sample.state = SampleState.GENERATED
        self._state.activity.add()
        self._observer.generated(sample, asyncio.get_running_loop().time() - started)

    async def _request(self, sample: Sample) -> _Parts:
        parts = _Parts([])
        limit = self._config.rollout.max_response_tokens
        while True:
            ids = np.concatenate([sample.prompt_ids, *(piece.response_ids for piece in parts.pieces)])
            async with self._admission.request() as version:
                if not parts.pieces:
                    sample.start_version = version
                result = await self._engine.generate(
                    ids, group_id=sample.group_id, max_tokens=limit - parts.length, top_k=self._top_k
                )
            if result.finish_reason != "abort":
                parts.pieces.append(result)
                return parts
            if self._config.rollout.partial_rollout and len(result.response_ids) > 0:
                parts.pieces.append(result)
                if parts.length >= limit:
                    return parts
            else:
                self._observer.discarded(len(result.response_ids))

    async def reward(self, sample: Sample) -> None:
        """Fill `reward` when the task has one."""
        if self._reward is not None:
            sample.reward = await self._reward(sample)

    async def score(self, sample: Sample) -> None:
        """Fill the teacher's fields."""
        started = asyncio.get_running_loop().time()
        await self._scorer.score(sample)
        sample.state = SampleState.SCORED
        self._state.activity.add()
        self._observer.scored(sample, asyncio.get_running_loop().time() - started)

    async def score_and_reward(self, sample: Sample) -> None:
        """Teacher and reward at the same time."""
        if self._reward is None:
            await self.score(sample)
            return
        reward = asyncio.create_task(self.reward(sample))
        try:
            await self.score(sample)
            await reward
        finally:
            reward.cancel()


def _data_failure(message: str) -> SampleError:
    return SampleError(Failure(FailureClass.DATA, Reason.DATA_ERROR, message))


class GroupRunner:
    """Brings groups from reserve to commit or drop."""

    def __init__(
        self,
        runner: SampleRunner,
        *,
        buffer: GroupBuffer,
        keep: Filter | None,
        failures: FailureBook,
        admission: Admission,
        state: RunState,
        observer: Observer,
    ) -> None:
        self._runner = runner
        self._buffer = buffer
        self._keep = keep
        self._failures = failures
        self._admission = admission
        self._state = state
        self._observer = observer
        self._verdicts: deque[bool] = deque(maxlen=FILTERED_BATCHES * buffer.batch)

    async def run(self, group: Group) -> None:
        """Ends with the group committed or dropped. Raises TrainerError for what ends the run."""
        rollout = self._rollout_and_score if self._keep is None else self._rollout_and_reward
        if not await self._complete(group, rollout):
            self._buffer.drop(group)
            return
        if self._keep is not None:
            if not await self._passes(group):
                self._buffer.drop(group)
                return
            if not await self._complete(group, self._score_rest):
                self._buffer.drop(group)
                return
        self._buffer.commit(group)

    async def _rollout_and_score(self, sample: Sample) -> None:
        await self._runner.generate(sample)
        await self._runner.score_and_reward(sample)
        self._ready(sample)

    async def _rollout_and_reward(self, sample: Sample) -> None:
        await self._runner.generate(sample)
        await self._runner.reward(sample)

    async def _score_rest(self, sample: Sample) -> None:
        if sample.state is SampleState.PENDING:  # replaces a sample that the teacher refused
            await self._rollout_and_reward(sample)
        await self._runner.score(sample)
        self._ready(sample)

    def _ready(self, sample: Sample) -> None:
        sample.state = SampleState.READY
        self._failures.success()

    async def _complete(self, group: Group, work: Callable[[Sample], Awaitable[None]]) -> bool:
        """Run `work` on every live sample, replacing failed ones; False when the group has to be given up.

        A prompt whose samples all failed is not asked again: the same input fails again.
        """
        pending = [sample for sample in group.samples if sample.state not in EXITS]
        for round_ in range(REPLACEMENT_ROUNDS + 1):
            await self._all(pending, work)
            live = sum(sample.state not in EXITS for sample in group.samples)
            missing = self._buffer.group_size - live
            if missing == 0:
                return True
            if live == 0 or round_ == REPLACEMENT_ROUNDS:
                return False
            self._state.rolling += missing
            pending = [self._buffer.issue(group, self._admission.version) for _ in range(missing)]
        return False

    async def _all(self, samples: list[Sample], work: Callable[[Sample], Awaitable[None]]) -> None:
        if len(samples) == 1:
            await self._one(samples[0], work)
            return
        tasks = [asyncio.create_task(self._one(sample, work)) for sample in samples]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, sample: Sample, work: Callable[[Sample], Awaitable[None]]) -> None:
        try:
            await work(sample)
        except SampleError as error:
            self._buffer.fail_sample(sample, error.failure.message)
            self._state.note_error(error.failure)
            self._observer.failed(sample, error.failure)
            self._failures.failure(error.failure)

    async def _passes(self, group: Group) -> bool:
        assert self._keep is not None
        verdict = await self._keep([sample for sample in group.samples if sample.state not in EXITS])
        self._verdicts.append(verdict)
        if not any(self._verdicts) and len(self._verdicts) == self._verdicts.maxlen:
            raise TrainerError(
                FailureClass.DATA,
                Reason.DATA_ERROR,
                f"task.filter refused the last {len(self._verdicts)} groups in a row; no batch can be filled",
            )
        return verdict
