"""What the trainer writes for the report, and nothing else: one JSON document a line, or one file.

    <run>/logs/metrics.jsonl   MetricsRecord   one a step, and one an evaluation (names with the prefix `eval_`)
    <run>/logs/samples.jsonl   SampleRecord    diagnostics.sampleStats; text with logResponses; tokens with tokenStats
    <run>/logs/summary.json    RunSummary      written anew at every checkpoint and at the end

All log-probabilities are natural, all times are Unix seconds. The files span attempts; a resume drops the lines after its
checkpoint, and a reader takes the last line of a (step, sample) all the same. Readers ignore names they do not know.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
SUMMARY_FILE = "summary.json"

#: Names of metrics that the report draws; others are shown in the table of all metrics.
REVERSE_KL = "opd_reverse_kl"
LOSS = "loss"
RESPONSE_LENGTH = "response_length"
ENTROPY = "entropy"
STUDENT_MASS = "student_mass"
TEACHER_MASS = "teacher_mass"
OVERLAP = "overlap"
STALENESS = "staleness"
REWARD = "reward"
GRADIENT_NORM = "grad_norm"
LEARNING_RATE = "learning_rate"
SECONDS_PREFIX = "seconds_"
EVALUATION_PREFIX = "eval_"


def by_source(metric: str, source: str) -> str:
    """Name of a metric over the samples of one data source: `opd_reverse_kl/source/gsm8k`."""
    return f"{metric}/source/{source}"


def by_teacher(metric: str, teacher: str) -> str:
    """Name of a metric over the samples of one teacher: `opd_reverse_kl/teacher/math`."""
    return f"{metric}/teacher/{teacher}"


class _Record:
    """JSON in and out for flat dataclasses."""

    def to_json(self) -> str:
        """One line without NaN or infinity (JSON has none: they become null)."""
        return json.dumps(_finite(dataclasses.asdict(self)), ensure_ascii=False, allow_nan=False)  # type: ignore[call-overload]

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Raises TypeError when a required name is missing; unknown names are ignored."""
        known = {item.name for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in document.items() if name in known})


@dataclass(frozen=True, slots=True)
class MetricsRecord:
    """Numbers of one step, or of one evaluation after that step (0 = before the first). Flat in JSON: metrics stand beside step and time."""

    step: int
    time: float
    attempt: int
    metrics: dict[str, float]

    def to_document(self) -> dict[str, Any]:
        """The JSON document of one line. Values that are not finite are left out."""
        values = {name: value for name, value in self.metrics.items() if math.isfinite(value)}
        return {"step": self.step, "time": self.time, "attempt": self.attempt, **values}

    def to_json(self) -> str:
        """One line."""
        return json.dumps(self.to_document(), allow_nan=False)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> MetricsRecord:
        """Raises KeyError without a step; other names than step, time and attempt are metrics when they are numbers."""
        metrics = {
            name: float(value)
            for name, value in document.items()
            if name not in ("step", "time", "attempt") and isinstance(value, int | float)
        }
        return cls(int(document["step"]), float(document.get("time", 0.0)), int(document.get("attempt", 1)), metrics)


@dataclass(frozen=True, slots=True)
class TokenRecords:
    """Per-token values of one response, R entries each. mask 0 = not trained (tool or user token)."""

    text: list[str]
    ids: list[int]
    student_logprobs: list[float | None]
    teacher_logprobs: list[float | None]
    mask: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SampleRecord(_Record):
    """One sample of a step, or of an evaluation (`evaluation` true: the same held-out prompts each time, so that the report can
    show one prompt before and after).

    gap = log teacher - log student of the sampled tokens over trained tokens, in nats; negative where the teacher likes the
    token less. The student is the policy before the step's update.
    """

    step: int
    time: float
    attempt: int
    sample_id: int
    group_id: int
    data_source: str
    teacher: str | None
    prompt_length: int
    response_length: int
    finish_reason: str
    staleness: int = 0
    reward: float | None = None
    trained_tokens: int = 0
    teacher_student_logprob_gap_sum: float | None = None
    teacher_student_logprob_gap_mean: float | None = None
    teacher_student_abs_logprob_gap_mean: float | None = None
    evaluation: bool = False
    state: str = "consumed"
    error: str | None = None
    prompt: str | None = None
    response: str | None = None
    tokens: TokenRecords | None = None

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Raises TypeError when a required name is missing."""
        values = dict(document)
        if values.get("tokens") is not None:
            names = {item.name for item in dataclasses.fields(TokenRecords)}
            values["tokens"] = TokenRecords(**{k: v for k, v in values["tokens"].items() if k in names})
        known = {item.name for item in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """Something that went wrong: a failed attempt, a lost engine, a teacher that did not answer, a class of sample errors."""

    time: float
    attempt: int
    step: int
    failure_class: str
    reason: str
    message: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class RunSummary(_Record):
    """The frame of the report."""

    name: str
    namespace: str
    attempt: int
    started: float
    updated: float
    step: int
    total_steps: int
    #: Running, or the outcome of the final document.
    outcome: str = "Running"
    message: str = ""
    checkpoint: str | None = None
    exported_model: str | None = None
    #: TrainerConfig as written (camelCase).
    configuration: dict[str, Any] = field(default_factory=dict)
    #: Package or program -> version: opd, torch, transformers, ray, sglang, python, device.
    versions: dict[str, str] = field(default_factory=dict)
    failures: list[FailureRecord] = field(default_factory=list)
    #: Samples by state, as the books stand.
    sample_states: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Raises TypeError when a required name is missing."""
        values = dict(document)
        names = {item.name for item in dataclasses.fields(FailureRecord)}
        values["failures"] = [
            FailureRecord(**{k: v for k, v in failure.items() if k in names}) for failure in values.get("failures", [])
        ]
        known = {item.name for item in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
