"""Held-out prompts: reward mean and token-mean reverse KL of the current weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from opd_trainer.controller.batch_metrics import token_mean_reverse_kl
from opd_trainer.controller.groups import SampleRunner
from opd_trainer.controller.state import RunState
from opd_trainer.errors import SampleError
from opd_trainer.rollout.data import Prompt
from opd_trainer.sample import Sample


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics with the prefix `eval_`, and the samples behind them."""

    metrics: dict[str, float]
    samples: list[Sample]


class Evaluator:
    """One sample for each of a fixed list of prompts; outside the buffer's books."""

    def __init__(
        self, runner: SampleRunner, prompts: Sequence[Prompt], *, every_steps: int, concurrency: int, state: RunState
    ) -> None:
        self._runner = runner
        self._prompts = prompts
        self._every = every_steps
        self._slots = asyncio.Semaphore(max(1, concurrency))
        self._state = state

    def due(self, step: int) -> bool:
        """Before the first step, every `everySteps` and after the last."""
        return step % self._every == 0 or step == self._state.total_steps

    async def run(self) -> Evaluation:
        """Samples that fail are counted, not replaced."""
        samples = [self._sample(-1 - number, prompt) for number, prompt in enumerate(self._prompts)]
        done = [sample for sample in await asyncio.gather(*map(self._one, samples)) if sample is not None]
        metrics = {"eval_samples": float(len(done)), "eval_failed": float(len(samples) - len(done))}
        reverse_kl = token_mean_reverse_kl(done)
        if reverse_kl is not None:
            metrics["eval_opd_reverse_kl"] = reverse_kl
        if done:
            metrics["eval_response_length"] = sum(s.response_length for s in done) / len(done)
        rewards = [sample.reward for sample in done if sample.reward is not None]
        if rewards:
            metrics["eval_reward"] = sum(rewards) / len(rewards)
        return Evaluation(metrics, done)

    @staticmethod
    def _sample(sample_id: int, prompt: Prompt) -> Sample:
        return Sample(
            sample_id=sample_id,
            group_id=sample_id,
            data_source=prompt.data_source,
            prompt_ids=prompt.ids,
            prompt_text=prompt.text,
            answer=prompt.answer,
            record=prompt.record,
        )

    async def _one(self, sample: Sample) -> Sample | None:
        async with self._slots:
            self._state.rolling += 1
            try:
                await self._runner.generate(sample)
                await self._runner.score_and_reward(sample)
            except SampleError as error:
                self._state.note_error(error.failure)
                return None
            return sample
