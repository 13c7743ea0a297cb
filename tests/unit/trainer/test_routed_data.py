"""Rows by their teacher: what the input check says of a job's data and what the run does with it are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from controller_fakes import FakeEngine, FakeLearner, FakeScorer, FakeTokenizer, Rig
from opd_testing.configs import trainer_config
from virtual_time import run_virtual

from opd_api.trainer_config import TrainerConfig
from opd_api.vocabulary import FailureClass, Outcome, Reason, Severity
from opd_trainer import build
from opd_trainer.build import JobData, open_data
from opd_trainer.controller.state import RunState
from opd_trainer.errors import Failure, TrainerError
from opd_trainer.metrics import PrometheusMetrics
from opd_trainer.preflight.prompts import check_data, check_evaluation
from opd_trainer.preflight.report import Found, Report
from opd_trainer.sample import SampleState
from opd_trainer.storage import RunDirectory

MAP = {"math": "a", "code": "b"}
MIXED = [{"prompt": f"p{row}", "data_source": ("math", "poem", "code", None)[row % 4]} for row in range(12)]
DEEP = [{"prompt": f"p{row}", "extra": {"subject": ("math", "code")[row % 2]}} for row in range(4)]
FLAT = [{"prompt": f"p{row}", "subject": ("math", "code")[row % 2]} for row in range(4)]
NUMBERS = [{"prompt": f"p{row}", "level": row % 2} for row in range(4)]


def job(root: Path, rows: list[dict[str, Any]], *, routing: dict[str, Any], **sections: Any) -> TrainerConfig:
    """Two teachers, a and b, and these rows as data."""
    for name in ("prompts", "held-out"):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return trainer_config(
        root, urls={"a": ["http://127.0.0.1:1"], "b": ["http://127.0.0.1:2"]}, routing=routing, **sections
    )


def checked(config: TrainerConfig) -> list[Found]:
    report = Report("input check")
    check_data(config, FakeTokenizer(), report)
    check_evaluation(config, report)
    return report.found


def opened(config: TrainerConfig) -> JobData | Failure:
    try:
        return open_data(config, FakeTokenizer())
    except TrainerError as error:
        return error.failure


def texts(data: JobData, count: int) -> set[str]:
    return {data.stream.take().text for _ in range(count)}


@pytest.mark.parametrize(
    ("rows", "routing"),
    [
        (FLAT, {"key": "subject", "map": MAP}),
        (DEEP, {"key": "extra.subject", "map": MAP}),
        (NUMBERS, {"key": "level", "map": {"0": "a", "1": "b"}}),
        (FLAT, {"key": "subject", "map": {"math": "a"}, "default": "b"}),
        (FLAT, {"map": MAP, "mode": "ensemble"}),
        (FLAT, {"default": "a"}),
        (MIXED, {"map": {"math": "a"}, "default": "b"}),
    ],
)
def test_what_the_check_passes_the_run_takes_whole(
    tmp_path: Path, rows: list[dict[str, Any]], routing: dict[str, Any]
) -> None:
    config = job(tmp_path, rows, routing=routing)
    assert checked(config) == []
    data = opened(config)
    assert isinstance(data, JobData), data
    assert (data.left_out, len(texts(data, len(rows)))) == (0, len(rows))


@pytest.mark.parametrize(
    ("rows", "routing", "reason", "path"),
    [
        (FLAT, {"map": MAP}, Reason.FIELD_NOT_FOUND, "data.dataSourceField"),
        (FLAT, {"map": MAP, "default": "a"}, Reason.FIELD_NOT_FOUND, "data.dataSourceField"),
        (FLAT, {"key": "topic", "map": MAP}, Reason.FIELD_NOT_FOUND, "routing.key"),
        (FLAT, {"key": "topic", "map": MAP, "default": "a"}, Reason.FIELD_NOT_FOUND, "routing.key"),
        (DEEP, {"key": "extra.topic", "map": MAP}, Reason.FIELD_NOT_FOUND, "routing.key"),
        (DEEP, {"key": "extra", "map": MAP}, Reason.DATA_ERROR, "routing.map"),
        (MIXED, {"map": MAP}, Reason.DATA_ERROR, "routing.map"),
        (MIXED, {"map": {"None": "a", "math": "b", "poem": "a", "code": "a"}}, Reason.DATA_ERROR, "routing.map"),
        (MIXED, {"map": {"prose": "a"}, "strict": False}, Reason.DATA_ERROR, "routing.map"),
    ],
)
def test_what_the_check_refuses_the_run_refuses_before_it_starts_anything(
    tmp_path: Path, rows: list[dict[str, Any]], routing: dict[str, Any], reason: Reason, path: str
) -> None:
    config = job(tmp_path, rows, routing=routing)
    found = checked(config)
    assert [(item.severity, item.reason, item.path) for item in found] == [(Severity.ERROR, reason, f"spec.{path}")]
    failure = opened(config)
    assert isinstance(failure, Failure), "the run takes it"
    assert (failure.failure_class, failure.reason) == (FailureClass.DATA, reason)
    assert path in failure.message


def test_rows_without_a_teacher_are_named_with_what_they_hold_and_what_to_write(tmp_path: Path) -> None:
    failure = opened(job(tmp_path, MIXED, routing={"map": MAP}))
    assert isinstance(failure, Failure)
    assert "6 of 12 rows, the first is row 1, have no teacher for data_source = 'poem', nothing" in failure.message
    assert "set routing.default, or leave such rows out with routing.strict: false" in failure.message


def test_rows_without_a_teacher_are_left_out_of_the_prompts_and_of_the_epochs(tmp_path: Path) -> None:
    training = {"steps": None, "epochs": 2, "promptsPerStep": 3}
    config = job(tmp_path, MIXED, routing={"map": MAP, "strict": False}, training=training)
    found = checked(config)
    assert [(item.severity, item.path) for item in found] == [(Severity.WARNING, "spec.routing.map")]
    assert "they are left out" in found[0].message
    data = opened(config)
    assert isinstance(data, JobData), data
    assert (data.left_out, data.total_steps) == (6, 4)
    assert texts(data, 6) == {"p0", "p2", "p4", "p6", "p8", "p10"}


def test_a_row_that_is_left_out_may_be_too_long_for_the_others(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [*MIXED, {"prompt": "x" * 500, "data_source": "poem"}]
    config = job(tmp_path, rows, routing={"map": MAP, "strict": False}, data={"overlong": "error"})
    assert [item.severity for item in checked(config)] == [Severity.WARNING]
    assert isinstance(opened(config), JobData)


def test_held_out_prompts_have_teachers_too(tmp_path: Path) -> None:
    evaluation = {"everySteps": 1, "source": str(tmp_path / "held-out.jsonl"), "samples": 4}
    routing = {"map": MAP, "strict": False}
    config = job(tmp_path, MIXED, routing=routing, training={"evaluation": evaluation})
    data = opened(config)
    assert isinstance(data, JobData), data
    assert [prompt.text for prompt in data.held_out] == ["p0", "p2", "p4", "p6"]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "p", "data_source": "math"}\n')
    strict = config.model_copy(update={"routing": config.routing.model_copy(update={"strict": True})})
    assert [item.message.split(":")[0] for item in checked(strict)] == [str(tmp_path / "held-out.jsonl")]
    failure = opened(strict)
    assert isinstance(failure, Failure)
    assert failure.message.startswith("training.evaluation.source")


def test_a_routing_value_that_is_no_utf8_is_a_data_error_with_its_row(tmp_path: Path) -> None:
    config = job(tmp_path, MIXED, routing={"map": MAP})
    (tmp_path / "prompts.jsonl").write_bytes(
        b'{"prompt": "a", "data_source": "math"}\n{"prompt": "b", "data_source": "\xff"}\n'
    )
    found = checked(config)
    assert found[0].path == "spec.data.dataSourceField"
    assert "row 1 is not UTF-8" in found[0].message
    failure = opened(config)
    assert isinstance(failure, Failure)
    assert "row 1 is not UTF-8 in 'data_source'" in failure.message


class Tokenizer(FakeTokenizer):
    """With what a checkpoint's fingerprint is made of."""

    all_special_ids = ()

    def get_vocab(self) -> dict[str, int]:
        return {}


