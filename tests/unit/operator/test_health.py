"""Endpoints, metrics and logs of the operator's process."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import AsyncIterator

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from opd_operator.health import STUCK_SECONDS, HealthServer, Vital, complaint
from opd_operator.logs import JsonFormatter, log_context
from opd_operator.metrics import JobSample, Metrics, PhaseClock, teachers_ready

HEALTHY = Vital(synced=True, oldest_watch_seconds=10, longest_pass_seconds=0.1)
#: The names that dashboards, alerts and the documentation use.
NAMES = {
    "opd_operator_reconcile_seconds",
    "opd_operator_queue_depth",
    "opd_operator_queue_latency_seconds",
    "opd_operator_queue_retries",
    "opd_operator_api_calls",
    "opd_operator_events_seen",
    "opd_operator_leader",
    "opd_operator_watch_age_seconds",
    "opd_job_phase",
    "opd_job_step",
    "opd_job_reverse_kl",
    "opd_job_teachers_ready",
    "opd_job_attempts",
    "opd_job_accelerators",
    "opd_job_seconds_in_phase",
}


class Process:
    def __init__(self) -> None:
        self.vital = HEALTHY
        self.ages = {"pods@a": 5.0, "pods@b": 9.0, "opdjobs": 1.0}
        self.metrics = Metrics()
        self.url = ""


@pytest.fixture
async def process() -> AsyncIterator[Process]:
    made = Process()
    server = HealthServer(
        metrics=made.metrics,
        vital=lambda: made.vital,
        watch_ages=lambda: made.ages,
        watch_stale_seconds=300,
        port=0,
    )
    made.url = f"http://127.0.0.1:{await server.start()}"
    yield made
    await server.stop()


async def fetch(process: Process, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(process.url + path) as response:
        return response.status, await response.text()


async def test_a_healthy_process_says_ok(process: Process) -> None:
    assert await fetch(process, "/healthz") == (200, "ok")
    assert await fetch(process, "/readyz") == (200, "ok")


async def test_a_silent_watch_fails_liveness_but_not_readiness(process: Process) -> None:
    process.vital = Vital(synced=True, oldest_watch_seconds=301, longest_pass_seconds=0)
    code, words = await fetch(process, "/healthz")
    assert code == 503
    assert "silent for 301 s" in words
    assert (await fetch(process, "/readyz"))[0] == 200


async def test_a_hanging_pass_fails_liveness(process: Process) -> None:
    process.vital = Vital(synced=True, oldest_watch_seconds=1, longest_pass_seconds=STUCK_SECONDS + 1)
    assert (await fetch(process, "/healthz"))[0] == 503


async def test_readiness_waits_for_the_first_list_only(process: Process) -> None:
    process.vital = Vital(synced=False, oldest_watch_seconds=0, longest_pass_seconds=0)
    assert (await fetch(process, "/readyz"))[0] == 503
    assert (await fetch(process, "/healthz"))[0] == 200


def test_complaints_begin_past_the_limit_only() -> None:
    assert complaint(Vital(True, 300, 0), watch_stale_seconds=300) is None
    assert complaint(Vital(True, 300.1, 0), watch_stale_seconds=300) is not None


async def test_every_promised_metric_is_scraped(process: Process) -> None:
    sample = JobSample("team", "math", "Training", 12.5, 40, 0.21, 2, 8)
    process.metrics.export_jobs(lambda: [sample])
    process.metrics.queue_depth(3)
    process.metrics.queue_latency(0.1)
    process.metrics.queue_retry()
    process.metrics.api_call("get", "pods", "200")
    process.metrics.events_seen.labels(kind="Pod").inc()
    process.metrics.leader.set(1)
    process.metrics.reconcile_seconds.labels(outcome="changed").observe(0.1)
    process.metrics.attempts.labels("Infrastructure").inc()
    code, text = await fetch(process, "/metrics")
    assert code == 200
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families.keys() >= NAMES
    ages = {sample.labels["kind"]: sample.value for sample in families["opd_operator_watch_age_seconds"].samples}
    assert ages == {"pods": 9.0, "opdjobs": 1.0}, "the oldest of all namespaces counts"
    (phase,) = families["opd_job_phase"].samples
    assert phase.labels == {"namespace": "team", "name": "math", "phase": "Training"}
    for family in families.values():
        for found in family.samples:
            assert not {"uid", "job_uid"} & found.labels.keys()


def test_series_of_a_job_end_with_the_job() -> None:
    metrics = Metrics()
    jobs = [JobSample("team", "math", "Training", 1.0, None, None, None, 0)]
    metrics.export_jobs(lambda: jobs)
    assert b'name="math"' in metrics.render()
    jobs.clear()
    assert b'name="math"' not in metrics.render()


def test_what_a_job_has_not_reported_is_absent_not_zero() -> None:
    metrics = Metrics()
    metrics.export_jobs(lambda: [JobSample("team", "math", "Pending", 1.0, None, None, None, 0)])
    text = metrics.render().decode()
    assert "opd_job_step{" not in text
    assert "opd_job_reverse_kl{" not in text


def test_time_in_a_phase_starts_anew_with_each_phase_and_survives_a_restart_of_the_operator() -> None:
    now = [1000.0]
    clock = PhaseClock(lambda: now[0])
    assert clock.seconds("u", "Training", first_guess=900.0) == 100.0
    now[0] += 50
    assert clock.seconds("u", "Training", first_guess=990.0) == 150.0
    assert clock.seconds("u", "Finishing", first_guess=None) == 0.0
    clock.keep(set())
    assert clock.seconds("u", "Finishing", first_guess=None) == 0.0


@pytest.mark.parametrize(
    ("text", "ready"), [("1/2", 1), ("0/1", 0), ("released", None), (None, None), ("", None), ("x", None)]
)
def test_ready_teachers_are_read_from_the_column(text: str | None, ready: int | None) -> None:
    assert teachers_ready(text) == ready


def test_a_log_line_is_json_with_the_job_it_is_about() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("opd_operator.test")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with log_context(job="math", uid="u-1", attempt=2):
            logger.info("pass", extra={"writes": 3})
        try:
            raise ValueError("boom")
        except ValueError:
            logger.exception("bad")
    finally:
        logger.removeHandler(handler)
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert {"job": "math", "uid": "u-1", "attempt": 2, "writes": 3, "level": "info"}.items() <= first.items()
    assert "job" not in second
    assert "ValueError: boom" in second["exception"]
