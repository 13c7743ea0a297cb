"""The teacher server: its scores are a plain forward's, its answers SGLang's, its refusals clear."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from opd_testing.configs import trainer_config
from opd_testing.tiny_models import direct_logprobs, write_model

from opd_api.v1alpha1 import TeacherBackend
from opd_trainer.sample import Sample, TokenSet
from opd_trainer.teachers import scoring
from opd_trainer.teachers.adapters import ADAPTERS
from opd_trainer.teachers.batching import Batcher, QueueFullError
from opd_trainer.teachers.pool import TeacherPool
from opd_trainer.teachers.scoring import ScoreRows, ScoreTask
from opd_trainer.teachers.server import TeacherServer, add_server_arguments, build_server
from opd_trainer.teachers.wire import ScoreAnswer, ScoreQuery

VOCABULARY = 259
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("teacher"), seed=3, scale=4.0)


def server_for(model: Path, *more: str) -> TeacherServer:
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    return build_server(parser.parse_args(["--model", str(model), "--dtype", "fp32", "--device", "cpu", *more]))


@contextlib.asynccontextmanager
async def client_of(server: TeacherServer) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(server.application())) as client:
        yield client


async def post(client: TestClient, body: Any, **options: Any) -> tuple[int, Any]:
    data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    async with client.post("/generate", data=data, **options) as response:
        return response.status, orjson.loads(await response.read())


async def ask(client: TestClient, query: ScoreQuery, backend: TeacherBackend) -> ScoreAnswer:
    documents = []
    for call in ADAPTERS[backend].calls(query, model=None):
        status, document = await post(client, call.body)
        assert status == 200, document
        documents.append(document)
    return ADAPTERS[backend].parse(query, documents)


def random_query(seed: int, prompt: int, response: int, k: int = 3) -> ScoreQuery:
    generator = np.random.default_rng(seed)
    ids = generator.integers(3, VOCABULARY, prompt + response).astype(np.int32)
    at = generator.integers(0, VOCABULARY, (response, k)).astype(np.int32)
    return ScoreQuery(ids[:prompt], ids[prompt:], k, at, vocabulary=VOCABULARY)


def check(answer: ScoreAnswer, query: ScoreQuery, model: Path, atol: float = 1e-4) -> None:
    reference = direct_logprobs(model, query.input_ids.tolist())[len(query.prompt_ids) - 1 :]
    labels = torch.from_numpy(query.response_ids.astype(np.int64))[:, None]
    np.testing.assert_allclose(answer.sampled, reference.gather(1, labels)[:, 0], atol=atol)
    assert answer.top is not None
    assert answer.at is not None
    assert query.at_ids is not None
    values, _ = reference.topk(query.top_k)
    np.testing.assert_allclose(answer.top.logprobs, values, atol=atol)
    chosen = torch.from_numpy(answer.top.ids.astype(np.int64))
    np.testing.assert_allclose(reference.gather(1, chosen), values, atol=atol)
    given = torch.from_numpy(query.at_ids.astype(np.int64))
    np.testing.assert_allclose(answer.at, reference.gather(1, given), atol=atol)


@pytest.mark.parametrize("backend", [TeacherBackend.TRANSFORMERS, TeacherBackend.SGLANG])
async def test_scores_are_those_of_a_plain_forward(model: Path, backend: TeacherBackend) -> None:
    async with client_of(server_for(model)) as client:
        for seed, (prompt, response) in enumerate([(1, 1), (4, 9), (20, 200)]):
            query = random_query(seed, prompt, response)
            check(await ask(client, query, backend), query, model)


async def test_sequences_of_different_length_in_one_batch_do_not_touch_each_other(model: Path) -> None:
    queries = [random_query(seed, 1 + seed % 5, 1 + 7 * seed) for seed in range(12)]
    async with client_of(server_for(model)) as client:
        answers = await asyncio.gather(*(ask(client, query, TeacherBackend.TRANSFORMERS) for query in queries))
    for query, answer in zip(queries, answers, strict=True):
        check(answer, query, model)


async def test_the_result_does_not_depend_on_the_chunks_of_the_head(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = random_query(1, 5, 50)
    monkeypatch.setitem(scoring.CHUNK_BYTES, "cpu", 4 * VOCABULARY * 7)
    async with client_of(server_for(model)) as client:
        check(await ask(client, query, TeacherBackend.TRANSFORMERS), query, model, atol=1e-5)


async def test_a_model_whose_logits_are_more_than_its_head_goes_through_its_own_forward(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_for(model)
    original = type(server.model.model).forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    monkeypatch.setattr(type(server.model.model), "forward", scaled)
    assert not server.model._head_is_all(server.model.model.get_output_embeddings())
    server.model._head = None
    ids = np.array([5, 6, 7, 8], dtype=np.int64)
    (rows,) = server.model.score([ScoreTask(ids, 1)])
    with torch.inference_mode():
        logits = server.model.model(input_ids=torch.from_numpy(ids)[None]).logits[0].double()
    expected = torch.log_softmax(logits, -1)[[1, 2], [7, 8]]
    np.testing.assert_allclose(rows.sampled, expected, atol=1e-5)


async def test_the_pool_and_the_server_agree_on_every_selection(model: Path, tmp_path: Path) -> None:
    async with TestServer(server_for(model).application()) as running:
        url = f"http://127.0.0.1:{running.port}"
        for selection in ("teacher_topk", "student_topk", "union", "intersection"):
            config = trainer_config(
                tmp_path,
                urls={"teacher": [url]},
                distillation={"signal": "loss", "tokenSelection": selection, "topK": 3},
            )
            query = random_query(9, 4, 6)
            assert query.at_ids is not None
            ids = np.argsort(np.random.default_rng(1).random((6, VOCABULARY)), 1)[:, :3].astype(np.int32)
            top = TokenSet(ids, np.zeros((6, 3), np.float32), np.ones((6, 3), bool))
            sample = Sample(1, 1, "", query.prompt_ids, response_ids=query.response_ids, student_topk=top)
            pool = TeacherPool(config)
            await pool.start()
            try:
                await pool.score(sample)
            finally:
                await pool.stop()
            assert sample.selected is not None
            reference = direct_logprobs(model, query.input_ids.tolist())[3:]
            chosen = torch.from_numpy(sample.selected.ids.astype(np.int64))
            np.testing.assert_allclose(sample.selected.logprobs, reference.gather(1, chosen), atol=1e-4)


def body(**more: Any) -> dict[str, Any]:
    return {
        "input_ids": [5, 6, 7, 8],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 1,
        **more,
    }


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"input_ids": [5, VOCABULARY]}, "below 259"),
        ({"input_ids": [5, -1]}, "at least 0"),
        ({"input_ids": [5] * 513}, "context is 512"),
        ({"input_ids": [5]}, "at least two"),
        ({"input_ids": "text"}, "list of token ids"),
        ({"input_ids": [5, 1.5]}, "whole numbers"),
        ({"input_ids": [5, True]}, "whole numbers"),
        ({"text": "hello"}, "does not know text"),
        ({"sampling_params": {"max_new_tokens": 5}}, "only scores"),
        ({"return_logprob": False}, "return_logprob"),
        ({"logprob_start_len": 3}, "between 0 and 2"),
        ({"logprob_start_len": -1}, "between 0 and 2"),
        ({"top_logprobs_num": VOCABULARY + 1}, "between 0 and 259"),
        ({"token_ids_logprob": [VOCABULARY]}, "below 259"),
        ({"stream": True}, "does not stream"),
        ({"position_token_ids_b64": "!", "position_token_ids_shape": [1, 1]}, "base64"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_with_a_reason(
    model: Path, change: dict[str, Any], complaint: str
) -> None:
    async with client_of(server_for(model)) as client:
        status, document = await post(client, body(**change))
    assert status == 400
    assert complaint in document["error"]["message"]


async def test_a_batch_of_sequences_is_answered_as_a_list(model: Path) -> None:
    async with client_of(server_for(model)) as client:
        status, documents = await post(client, body(input_ids=[[5, 6, 7], [5, 6, 7, 8]]))
        single = await post(client, body(input_ids=[5, 6, 7]))
    assert status == 200
    assert [len(document["meta_info"]["input_token_logprobs"]) for document in documents] == [2, 3]
    one = documents[0]["meta_info"]["input_token_logprobs"][1][0]
    assert one == pytest.approx(single[1]["meta_info"]["input_token_logprobs"][1][0], abs=1e-5)


async def test_scoring_needs_the_key_and_probes_do_not(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_TEACHER_API_KEY", "s3cret")
    async with client_of(server_for(model)) as client:
        assert (await post(client, body()))[0] == 401
        assert (await post(client, body(), headers={"Authorization": "Bearer wrong"}))[0] == 401
        assert (await post(client, body(), headers={"Authorization": "Bearer s3cret"}))[0] == 200
        for path, wanted in (("/health", 200), ("/health_generate", 200), ("/metrics", 200), ("/model_info", 401)):
            async with client.get(path) as response:
                assert response.status == wanted, path


async def test_the_server_says_what_it_serves_and_what_it_can(model: Path) -> None:
    async with client_of(
        server_for(model, "--served-model-name", "org/teacher", "--max-context-tokens", "64")
    ) as client:
        async with client.get("/model_info") as response:
            info = await response.json()
        async with client.get("/server_info") as response:
            server = await response.json()
        async with client.get("/v1/models") as response:
            models = await response.json()
        assert (await post(client, body(input_ids=[5] * 65)))[0] == 400
    assert (info["served_model_name"], info["vocab_size"], info["max_context_tokens"]) == ("org/teacher", 259, 64)
    assert server["capabilities"]["position_token_ids"] is True
    assert models["data"][0]["id"] == "org/teacher"


async def test_requests_tokens_and_seconds_are_counted(model: Path) -> None:
    async with client_of(server_for(model)) as client:
        await post(client, body())
        await post(client, body(input_ids=[5]))
        async with client.get("/metrics") as response:
            text = await response.text()
    assert 'opd_teacher_server_requests_total{code="200"} 1.0' in text
    assert 'opd_teacher_server_requests_total{code="400"} 1.0' in text
    assert "opd_teacher_server_tokens_total 4.0" in text
    assert "opd_teacher_server_request_seconds_count 1.0" in text


def rows_for(tasks: Any) -> list[ScoreRows]:
    return [ScoreRows(np.zeros(task.rows, np.float32)) for task in tasks]


def task(length: int) -> ScoreTask:
    return ScoreTask(np.arange(length, dtype=np.int64), 0)


async def test_waiting_requests_share_a_forward_within_the_token_budget() -> None:
    batches: list[list[int]] = []
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    def score(tasks: Any) -> list[ScoreRows]:
        batches.append([len(item.ids) for item in tasks])
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(10)
        return rows_for(tasks)

    batcher = Batcher(score, max_tokens=40, max_waiting=100)
    batcher.start()
    waiting = [asyncio.create_task(batcher.submit(task(length))) for length in (10, 10, 10, 12, 100, 10)]
    async with asyncio.timeout(10):
        while not batches:
            await asyncio.sleep(0.01)
        gate.set()
        await asyncio.gather(*waiting)
    await batcher.stop()
    assert [100] in batches, "a giant goes alone"
    assert all(max(batch) * len(batch) <= 40 for batch in batches if batch != [100])
    assert sum(map(len, batches)) == 6
    assert len(batches) < 6


async def test_a_full_queue_refuses_and_a_failed_forward_fails_only_its_batch() -> None:
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    calls = [0]

    def score(tasks: Any) -> list[ScoreRows]:
        calls[0] += 1
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(10)
        if calls[0] == 1:
            raise RuntimeError("no memory")
        return rows_for(tasks)

    batcher = Batcher(score, max_tokens=4, max_waiting=1)
    batcher.start()
    first = asyncio.create_task(batcher.submit(task(4)))
    async with asyncio.timeout(10):
        while not calls[0]:
            await asyncio.sleep(0.01)
    second = asyncio.create_task(batcher.submit(task(4)))
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await batcher.submit(task(4))
    gate.set()
    with pytest.raises(RuntimeError, match="no memory"):
        await first
    assert len((await second).sampled) == 3
    assert batcher.alive
    await batcher.stop()
