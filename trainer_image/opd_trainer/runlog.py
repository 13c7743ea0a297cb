"""Where every number of a run goes: Prometheus, TensorBoard, the JSON lines of the report, and the payloads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from opd_api.trainer_config import TrainerConfig
from opd_trainer.controller.batch_metrics import reverse_kl_by
from opd_trainer.diagnostics import (
    SAMPLES_PER_STEP,
    TOKEN_SAMPLES_PER_STEP,
    Payloads,
    SplitTokens,
    due,
    sample_record,
)
from opd_trainer.errors import Failure
from opd_trainer.metrics import JsonLines, LiveObserver, PrometheusMetrics, TensorBoard, finite, observe_sample_states
from opd_trainer.report.records import (
    METRICS_FILE,
    SAMPLES_FILE,
    FailureRecord,
    MetricsRecord,
    by_source,
    by_teacher,
)
from opd_trainer.sample import Sample, SampleState
from opd_trainer.storage import RunDirectory

logger = logging.getLogger(__name__)
#: Data sources and teachers that get a curve of their own.
BREAKDOWNS = 16
REVERSE_KL = "opd_reverse_kl"
#: Sample failures of one kind that are logged: the first ones, then one in a hundred.
FAILURES_TOLD = 5
FAILURES_BETWEEN = 100


class RunLog(LiveObserver):
    """The controller's `Log`."""

    def __init__(
        self,
        config: TrainerConfig,
        directory: RunDirectory,
        prometheus: PrometheusMetrics,
        *,
        resume_step: int,
        split: SplitTokens | None,
    ) -> None:
        super().__init__(prometheus)
        self._config = config.diagnostics
        self._attempt = config.run.attempt
        self._split = split
        logs = directory.root / "logs"

        def before_resume(document: dict[str, Any]) -> bool:
            return int(document.get("step", 0)) <= resume_step

        self._metrics = JsonLines(logs / METRICS_FILE, keep=before_resume)
        self._samples = JsonLines(logs / SAMPLES_FILE, keep=before_resume)
        self._tensorboard = TensorBoard(directory.root / "tensorboard", self._attempt, resume_step + 1)
        self._payloads = Payloads(directory.root / "diagnostics", config.diagnostics, self._attempt)
        self._failures: Counter[tuple[str, str]] = Counter()
        self._last_failure: dict[tuple[str, str], tuple[float, str]] = {}
        self._step = resume_step
        self.states: dict[SampleState, int] = {}
        prometheus.step.set(resume_step)

    def failed(self, sample: Sample, failure: Failure) -> None:
        super().failed(sample, failure)
        key = (failure.failure_class.value, failure.reason.value)
        self._failures[key] += 1
        if self._failures[key] <= FAILURES_TOLD or self._failures[key] % FAILURES_BETWEEN == 0:
            logger.warning(
                "sample %d failed (%s/%s, %d so far): %s", sample.sample_id, *key, self._failures[key], failure.message
            )
        self._last_failure[key] = (time.time(), failure.message)

    def published(self, version: int) -> None:
        """Every engine serves these weights."""
        self._prometheus.weight_version.set(version)

    def step(
        self, step: int, metrics: dict[str, float], samples: list[Sample], states: Mapping[SampleState, int]
    ) -> None:
        """One optimizer step is done."""
        self._step, self.states = step, dict(states)
        values = finite({**metrics, **self._breakdown(samples)})
        self._live(step, values)
        observe_sample_states(self._prometheus, states)
        self._write(step, values)
        config = self._config
        if config.sample_stats and due(step, config.sample_period):
            self._write_samples(samples, step, with_tokens=config.token_stats and due(step, config.token_period))
        if config.token_stats or config.topk_stats:
            asyncio.get_running_loop().run_in_executor(None, self._write_payloads, list(samples), step)
        logger.info("step %d: %s", step, _story(values))

    def evaluation(self, step: int, metrics: dict[str, float], samples: list[Sample]) -> None:
        """Held-out prompts were scored after `step` steps."""
        values = finite(metrics)
        for name, value in values.items():
            self._prometheus.evaluation.labels(name).set(value)
        self._write(step, values)
        if self._config.sample_stats:
            self._write_samples(samples, step, with_tokens=self._config.token_stats, evaluation=True)
        logger.info("evaluation after step %d: %s", step, ", ".join(f"{k}={v:.4g}" for k, v in values.items()))

    def failures(self) -> list[FailureRecord]:
        """Sample failures of this attempt by class and reason, each with its last message."""
        return [
            FailureRecord(
                time=self._last_failure[key][0],
                attempt=self._attempt,
                step=self._step,
                failure_class=key[0],
                reason=key[1],
                message=self._last_failure[key][1][:1024],
                count=count,
            )
            for key, count in self._failures.most_common(20)
        ]

    def close(self) -> None:
        """Flush and close every file."""
        self._metrics.close()
        self._samples.close()
        self._tensorboard.close()

    # -- parts -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _breakdown(samples: Sequence[Sample]) -> dict[str, float]:
        sources, teachers = reverse_kl_by(samples, "data_source"), reverse_kl_by(samples, "teacher")
        named = {by_source(REVERSE_KL, name): value for name, value in sorted(sources.items())[:BREAKDOWNS]}
        if len(teachers) > 1:
            named |= {by_teacher(REVERSE_KL, name): value for name, value in sorted(teachers.items())[:BREAKDOWNS]}
        return named

    def _live(self, step: int, values: dict[str, float]) -> None:
        prometheus = self._prometheus
        prometheus.step.set(step)
        named = {
            "opd_reverse_kl": prometheus.reverse_kl,
            "loss": prometheus.loss,
            "reward": prometheus.reward,
            "response_length": prometheus.response_length,
            "staleness": prometheus.staleness,
        }
        for name, gauge in named.items():
            if name in values:
                gauge.set(values[name])
        for name, value in values.items():
            if name.startswith("seconds_"):
                prometheus.phase_seconds.labels(name.removeprefix("seconds_")).set(value)
            elif name not in named and "/" not in name:
                prometheus.learner.labels(name).set(value)

    def _write(self, step: int, values: dict[str, float]) -> None:
        record = MetricsRecord(step=step, time=time.time(), attempt=self._attempt, metrics=values)
        self._metrics.write(record.to_document())
        self._tensorboard.write(step, values)

    def _write_samples(
        self, samples: Sequence[Sample], step: int, *, with_tokens: bool, evaluation: bool = False
    ) -> None:
        for number, sample in enumerate(samples[:SAMPLES_PER_STEP]):
            record = sample_record(
                sample,
                step=step,
                attempt=self._attempt,
                version=step if evaluation else step - 1,
                text=self._config.log_responses,
                split=self._split if with_tokens and number < TOKEN_SAMPLES_PER_STEP else None,
                evaluation=evaluation,
            )
            self._samples.write_line(record.to_json())

    def _write_payloads(self, samples: list[Sample], step: int) -> None:
        try:
            self._payloads.write(samples, step)
        except OSError as error:
            logger.warning("diagnostics of step %d could not be written: %s", step, error)


def _story(values: Mapping[str, float]) -> str:
    names = (REVERSE_KL, "loss", "reward", "response_length", "grad_norm", "staleness")
    times = [name for name in values if name.startswith("seconds_")]
    return ", ".join(f"{name}={values[name]:.4g}" for name in (*names, *times) if name in values)
