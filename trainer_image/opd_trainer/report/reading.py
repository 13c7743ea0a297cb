"""The records of a run, read into what a report shows. Sample files can be larger than memory, so they are read line by line
and only what is shown is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opd_trainer.report.records import (
    EVALUATION_PREFIX,
    METRICS_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
    MetricsRecord,
    RunSummary,
    SampleRecord,
)

#: Bounds of what is kept: prompts shown before and after, samples in the table, rows of a breakdown.
PAIRS = 8
LATEST = 16
GROUPS = 32


class ReportError(Exception):
    """There is nothing to report on; the message says what was looked for."""


@dataclass(slots=True)
class Group:
    """What the samples of one data source or teacher say: of the first and of the last steps, and of all."""

    name: str
    samples: int = 0
    tokens: int = 0
    reward_sum: float = 0.0
    rewarded: int = 0
    #: step -> (sum of gaps, trained tokens)
    gaps: dict[int, tuple[float, int]] = field(default_factory=dict)

    def add(self, record: SampleRecord) -> None:
        """Count one sample."""
        self.samples += 1
        self.tokens += record.response_length
        if record.reward is not None:
            self.reward_sum += record.reward
            self.rewarded += 1
        if record.teacher_student_logprob_gap_sum is not None and record.trained_tokens:
            total, count = self.gaps.get(record.step, (0.0, 0))
            self.gaps[record.step] = (total + record.teacher_student_logprob_gap_sum, count + record.trained_tokens)

    def reverse_kl(self, *, first: bool) -> float | None:
        """Token mean of log s - log t over the first or the last fifth of its steps, in nats."""
        steps = sorted(self.gaps)
        size = max(1, len(steps) // 5)
        chosen = steps[:size] if first else steps[-size:]
        total = sum(self.gaps[step][0] for step in chosen)
        tokens = sum(self.gaps[step][1] for step in chosen)
        return -total / tokens if tokens else None

    @property
    def reward(self) -> float | None:
        """Mean reward; None without rewards."""
        return self.reward_sum / self.rewarded if self.rewarded else None

    @property
    def response_length(self) -> float:
        """Mean response length in tokens."""
        return self.tokens / self.samples if self.samples else 0.0


@dataclass(frozen=True, slots=True)
class Pair:
    """One held-out prompt, answered before and after."""

    before: SampleRecord
    after: SampleRecord


@dataclass(slots=True)
class RunData:
    """All that a report shows."""

    summary: RunSummary
    steps: list[MetricsRecord]
    evaluations: list[MetricsRecord]
    pairs: list[Pair] = field(default_factory=list)
    latest: list[SampleRecord] = field(default_factory=list)
    by_source: dict[str, Group] = field(default_factory=dict)
    by_teacher: dict[str, Group] = field(default_factory=dict)
    samples: int = 0
    unreadable_lines: int = 0

    def series(self, metric: str, *, evaluation: bool = False) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, where it was recorded."""
        records = self.evaluations if evaluation else self.steps
        points = [(record.step, record.metrics[metric]) for record in records if metric in record.metrics]
        return [step for step, _ in points], [value for _, value in points]

    def metric_names(self) -> list[str]:
        """Names of all training metrics, sorted."""
        return sorted({name for record in self.steps for name in record.metrics})


def read_run(run_directory: Path) -> RunData:
    """Read <run>/logs. Raises ReportError when there is no summary and no metric."""
    logs = run_directory / "logs"
    data = RunData(_summary(logs / SUMMARY_FILE, run_directory), [], [])
    steps: dict[int, MetricsRecord] = {}
    evaluations: dict[int, MetricsRecord] = {}
    for document in _lines(logs / METRICS_FILE, data):
        try:
            record = MetricsRecord.from_document(document)
        except (KeyError, TypeError, ValueError):
            data.unreadable_lines += 1
            continue
        held_out = any(name.startswith(EVALUATION_PREFIX) for name in record.metrics)
        (evaluations if held_out else steps)[record.step] = record
    if not steps and not evaluations and data.summary.step == 0 and not (logs / SUMMARY_FILE).exists():
        raise ReportError(
            f"{run_directory} is no run directory: it has neither logs/{SUMMARY_FILE} nor logs/{METRICS_FILE}"
        )
    data.steps = [steps[step] for step in sorted(steps)]
    data.evaluations = [evaluations[step] for step in sorted(evaluations)]
    if data.steps and data.steps[-1].step > data.summary.step:  # the summary is as old as the last checkpoint
        data.summary = replace(
            data.summary, step=data.steps[-1].step, updated=max(data.steps[-1].time, data.summary.updated)
        )
    _read_samples(logs / SAMPLES_FILE, data)
    return data


def _summary(path: Path, run_directory: Path) -> RunSummary:
    if path.exists():
        try:
            return RunSummary.from_document(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ReportError(f"{path} cannot be read: {error}") from error
    # A run that ended before its first checkpoint has metrics only.
    return RunSummary(name=run_directory.name, namespace="", attempt=1, started=0.0, updated=0.0, step=0, total_steps=0)


def _lines(path: Path, data: RunData) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                document = json.loads(line)
            except ValueError:  # the last line of a killed attempt
                data.unreadable_lines += 1
                continue
            if isinstance(document, dict):
                yield document


def _read_samples(path: Path, data: RunData) -> None:
    first: dict[int, SampleRecord] = {}
    last: dict[int, SampleRecord] = {}
    for document in _lines(path, data):
        try:
            record = SampleRecord.from_document(document)
        except (TypeError, ValueError):
            data.unreadable_lines += 1
            continue
        if record.evaluation:
            _keep_ends(record, first, last)
            continue
        data.samples += 1
        _group(data.by_source, record.data_source).add(record)
        _group(data.by_teacher, record.teacher or "none").add(record)
        if record.tokens is not None or record.response is not None:
            data.latest.append(record)
            if len(data.latest) > LATEST:
                # Samples with tokens are few and say more than those without.
                plain = next((i for i, item in enumerate(data.latest) if item.tokens is None), 0)
                data.latest.pop(plain)
    data.latest.sort(key=lambda record: (-record.step, record.sample_id))
    both = sorted((key for key in first if key in last and first[key].step < last[key].step), reverse=True)
    data.pairs = [Pair(first[key], last[key]) for key in both[:PAIRS]]


def _keep_ends(record: SampleRecord, first: dict[int, SampleRecord], last: dict[int, SampleRecord]) -> None:
    """Remember the earliest and the newest answer of a held-out prompt; its sample_id is the same in every evaluation."""
    if record.response is None and record.tokens is None:
        return
    key = record.sample_id
    if key not in first and len(first) >= PAIRS * 4:
        return
    if key not in first or record.step <= first[key].step:
        first[key] = record
    if key not in last or record.step >= last[key].step:
        last[key] = record


def _group(groups: dict[str, Group], name: str) -> Group:
    if name not in groups and len(groups) >= GROUPS:
        name = "(others)"
    return groups.setdefault(name, Group(name))
