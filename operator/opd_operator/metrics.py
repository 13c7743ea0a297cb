"""Prometheus metrics. Series of the process are counted here; series of jobs are read from the cache at each scrape,
so they end with the OPDJob. No label ever holds a UID.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)


@dataclass(frozen=True)
class JobSample:
    """What is exported of one OPDJob."""

    namespace: str
    name: str
    phase: str
    seconds_in_phase: float
    step: int | None
    reverse_kl: float | None
    teachers_ready: int | None
    accelerators: int


class Metrics:
    """All metrics of one operator process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.reconcile_seconds = Histogram(
            "opd_operator_reconcile_seconds",
            "Duration of one pass over a job, by outcome.",
            ["outcome"],
            registry=registry,
            buckets=_LATENCY,
        )
        self._depth = Gauge("opd_operator_queue_depth", "Jobs that wait for a worker.", registry=registry)
        self._latency = Histogram(
            "opd_operator_queue_latency_seconds",
            "How long a due job waited for a worker.",
            registry=registry,
            buckets=_LATENCY,
        )
        self._retries = Counter("opd_operator_queue_retries", "Jobs put back after a failed pass.", registry=registry)
        self._calls = Counter(
            "opd_operator_api_calls",
            "Calls to the API server, watches included, by verb, kind and status code.",
            ["verb", "kind", "code"],
            registry=registry,
        )
        self.events_seen = Counter("opd_operator_events_seen", "Watch events by kind.", ["kind"], registry=registry)
        self.leader = Gauge("opd_operator_leader", "1 while this process holds the Lease.", registry=registry)
        self._watch_age = Gauge(
            "opd_operator_watch_age_seconds",
            "Seconds since the watch of a kind last delivered anything, bookmarks included.",
            ["kind"],
            registry=registry,
        )
        self.attempts = Counter(
            "opd_job_attempts", "Ended attempts by failure class; Succeeded has none.", ["class"], registry=registry
        )

    def queue_depth(self, depth: int) -> None:
        """See workqueue.Observer."""
        self._depth.set(depth)

    def queue_latency(self, seconds: float) -> None:
        """See workqueue.Observer."""
        self._latency.observe(max(0.0, seconds))

    def queue_retry(self) -> None:
        """See workqueue.Observer."""
        self._retries.inc()

    def api_call(self, verb: str, kind: str, code: str) -> None:
        """Counts one call; `code` is the HTTP status, or `error` when no answer came."""
        self._calls.labels(verb=verb, kind=kind, code=code).inc()

    def watch_ages(self, ages: Mapping[str, float]) -> None:
        """Replaces the ages of all watches, in seconds by kind."""
        self._watch_age.clear()
        for kind, age in ages.items():
            self._watch_age.labels(kind=kind).set(age)

    def export_jobs(self, samples: Callable[[], Iterable[JobSample]]) -> None:
        """Registers the function that yields one sample a job at each scrape."""
        self.registry.register(_JobCollector(samples))

    def render(self) -> bytes:
        """The text format of everything."""
        return generate_latest(self.registry)


class _JobCollector(Collector):
    """Kube-state style series of the jobs in the cache."""

    def __init__(self, samples: Callable[[], Iterable[JobSample]]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One family a metric."""
        labels = ["namespace", "name"]
        phase = GaugeMetricFamily("opd_job_phase", "1 for the current phase.", labels=[*labels, "phase"])
        seconds = GaugeMetricFamily("opd_job_seconds_in_phase", "Seconds in the current phase.", labels=labels)
        step = GaugeMetricFamily("opd_job_step", "Finished optimizer steps.", labels=labels)
        kl = GaugeMetricFamily("opd_job_reverse_kl", "Last reverse KL, in nats.", labels=labels)
        ready = GaugeMetricFamily("opd_job_teachers_ready", "Teachers whose replicas all answer.", labels=labels)
        held = GaugeMetricFamily("opd_job_accelerators", "Accelerator units of running pods.", labels=labels)
        for sample in self._samples():
            key = [sample.namespace, sample.name]
            phase.add_metric([*key, sample.phase], 1)
            seconds.add_metric(key, sample.seconds_in_phase)
            held.add_metric(key, sample.accelerators)
            if sample.step is not None:
                step.add_metric(key, sample.step)
            if sample.reverse_kl is not None:
                kl.add_metric(key, sample.reverse_kl)
            if sample.teachers_ready is not None:
                ready.add_metric(key, sample.teachers_ready)
        yield from (phase, seconds, step, kl, ready, held)


class PhaseClock:
    """Remembers since when each job has been in its phase, by UID; forgets jobs that are not asked for any more."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._since: dict[str, tuple[str, float]] = {}

    def seconds(self, uid: str, phase: str, first_guess: float | None) -> float:
        """Seconds in the phase. `first_guess` (epoch seconds) is used when this process has not seen the job before."""
        now = self._now()
        known = self._since.get(uid)
        if known is None:
            self._since[uid] = (phase, first_guess if first_guess is not None else now)
        elif known[0] != phase:
            self._since[uid] = (phase, now)
        return max(0.0, now - self._since[uid][1])

    def keep(self, uids: set[str]) -> None:
        """Forgets every other job."""
        for uid in self._since.keys() - uids:
            del self._since[uid]


_READY = re.compile(r"(\d+)/\d+")


def teachers_ready(text: str | None) -> int | None:
    """The 1 of `1/2`."""
    match = _READY.fullmatch(text or "")
    return int(match.group(1)) if match else None
