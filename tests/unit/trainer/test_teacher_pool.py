"""The teacher pool against real servers that fail in every way users have met."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from opd_testing.configs import trainer_config
from opd_testing.fake_teacher import fake_teachers, right_answer
from opd_testing.pool import PROMPT, RESPONSE, config_for, once, pool_of, sample, status

from opd_api.vocabulary import FailureClass
from opd_trainer.errors import SampleError, TrainerError
from opd_trainer.teachers import client as client_module
from opd_trainer.teachers.pool import TeacherPool


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BACKOFF_SECONDS", (0.001, 0.01))


async def test_a_sample_gets_one_log_probability_for_each_response_token(tmp_path: Path) -> None:
    async with fake_teachers(1) as (teacher,), pool_of(config_for(tmp_path, [teacher.url])) as pool:
        item = sample()
        await pool.score(item)
    assert item.teacher == "teacher"
    assert item.teacher_logprobs is not None
    np.testing.assert_allclose(item.teacher_logprobs, [-0.09, -0.10], rtol=1e-6)
    assert item.selected is None


@pytest.mark.parametrize("code", [500, 502, 503, 504, 408, 429])
async def test_errors_of_a_reachable_replica_are_tried_again_at_the_next_one(tmp_path: Path, code: int) -> None:
    async with fake_teachers(2) as teachers, pool_of(config_for(tmp_path, [t.url for t in teachers])) as pool:
        for teacher in teachers:
            teacher.behaviour = once(status(code))
        await pool.score(sample())
        await pool.score(sample(group=2))
        assert sorted(len(teacher.bodies) for teacher in teachers) in ([1, 3], [2, 2])


async def test_retries_run_out_and_only_the_sample_fails(tmp_path: Path) -> None:
    async with fake_teachers(1) as (teacher,), pool_of(config_for(tmp_path, [teacher.url], retries=2)) as pool:
        teacher.behaviour = once(status(500), times=3)
        with pytest.raises(SampleError, match="failed 3 times") as caught:
            await pool.score(sample())
        assert caught.value.failure.failure_class is FailureClass.TEACHER
        assert caught.value.failure.teacher == "teacher"
        assert len(teacher.bodies) == 3
        await pool.score(sample())


@pytest.mark.parametrize("code", [400, 413, 422])
async def test_a_refused_sample_is_a_data_failure_without_a_retry(tmp_path: Path, code: int) -> None:
    async with fake_teachers(1) as (teacher,), pool_of(config_for(tmp_path, [teacher.url])) as pool:
        teacher.behaviour = once(status(code), times=9)
        with pytest.raises(SampleError, match=f"says {code}") as caught:
            await pool.score(sample())
        assert caught.value.failure.failure_class is FailureClass.DATA
        assert len(teacher.bodies) == 1


@pytest.mark.parametrize("code", [401, 403, 404, 302])
async def test_a_teacher_that_cannot_be_used_ends_the_run_at_once(tmp_path: Path, code: int) -> None:
    async with fake_teachers(1) as (teacher,), pool_of(config_for(tmp_path, [teacher.url])) as pool:
        teacher.behaviour = once(status(code), times=9)
        with pytest.raises(TrainerError, match=f"status {code}") as caught:
            await pool.score(sample())
        assert caught.value.failure.failure_class is FailureClass.TEACHER
        assert len(teacher.bodies) == 1


def wrong_ids(_: web.Request) -> Any:
    return right_answer({"input_ids": [*PROMPT, 8, 10], "logprob_start_len": 2})


def truncated(_: web.Request) -> Any:
    return right_answer({"input_ids": [*PROMPT, 8], "logprob_start_len": 2})


def not_a_number(_: web.Request) -> Any:
    answer = right_answer({"input_ids": [*PROMPT, *RESPONSE], "logprob_start_len": 2})
    answer["meta_info"]["input_token_logprobs"][1][0] = None
    return answer


def not_json(_: web.Request) -> Any:
    return web.Response(text="<html>gateway</html>")


@pytest.mark.parametrize("fault", [wrong_ids, truncated, not_a_number, not_json])
async def test_unusable_answers_are_never_used(tmp_path: Path, fault: Callable[[web.Request], Any]) -> None:
    async with fake_teachers(1) as (teacher,), pool_of(config_for(tmp_path, [teacher.url], retries=1)) as pool:
        teacher.behaviour = once(fault)
        item = sample()
        await pool.score(item)
        assert item.teacher_logprobs is not None
        np.testing.assert_allclose(item.teacher_logprobs, [-0.09, -0.10], rtol=1e-6)
        teacher.behaviour = once(fault, times=2)
        with pytest.raises(SampleError):
            await pool.score(sample())


async def test_ids_outside_the_vocabulary_never_reach_a_server(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 10}))
    async with fake_teachers(1) as (teacher,):
        config = config_for(tmp_path, [teacher.url], student=str(model))
        async with pool_of(config) as pool:
            for response in ([8, 10], [8, -1]):
                with pytest.raises(SampleError, match="vocabulary of 10") as caught:
                    await pool.score(sample(response=response))
                assert caught.value.failure.failure_class is FailureClass.DATA
            await pool.score(sample(response=[8, 9]))
        assert len(teacher.bodies) == 1


async def test_sequences_longer_than_the_teachers_context_never_reach_a_server(tmp_path: Path) -> None:
    async with fake_teachers(1) as (teacher,):
        async with pool_of(config_for(tmp_path, [teacher.url], teacher={"maxContextTokens": 4})) as pool:
            with pytest.raises(SampleError, match="5 tokens do not fit"):
                await pool.score(sample())
        assert teacher.bodies == []


async def test_an_empty_response_fails_before_any_request(tmp_path: Path) -> None:
    async with fake_teachers(1) as (teacher,), pool_of(config_for(tmp_path, [teacher.url])) as pool:
        with pytest.raises(SampleError, match="empty"):
            await pool.score(sample(response=[]))
        assert teacher.bodies == []


async def test_requests_and_tokens_in_flight_are_bounded(tmp_path: Path) -> None:
    async def slow(_: web.Request, body: dict[str, Any]) -> Any:
        await asyncio.sleep(0.02)
        return right_answer(body)

    limits = {"maxConcurrency": 4, "maxTokensInFlight": 15}
    async with fake_teachers(1) as (teacher,), pool_of(config_for(tmp_path, [teacher.url], teacher=limits)) as pool:
        teacher.behaviour = slow
        await asyncio.gather(*(pool.score(sample(group)) for group in range(12)))
        assert teacher.most_running == 3, "three times five tokens fit into fifteen"


async def test_the_api_key_is_sent_and_a_missing_one_is_found_before_the_first_request(tmp_path: Path) -> None:
    seen: list[str] = []

    def look(request: web.Request, body: dict[str, Any]) -> Any:
        seen.append(request.headers["Authorization"])
        return right_answer(body)

    async with fake_teachers(1) as (teacher,):
        teacher.behaviour = look
        config = config_for(tmp_path, [teacher.url])
        address = config.run.teachers[0].model_copy(update={"api_key_env": "KEY_OF_TEACHER"})
        config = config.model_copy(update={"run": config.run.model_copy(update={"teachers": [address]})})
        async with pool_of(config, environ={"KEY_OF_TEACHER": "s3cret"}) as pool:
            await pool.score(sample())
        with pytest.raises(TrainerError, match="KEY_OF_TEACHER"):
            TeacherPool(config, environ={})
    assert seen == ["Bearer s3cret"]


async def test_each_sample_goes_to_the_teacher_of_its_data_source(tmp_path: Path) -> None:
    async with fake_teachers(2) as (math, code):
        urls = {"m": [math.url], "c": [code.url]}
        teachers = [{"name": name, "backend": "sglang", "endpoints": url} for name, url in urls.items()]
        config = trainer_config(tmp_path, urls=urls, teachers=teachers, routing={"map": {"math": "m", "code": "c"}})
        async with pool_of(config) as pool:
            items = [sample(index, source=source) for index, source in enumerate(["math", "code", "math"])]
            await asyncio.gather(*(pool.score(item) for item in items))
    assert [item.teacher for item in items] == ["m", "c", "m"]
    assert (len(math.bodies), len(code.bodies)) == (2, 1)


async def test_an_ensemble_mixes_probabilities_by_weight(tmp_path: Path) -> None:
    async with fake_teachers(2) as (one, two):
        two.behaviour = lambda _, body: {
            "meta_info": {"input_token_logprobs": [[None, 7, None], [-2.0, 8, None], [-3.0, 9, None]]}
        }
        urls = {"a": [one.url], "b": [two.url]}
        teachers = [
            {"name": name, "backend": "sglang", "endpoints": url, "weight": weight}
            for (name, url), weight in zip(urls.items(), (1.0, 3.0), strict=True)
        ]
        config = trainer_config(tmp_path, urls=urls, teachers=teachers, routing={"mode": "ensemble"})
        async with pool_of(config) as pool:
            item = sample()
            await pool.score(item)
    expected = np.log([(np.exp(-0.09) + 3 * np.exp(-2.0)) / 4, (np.exp(-0.10) + 3 * np.exp(-3.0)) / 4])
    np.testing.assert_allclose(item.teacher_logprobs, expected, rtol=1e-5)


async def test_every_request_is_told_to_the_listener(tmp_path: Path) -> None:
    told: list[tuple[str, str, int]] = []
    async with fake_teachers(1) as (teacher,):
        config = config_for(tmp_path, [teacher.url])
        listener = lambda name, outcome, seconds, tokens: told.append((name, outcome, tokens))  # noqa: E731
        async with pool_of(config, listener=listener) as pool:
            teacher.behaviour = once(status(500))
            await pool.score(sample())
    assert told == [("teacher", "infra", 5), ("teacher", "ok", 5)]


def test_an_ensemble_of_the_teachers_own_top_tokens_is_refused(tmp_path: Path) -> None:
    config = trainer_config(
        tmp_path,
        urls={"a": ["http://127.0.0.1:1"], "b": ["http://127.0.0.1:2"]},
        routing={"mode": "ensemble"},
        distillation={"signal": "loss", "tokenSelection": "teacher_topk", "topK": 4},
    )
    with pytest.raises(TrainerError, match="student_topk"):
        TeacherPool(config)


def test_an_ensemble_inside_the_learner_may_compare_the_whole_vocabulary(tmp_path: Path) -> None:
    model = {"source": "/models/teacher"}
    config = trainer_config(
        tmp_path,
        urls={},
        teachers=[{"name": name, "backend": "inprocess", "model": model} for name in ("a", "b")],
        routing={"mode": "ensemble"},
        distillation={"signal": "loss", "tokenSelection": "full"},
    )
    assert TeacherPool(config).clients == {}
