"""What a run writes: Prometheus, TensorBoard, JSON lines, payloads, summary."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from controller_fakes import trainer_config

from opd_api.v1alpha1 import TopkStatsMode
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.controller.state import RunState
from opd_trainer.diagnostics import due, token_payload, topk_payload
from opd_trainer.errors import Failure
from opd_trainer.metrics import PrometheusMetrics
from opd_trainer.report.records import MetricsRecord, RunSummary, SampleRecord
from opd_trainer.runlog import RunLog
from opd_trainer.sample import Sample, SampleState, TokenSet, VersionSpan
from opd_trainer.storage import RunDirectory
from opd_trainer.summary import RunReporter


def sample(number: int, *, gap: float = -0.5, source: str = "math") -> Sample:
    length = 3
    value = Sample(number, number, source, np.array([5, 6], dtype=np.int32), prompt_text="2+2?")
    value.response_ids = np.array([1, 2, 3], dtype=np.int32)
    value.response_text = "four"
    value.rollout_logprobs = np.full(length, -1.0, np.float32)
    value.old_logprobs = np.full(length, -1.0, np.float32)
    value.teacher_logprobs = np.array([-1.0 + gap, -1.0 + gap, -9.0], np.float32)
    value.loss_mask = np.array([1, 1, 0], np.float32)
    value.version_spans = (VersionSpan(4, 0, 3),)
    value.teacher, value.finish_reason, value.state = "teacher", "stop", SampleState.CONSUMED
    return value


def with_sets(value: Sample) -> Sample:
    ids = np.array([[1, 2, 3, 4]] * 3, np.int32)
    other = np.array([[1, 2, 8, 9]] * 3, np.int32)
    logprobs = np.log(np.array([[0.4, 0.3, 0.2, 0.05]] * 3, np.float32))
    valid = np.ones((3, 4), bool)
    value.student_topk, value.selected = TokenSet(ids, logprobs, valid), TokenSet(other, logprobs, valid)
    return value


class Logged:
    """A RunLog in a directory, inside a running loop."""

    def __init__(self, root: Path, *, resume_step: int = 0, attempt: int = 1, **diagnostics: Any) -> None:
        config = trainer_config(root, attempt=attempt, diagnostics=diagnostics)
        self.directory = RunDirectory(root, attempt)
        self.prometheus = PrometheusMetrics()
        self.config = config
        self.log = RunLog(
            config, self.directory, self.prometheus, resume_step=resume_step, split=lambda ids: [f"t{i}" for i in ids]
        )

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory.root / "logs" / name).read_text().splitlines()]


STATES = {SampleState.CONSUMED: 4, SampleState.RUNNING: 2}


async def test_a_step_is_readable_as_records(tmp_path: Path) -> None:
    logged = Logged(tmp_path, logResponses=True, tokenStats=True, tokenPeriod=1)
    logged.log.step(5, {"loss": 0.25, "opd_reverse_kl": 0.5, "bad": float("nan")}, [sample(0), sample(1)], STATES)
    record = MetricsRecord.from_document(logged.lines("metrics.jsonl")[0])
    assert (record.step, record.metrics["loss"]) == (5, 0.25)
    assert "bad" not in record.metrics
    assert record.metrics["opd_reverse_kl/source/math"] == pytest.approx(0.5)
    first, second = (SampleRecord.from_document(document) for document in logged.lines("samples.jsonl"))
    assert (first.sample_id, second.sample_id) == (0, 1)
    assert first.teacher_student_logprob_gap_mean == pytest.approx(-0.5), "masked tokens do not count"
    assert first.trained_tokens == 2
    assert first.staleness == 0
    assert first.response == "four"
    assert first.tokens is not None
    assert first.tokens.text == ["t1", "t2", "t3"]
    assert first.tokens.mask == [1, 1, 0]


async def test_text_and_tokens_are_written_only_when_asked_for(tmp_path: Path) -> None:
    logged = Logged(tmp_path)
    logged.log.step(1, {}, [sample(0)], STATES)
    record = SampleRecord.from_document(logged.lines("samples.jsonl")[0])
    assert (record.response, record.prompt, record.tokens) == (None, None, None)


async def test_sample_records_keep_their_period(tmp_path: Path) -> None:
    logged = Logged(tmp_path, samplePeriod=3)
    for step in range(1, 8):
        logged.log.step(step, {}, [sample(step)], STATES)
    assert [line["step"] for line in logged.lines("samples.jsonl")] == [3, 6]
    assert [step for step in range(1, 8) if due(step, 3)] == [3, 6]


async def test_without_sample_stats_nothing_is_written_about_samples(tmp_path: Path) -> None:
    logged = Logged(tmp_path, sampleStats=False)
    logged.log.step(1, {}, [sample(0)], STATES)
    assert logged.lines("samples.jsonl") == []


async def test_a_resume_drops_the_lines_after_its_checkpoint(tmp_path: Path) -> None:
    first = Logged(tmp_path)
    for step in (1, 2, 3):
        first.log.step(step, {"loss": float(step)}, [sample(step)], STATES)
    first.log.close()
    with (tmp_path / "logs" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "half')  # the attempt was killed while it wrote
    second = Logged(tmp_path, resume_step=2, attempt=2)
    second.log.step(3, {"loss": 30.0}, [sample(9)], STATES)
    assert [(line["step"], line["attempt"]) for line in second.lines("metrics.jsonl")] == [(1, 1), (2, 1), (3, 2)]
    assert [line["sample_id"] for line in second.lines("samples.jsonl")] == [1, 2, 9]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
async def test_a_resume_drops_a_line_that_was_cut_off_within_a_character(tmp_path: Path, name: str) -> None:
    first = Logged(tmp_path)
    first.log.step(1, {}, [sample(1, source="größe")], STATES)
    first.log.close()
    with (tmp_path / "logs" / name).open("ab") as file:
        file.write('{"step": 2, "response": "四'.encode()[:-1])
    second = Logged(tmp_path, resume_step=1, attempt=2)
    assert [line["step"] for line in second.lines(name)] == [1]
    assert second.lines("samples.jsonl")[0]["data_source"] == "größe"


async def test_tensorboard_has_the_names_that_people_know(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged = Logged(tmp_path)
    for step in (1, 2):
        logged.log.step(step, {"opd_reverse_kl": 1.0 / step}, [sample(step)], STATES)
    logged.log.close()
    resumed = Logged(tmp_path, resume_step=1, attempt=2)
    resumed.log.step(2, {"opd_reverse_kl": 0.125}, [sample(3)], STATES)
    resumed.log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("opd_reverse_kl")] == [(1, 1.0), (2, 0.125)]


async def test_prometheus_answers_a_scrape_with_the_documented_names(tmp_path: Path) -> None:
    logged = Logged(tmp_path)
    log = logged.log
    log.generated(sample(0), 1.5)
    log.scored(sample(0), 0.2)
    log.discarded(7)
    log.failed(sample(1), Failure(FailureClass.DATA, Reason.DATA_ERROR, "bad"))
    log.teacher_request("teacher", "ok", 0.2, 30)
    log.teacher_request("teacher", "Timeout", 9.0, 30)
    log.published(5)
    log.step(5, {"opd_reverse_kl": 0.5, "loss": 0.1, "staleness": 1.0, "seconds_train": 2.0}, [sample(0)], STATES)
    text = _scrape(logged.prometheus)
    for line in (
        "opd_reverse_kl 0.5",
        "opd_loss 0.1",
        "opd_step 5.0",
        "opd_weight_version 5.0",
        "opd_staleness 1.0",
        'opd_phase_seconds{phase="train"} 2.0',
        'opd_tokens_total{kind="response"} 3.0',
        'opd_tokens_total{kind="discarded"} 7.0',
        'opd_buffer_samples{state="running"} 2.0',
        'opd_buffer_samples{state="pending"} 0.0',
        'opd_teacher_failures_total{class="Timeout",teacher="teacher"} 1.0',
        'opd_teacher_request_seconds_count{teacher="teacher"} 2.0',
        'opd_sample_failures_total{class="Data",reason="DataError"} 1.0',
    ):
        assert line in text, line


def _scrape(prometheus: PrometheusMetrics) -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    close = prometheus.serve(port, "127.0.0.1")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            return str(response.read().decode())
    finally:
        close()


async def test_payloads_follow_their_periods_and_the_newest_are_kept(tmp_path: Path) -> None:
    logged = Logged(tmp_path, tokenStats=True, tokenPeriod=2, topkStats=True, topkPeriod=3, topkStatsK=2)
    for step in range(1, 7):
        logged.log.step(step, {}, [with_sets(sample(step))], STATES)
    await asyncio.get_running_loop().shutdown_default_executor()
    names = sorted(path.name for path in (tmp_path / "diagnostics").iterdir())
    assert names == [
        "tokens-step-2.a1.npz",
        "tokens-step-4.a1.npz",
        "tokens-step-6.a1.npz",
        "topk-step-3.a1.npz",
        "topk-step-6.a1.npz",
    ]
    payload = np.load(tmp_path / "diagnostics" / "tokens-step-2.a1.npz")
    assert payload["token_sequence_position"].tolist() == [2, 3, 4]
    assert payload["teacher_student_logprob_gap"][:2].tolist() == pytest.approx([-0.5, -0.5])


def test_token_payload_marks_what_is_not_known() -> None:
    value = sample(0)
    value.old_logprobs, value.teacher_logprobs = None, None
    payload = token_payload([value], 1)
    assert payload["student_prev_logprobs"].tolist() == [-1.0] * 3
    assert np.isnan(payload["teacher_logprobs"]).all()


def test_topk_payload_measures_the_overlap_of_both_sets() -> None:
    payload = topk_payload([with_sets(sample(0))], 1, k=4, max_tokens=100, mode=TopkStatsMode.ONLINE)
    assert payload["topk_intersection_size"].tolist() == [2, 2, 2]
    assert payload["topk_jaccard"].tolist() == pytest.approx([2 / 6] * 3)
    assert payload["top1_agreement"].all()


def test_topk_payload_is_bounded_before_anything_is_copied() -> None:
    payload = topk_payload([with_sets(sample(n)) for n in range(50)], 1, k=2, max_tokens=10, mode=TopkStatsMode.ONLINE)
    assert payload["student_topk_token_ids"].shape == (10, 2)


def test_deferred_mode_leaves_the_teacher_s_sets_out() -> None:
    mode = TopkStatsMode.STUDENT_ONLINE_TEACHER_DEFERRED
    payload = topk_payload([with_sets(sample(0))], 1, k=2, max_tokens=10, mode=mode)
    assert "student_topk_token_ids" in payload
    assert "teacher_topk_token_ids" not in payload


async def test_the_summary_frames_the_report_and_remembers_failed_attempts(tmp_path: Path) -> None:
    first = Logged(tmp_path)
    first.log.failed(sample(1), Failure(FailureClass.DATA, Reason.DATA_ERROR, "bad"))
    reporter = RunReporter(first.config, first.directory, RunState(1), first.log, render=None)
    assert await reporter("Failed", "a teacher was lost") is None
    second = Logged(tmp_path, attempt=2)
    rendered: list[Path] = []

    def render(directory: Path) -> Path:
        rendered.append(directory)
        return directory / "report" / "index.html"

    reporter = RunReporter(second.config, second.directory, RunState(2), second.log, render=render)
    assert await reporter("Running", "") == tmp_path / "report" / "index.html"
    summary = RunSummary.from_document(json.loads((tmp_path / "logs" / "summary.json").read_text()))
    assert rendered == [tmp_path]
    assert (summary.attempt, summary.outcome) == (2, "Running")
    assert [(failure.attempt, failure.reason) for failure in summary.failures] == [
        (1, "DataError"),
        (1, "AttemptFailed"),
    ]
    assert summary.configuration["training"]["steps"] == 4
    assert "torch" in summary.versions


async def test_a_report_that_cannot_be_drawn_does_not_end_the_run(tmp_path: Path) -> None:
    logged = Logged(tmp_path)

    def render(directory: Path) -> Path:
        raise ValueError("no font")

    reporter = RunReporter(logged.config, logged.directory, RunState(1), logged.log, render=render)
    assert await reporter("Running", "") is None
    assert (tmp_path / "logs" / "summary.json").exists()


@pytest.mark.parametrize(
    ("outcome", "reasons"), [("Running", ["NoFinalDocument"]), ("Failed", ["AttemptFailed"]), ("Preempted", [])]
)
async def test_the_report_says_how_the_attempt_before_ended(tmp_path: Path, outcome: str, reasons: list[str]) -> None:
    first = Logged(tmp_path)
    await RunReporter(first.config, first.directory, RunState(1), first.log, render=None)(outcome, "")
    second = Logged(tmp_path, attempt=2)
    await RunReporter(second.config, second.directory, RunState(2), second.log, render=None)("Running", "")
    summary = RunSummary.from_document(json.loads((tmp_path / "logs" / "summary.json").read_text()))
    assert [failure.reason for failure in summary.failures] == reasons
    assert all(failure.message for failure in summary.failures)