async def test_the_run_s_parts_know_how_many_rows_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "load_tokenizer", lambda config: Tokenizer())
    monkeypatch.setattr(build, "start_ray", lambda config: None)
    monkeypatch.setattr(build, "_actors", lambda config, log, steps: (FakeEngine(), FakeLearner(), FakeScorer()))
    config = job(tmp_path, MIXED, routing={"map": MAP, "strict": False}, training={"steps": 7})
    state = RunState(1)
    built = await build.build_parts(config, RunDirectory(tmp_path / "run", 1), state, PrometheusMetrics())
    await built.close()
    assert state.metrics == {"rows_left_out": 6.0}
    assert (built.parts.total_steps, built.parts.stream.size) == (7, 6)


def test_a_run_tells_at_every_step_how_many_rows_it_leaves_out_and_counts_none_as_failed(tmp_path: Path) -> None:
    async def main() -> None:
        rig = Rig(tmp_path / "run")
        rig.state.metrics["rows_left_out"] = 6.0  # by build_parts
        assert rig.controller.progress(1).metrics == {"rows_left_out": 6.0}, "before the first step"
        assert (await rig.controller.run()).outcome is Outcome.SUCCEEDED
        assert [metrics["rows_left_out"] for _, metrics in rig.log.steps] == [6.0] * 4
        assert rig.controller.progress(2).metrics["rows_left_out"] == 6.0
        assert rig.controller.buffer.exits[SampleState.FAILED] == 0

    run_virtual(main())
