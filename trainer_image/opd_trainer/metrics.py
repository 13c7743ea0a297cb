"""One door for numbers: Prometheus (live), TensorBoard and JSON lines (in the run directory)."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from opd_trainer.errors import Failure
from opd_trainer.sample import Sample, SampleState

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_LENGTHS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class PrometheusMetrics:
    """The live view. Its own registry, so several runs can live in one process."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        self.reverse_kl = gauge(
            "opd_reverse_kl", "Mean of log student - log teacher over trained response tokens, in nats."
        )
        self.loss = gauge("opd_loss", "Loss of the last step.")
        self.step = gauge("opd_step", "Finished optimizer steps.")
        self.total_steps = gauge("opd_total_steps", "Steps of the whole run.")
        self.reward = gauge("opd_reward", "Mean task reward of the last step.")
        self.response_length = gauge("opd_response_length", "Mean response length of the last step, in tokens.")
        self.staleness = gauge("opd_staleness", "Mean age of the last batch, in weight versions.")
        self.weight_version = gauge("opd_weight_version", "Version of the published weights.")
        self.buffer_samples = gauge(
            "opd_buffer_samples", "Samples by state; the four exits are cumulative.", ("state",)
        )
        self.learner = gauge("opd_learner", "Every number of the last step, by its name in metrics.jsonl.", ("metric",))
        self.evaluation = gauge("opd_evaluation", "Numbers of the last evaluation.", ("metric",))
        self.phase_seconds = gauge(
            "opd_phase_seconds", "Time of the last step, by what the trainer waited for.", ("phase",)
        )
        self.tokens = Counter("opd_tokens", "Tokens by kind.", ("kind",), registry=registry)
        self.samples = Counter("opd_samples", "Samples that passed a stage.", ("stage",), registry=registry)
        self.sample_failures = Counter(
            "opd_sample_failures", "Samples that failed, by class.", ("class", "reason"), registry=registry
        )
        self.teacher_seconds = Histogram(
            "opd_teacher_request_seconds",
            "Time of one scoring request.",
            ("teacher",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.teacher_failures = Counter(
            "opd_teacher_failures", "Scoring requests that failed, by class.", ("teacher", "class"), registry=registry
        )
        self.rollout_seconds = Histogram(
            "opd_rollout_seconds", "Time of one rollout.", buckets=_SECONDS, registry=registry
        )
        self.rollout_tokens = Histogram(
            "opd_rollout_tokens", "Length of a response, in tokens.", buckets=_LENGTHS, registry=registry
        )

    def serve(self, port: int, host: str = "0.0.0.0") -> Callable[[], None]:  # noqa: S104 - Prometheus scrapes from outside
        """Answer scrapes; returns what stops it. Raises OSError when the port is taken."""
        server, thread = start_http_server(port, addr=host, registry=self.registry)

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join(timeout=5)

        return close


class TensorBoard:
    """Event file of one attempt; steps after a resume replace those of the attempt before."""

    def __init__(self, directory: Path, attempt: int, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = Event
        self._writer = EventFileWriter(str(directory), filename_suffix=f".a{attempt}")
        purge = Event(session_log=SessionLog(status=SessionLog.START), step=first_step, wall_time=time.time())
        self._writer.add_event(purge)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Scalars of one step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class JsonLines:
    """Appends one JSON document a line; every line is flushed, so a crash loses at most the last one."""

    def __init__(self, path: Path, *, keep: Callable[[dict[str, Any]], bool] | None = None) -> None:
        """`keep` decides which lines of an earlier attempt stay: a resume repeats the steps after its checkpoint."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if keep is not None and path.exists():
            _rewrite(path, keep)
        self._file = path.open("a", encoding="utf-8")

    def write(self, document: dict[str, Any]) -> None:
        self.write_line(json.dumps(document, allow_nan=False, default=str))

    def write_line(self, text: str) -> None:
        """One JSON document that is text already."""
        self._file.write(text + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _rewrite(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    # A killed attempt may end within a character: only its half line may be lost by that.
    with path.open(encoding="utf-8", errors="replace") as old, temporary.open("w", encoding="utf-8") as new:
        for line in old:
            try:
                document = json.loads(line)
            except ValueError:  # the last line of a killed attempt
                continue
            if keep(document):
                new.write(line if line.endswith("\n") else line + "\n")
    temporary.replace(path)


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without NaN and infinity: neither JSON nor Kubernetes has them."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def observe_sample_states(metrics: PrometheusMetrics, states: Mapping[SampleState, int]) -> None:
    """Set the buffer gauges."""
    for state in SampleState:
        metrics.buffer_samples.labels(state.value).set(states.get(state, 0))


class LiveObserver:
    """Counts samples on their way (controller.groups.Observer)."""

    def __init__(self, prometheus: PrometheusMetrics) -> None:
        self._prometheus = prometheus

    def generated(self, sample: Sample, seconds: float) -> None:
        self._prometheus.samples.labels("generated").inc()
        self._prometheus.tokens.labels("prompt").inc(len(sample.prompt_ids))
        self._prometheus.tokens.labels("response").inc(sample.response_length)
        self._prometheus.rollout_seconds.observe(seconds)
        self._prometheus.rollout_tokens.observe(sample.response_length)

    def discarded(self, tokens: int) -> None:
        self._prometheus.tokens.labels("discarded").inc(tokens)

    def scored(self, sample: Sample, seconds: float) -> None:
        self._prometheus.samples.labels("scored").inc()
        self._prometheus.tokens.labels("scored").inc(len(sample.prompt_ids) + sample.response_length)

    def failed(self, sample: Sample, failure: Failure) -> None:
        self._prometheus.samples.labels("failed").inc()
        self._prometheus.sample_failures.labels(failure.failure_class.value, failure.reason.value).inc()

    def teacher_request(self, teacher: str, outcome: str, seconds: float, _tokens: int) -> None:
        """Listener of the teacher clients: one request ended with `ok` or a kind of fault."""
        self._prometheus.teacher_seconds.labels(teacher).observe(seconds)
        if outcome != "ok":
            self._prometheus.teacher_failures.labels(teacher, str(outcome)).inc()
