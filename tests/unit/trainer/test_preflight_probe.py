"""The teacher probe: only real, repeatable scores of the right model pass."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opd_testing.configs import trainer_config
from opd_testing.fake_teacher import fake_teachers, right_answer
from opd_testing.tiny_models import write_model

from opd_api.progress import FinalDocument
from opd_api.trainer_config import TrainerConfig
from opd_api.vocabulary import ExitCode, FailureClass, Outcome, Reason
from opd_trainer.preflight import probe as probe_module
from opd_trainer.preflight.probe import probe_teachers, run_probe
from opd_trainer.preflight.probe_sequences import full_length_query, probe_queries, read_sequences
from opd_trainer.preflight.report import Found, Report
from opd_trainer.teachers import client as client_module
from opd_trainer.teachers.scoring import TeacherModel
from opd_trainer.teachers.server import ServerSettings, TeacherServer

VOCABULARY = 259


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "REACH_SECONDS", 1.0)
    monkeypatch.setattr(client_module, "RESOLVE_SECONDS", 0.5)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("student"), seed=1, scale=3.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    rows = [{"prompt": f"What is {n} plus {n}, and why is it so?"} for n in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def config_for(
    root: Path, student: Path, urls: list[str], *, backend: str = "sglang", served: str | None = None, **more: Any
) -> TrainerConfig:
    return trainer_config(
        root,
        urls={"teacher": urls},
        teachers=[{"name": "teacher", "backend": backend, "endpoints": urls}],
        student=str(student),
        served_models={"teacher": served} if served else None,
        **more,
    )


async def probe(config: TrainerConfig) -> list[Found]:
    report = Report("teacher probe")
    async with asyncio.timeout(60):
        await probe_teachers(config, report)
    return report.found


async def only(config: TrainerConfig) -> Found:
    found = await probe(config)
    assert len(found) == 1, found
    assert found[0].error_class is FailureClass.TEACHER
    assert found[0].teacher == "teacher"
    assert found[0].path == "spec.teachers[0]"
    return found[0]


@pytest.mark.parametrize("selection", ["student_sampled", "teacher_topk", "union"])
async def test_a_real_teacher_passes_and_is_asked_for_what_the_job_needs(
    root: Path, student: Path, selection: str
) -> None:
    server = TeacherServer(
        TeacherModel(str(student), dtype="fp32", device="cpu"), ServerSettings("org/teacher", 512, 4096, 64, None)
    )
    distillation = {"signal": "loss", "tokenSelection": selection}
    if selection != "student_sampled":
        distillation |= {"topK": 4}
    async with TestServer(server.application()) as running:
        url = f"http://127.0.0.1:{running.port}"
        more = {"backend": "transformers", "served": "org/teacher", "distillation": distillation}
        assert await probe(config_for(root, student, [url], **more)) == []


async def test_a_teacher_of_another_name_is_refused(root: Path, student: Path) -> None:
    async with fake_teachers(1) as (teacher,):
        teacher.served = "org/other"
        found = await only(config_for(root, student, [teacher.url], served="org/teacher"))
    assert found.reason is Reason.TEACHER_ERROR
    assert "serves org/other instead of org/teacher" in found.message
    assert teacher.bodies == []


async def test_a_teacher_that_is_not_there_is_unreachable(root: Path, student: Path) -> None:
    found = await only(config_for(root, student, ["http://127.0.0.1:1"]))
    assert found.reason is Reason.TEACHER_UNREACHABLE


async def test_uniform_output_is_recognised(root: Path, student: Path) -> None:
    def uniform(_: web.Request, body: dict[str, Any]) -> Any:
        answer = right_answer(body)
        for row in answer["meta_info"]["input_token_logprobs"][1:]:
            row[0] = -math.log(VOCABULARY)
        return answer

    async with fake_teachers(1) as (teacher,):
        teacher.behaviour = uniform
        found = await only(config_for(root, student, [teacher.url]))
    assert found.reason is Reason.TEACHER_UNIFORM
    assert "weights are not loaded" in found.message


def noisy(nats: float) -> Any:
    generator = np.random.default_rng(0)

    def behave(_: web.Request, body: dict[str, Any]) -> Any:
        answer = right_answer(body)
        for row in answer["meta_info"]["input_token_logprobs"][1:]:
            row[0] -= float(generator.random()) * nats
        return answer

    return behave


async def test_scores_that_do_not_repeat_are_refused_beyond_the_limits_and_not_below(root: Path, student: Path) -> None:
    async with fake_teachers(1) as (teacher,):
        teacher.behaviour = noisy(1.0)
        found = await only(config_for(root, student, [teacher.url]))
        assert found.reason is Reason.TEACHER_NOT_DETERMINISTIC
        assert "nats on average" in found.message
        teacher.behaviour = noisy(0.01)
        assert await probe(config_for(root, student, [teacher.url])) == []


async def test_scores_that_change_only_under_load_are_refused(root: Path, student: Path) -> None:
    async with fake_teachers(1) as (teacher,):

        async def crowded(_: web.Request, body: dict[str, Any]) -> Any:
            await asyncio.sleep(0.02)
            answer = right_answer(body)
            for row in answer["meta_info"]["input_token_logprobs"][1:]:
                row[0] -= 2.0 * (teacher.running > 1)
            return answer

        teacher.behaviour = crowded
        found = await only(config_for(root, student, [teacher.url]))
    assert "at the same time" in found.message


async def test_replicas_with_other_weights_are_refused(root: Path, student: Path) -> None:
    async with fake_teachers(2) as (one, two):

        def other(_: web.Request, body: dict[str, Any]) -> Any:
            answer = right_answer(body)
            for row in answer["meta_info"]["input_token_logprobs"][1:]:
                row[0] -= 1.0
            return answer

        two.behaviour = other
        found = await only(config_for(root, student, [one.url, two.url]))
    assert found.reason is Reason.TEACHER_NOT_DETERMINISTIC
    assert "same weights" in found.message


async def test_one_bad_replica_of_two_is_named(root: Path, student: Path) -> None:
    async with fake_teachers(2) as (good, bad):
        bad.behaviour = lambda *_: web.Response(status=401)
        found = await only(config_for(root, student, [good.url, bad.url]))
    assert bad.url in found.message
    assert good.url not in found.message


async def test_a_teacher_that_gives_fewer_tokens_than_top_k_is_refused(root: Path, student: Path) -> None:
    def few(_: web.Request, body: dict[str, Any]) -> Any:
        answer = right_answer(body)
        rows = answer["meta_info"]["input_token_logprobs"]
        answer["meta_info"]["input_top_logprobs"] = [None, *([[-0.1, 4, None]] for _ in rows[1:])]
        return answer

    async with fake_teachers(1) as (teacher,):
        teacher.behaviour = few
        distillation = {"signal": "loss", "tokenSelection": "teacher_topk", "topK": 4}
        found = await only(config_for(root, student, [teacher.url], distillation=distillation))
    assert found.reason is Reason.TEACHER_TOPK_TOO_SMALL


async def test_a_teacher_that_refuses_a_sequence_of_full_length_is_found(root: Path, student: Path) -> None:
    def short(_: web.Request, body: dict[str, Any]) -> Any:
        if len(body["input_ids"]) > 80:
            return web.Response(status=400, text="context is 80")
        return right_answer(body)

    async with fake_teachers(1) as (teacher,):
        teacher.behaviour = short
        found = await only(config_for(root, student, [teacher.url]))
        assert (found.reason, "context is 80" in found.message) == (Reason.CONTEXT_TOO_SHORT, True)
        relaxed = config_for(root, student, [teacher.url], preflight={"checkContextLength": False})
        assert await probe(relaxed) == []


async def test_each_sequence_is_scored_twice_in_a_row_and_once_with_all_others(root: Path, student: Path) -> None:
    async with fake_teachers(1) as (teacher,):
        config = config_for(root, student, [teacher.url], preflight={"samples": 3, "checkContextLength": False})
        assert await probe(config) == []
    sequences = [tuple(body["input_ids"]) for body in teacher.bodies]
    assert len(sequences) == 9
    assert sequences[:3] == sequences[3:6]
    assert sorted(sequences[6:]) == sorted(sequences[:3])


def test_the_sequences_are_the_jobs_own_prompts_and_one_has_full_length(root: Path, student: Path) -> None:
    config = config_for(root, student, ["http://127.0.0.1:1"])
    sequences = read_sequences(config)
    queries = probe_queries(config, sequences, VOCABULARY)
    assert len(queries) == config.preflight.samples
    assert len({query.input_ids.tobytes() for query in queries}) == len(queries)
    assert full_length_query(config, sequences, VOCABULARY).tokens == 64 + 32


def test_data_that_cannot_be_read_does_not_keep_a_teacher_from_being_probed(root: Path, student: Path) -> None:
    (root / "prompts.jsonl").unlink()
    assert len(read_sequences(config_for(root, student, ["http://127.0.0.1:1"]))) == 4


def test_the_command_ends_with_the_teachers_exit_code_and_document(root: Path, student: Path) -> None:
    config = config_for(root, student, ["http://127.0.0.1:1"])
    (root / "job.json").write_text(config.to_json())
    assert run_probe(str(root / "job.json"), termination_log=str(root / "log")) == ExitCode.TEACHER
    document = FinalDocument.model_validate_json((root / "log").read_text())
    assert (document.outcome, document.failure_class) == (Outcome.FAILED, FailureClass.TEACHER)
    assert (document.teacher, document.reason) == ("teacher", Reason.TEACHER_UNREACHABLE)
