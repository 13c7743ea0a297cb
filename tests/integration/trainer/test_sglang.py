"""The real SGLang 0.5.23 on a CPU (with the stand-in for its kernels), as a student's engine and as a teacher.

One server serves the whole module; the last test kills it and waits for the next one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from aiohttp.test_utils import TestServer
from opd_testing.configs import trainer_config
from opd_testing.tiny_models import direct_logprobs, write_model

from opd_trainer.errors import SampleError
from opd_trainer.rollout.engines import replica_settings
from opd_trainer.rollout.engines.fleet import Fleet
from opd_trainer.rollout.engines.processes import start_ticks
from opd_trainer.rollout.engines.sglang_engine import SglangReplica
from opd_trainer.sample import Sample, TokenSet, VersionSpan
from opd_trainer.teachers.pool import TeacherPool
from opd_trainer.teachers.scoring import TeacherModel
from opd_trainer.teachers.server import ServerSettings, TeacherServer

STANDIN = Path(__file__).parents[2] / "support" / "sgl_kernel_standin"
VOCABULARY = 259
START_SECONDS = 900
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(1200),
    pytest.mark.asyncio(loop_scope="module"),
]


class InProcessReplica(SglangReplica):
    """The actor's class as a handle, without Ray in between."""

    async def placed(self, seconds: float) -> None:
        """It is here."""

    def kill(self) -> None:
        """The server is ended by `stop`."""


class World:
    """A fleet of one engine over two sets of weights."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.first = write_model(root / "v0", seed=1, family="qwen2", scale=3.0)
        self.second = write_model(root / "v1", seed=2, family="qwen2", scale=3.0)
        self.config = trainer_config(
            root,
            student=str(self.first),
            rollout={"engine": "sglang", "maxResponseTokens": 400},
            lifecycle={"stallTimeoutSeconds": START_SECONDS},
        )
        self.replicas: list[InProcessReplica] = []
        self.fleet = Fleet(
            self._make, replicas=1, concurrency_per_replica=16, start_deadline=START_SECONDS, drain_deadline=60
        )

    def _make(self, index: int) -> InProcessReplica:
        self.replicas.append(InProcessReplica(replica_settings(self.config, index)))
        return self.replicas[-1]

    @property
    def url(self) -> str:
        return self.replicas[-1]._url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{STANDIN}{os.pathsep}{before}"
    item = World(tmp_path_factory.mktemp("sglang"))
    try:
        await item.fleet.start(item.first, 0)
        yield item
    finally:
        await item.fleet.stop()
        os.environ["PYTHONPATH"] = before


def sample(seed: int, prompt: int, response: int, k: int = 3) -> Sample:
    generator = np.random.default_rng(seed)
    ids = generator.integers(3, VOCABULARY, prompt + response).astype(np.int32)
    top = np.argsort(generator.random((response, VOCABULARY)), 1)[:, :k].astype(np.int32)
    student = TokenSet(top, np.zeros((response, k), np.float32), np.ones((response, k), bool))
    return Sample(seed, seed, "", ids[:prompt], response_ids=ids[prompt:], student_topk=student)


@pytest.mark.parametrize("selection", ["student_sampled", "teacher_topk", "student_topk", "union", "intersection"])
async def test_sglang_the_transformers_server_and_a_plain_forward_score_alike(world: World, selection: str) -> None:
    server = TeacherServer(
        TeacherModel(str(world.first), dtype="fp32", device="cpu"),
        ServerSettings("teacher", 512, 8192, 64, None),
    )
    options = {"signal": "loss", "tokenSelection": selection}
    if selection != "student_sampled":
        options |= {"topK": 3}
    scored: dict[str, list[Sample]] = {}
    async with TestServer(server.application()) as ours:
        for backend, url in (("sglang", world.url), ("transformers", f"http://127.0.0.1:{ours.port}")):
            config = trainer_config(
                world.root,
                urls={"teacher": [url]},
                teachers=[{"name": "teacher", "backend": backend, "endpoints": [url]}],
                student=str(world.first),
                distillation=options,
            )
            pool = TeacherPool(config)
            await pool.start()
            try:
                # 300 response tokens are three windows of ids.
                scored[backend] = [sample(1, 20, 300), sample(2, 1, 1), sample(3, 40, 17)]
                await asyncio.gather(*(pool.score(item) for item in scored[backend]))
            finally:
                await pool.stop()
    for theirs, mine in zip(scored["sglang"], scored["transformers"], strict=True):
        assert mine.response_ids is not None
        reference = direct_logprobs(world.first, [*mine.prompt_ids.tolist(), *mine.response_ids.tolist()])
        rows = reference[len(mine.prompt_ids) - 1 :]
        labels = torch.from_numpy(mine.response_ids.astype(np.int64))[:, None]
        for item in (theirs, mine):
            np.testing.assert_allclose(item.teacher_logprobs, rows.gather(1, labels)[:, 0], atol=1e-4)
            if selection == "student_sampled":
                assert item.selected is None
                continue
            assert item.selected is not None
            given = rows.gather(1, torch.from_numpy(item.selected.ids.astype(np.int64)))
            np.testing.assert_allclose(item.selected.logprobs, given, atol=1e-4)
            if selection == "teacher_topk":
                np.testing.assert_allclose(item.selected.logprobs, rows.topk(3).values, atol=1e-4)


async def test_rollouts_report_the_log_probabilities_of_a_plain_forward(world: World) -> None:
    prompts = [sample(seed, 1 + seed, 1).prompt_ids for seed in range(6)]
    results = await asyncio.gather(
        *(world.fleet.generate(ids, group_id=seed, max_tokens=24, top_k=2) for seed, ids in enumerate(prompts))
    )
    for ids, result in zip(prompts, results, strict=True):
        assert result.finish_reason in ("stop", "length")
        assert result.version_spans == (VersionSpan(0, 0, len(result.response_ids)),)
        if result.finish_reason == "stop":
            assert result.response_ids[-1] == 1, "the end token belongs to the response"
        rows = direct_logprobs(world.first, [*ids.tolist(), *result.response_ids.tolist()])[len(ids) - 1 :]
        labels = torch.from_numpy(result.response_ids.astype(np.int64))[:, None]
        np.testing.assert_allclose(result.logprobs, rows.gather(1, labels)[:, 0], atol=1e-4)
        assert result.topk is not None
        np.testing.assert_allclose(result.topk.logprobs, rows.topk(2).values, atol=1e-4)


async def test_a_prompt_that_would_kill_the_server_never_reaches_it(world: World) -> None:
    for ids in ([5, VOCABULARY], [5, -1]):
        with pytest.raises(SampleError, match="outside"):
            await world.fleet.generate(np.array(ids, np.int32), group_id=1, max_tokens=4)
    with pytest.raises(SampleError, match="refuses"):
        await world.fleet.generate(np.full(600, 5, np.int32), group_id=1, max_tokens=4)
    assert (await world.replicas[-1].status()).alive


async def test_new_weights_abort_what_runs_and_serve_what_follows(world: World) -> None:
    running = [
        asyncio.create_task(
            world.fleet.generate(np.array([5, 6 + index], np.int32), group_id=index, max_tokens=390, top_k=2)
        )
        for index in range(4)
    ]
    async with asyncio.timeout(60):
        while not world.replicas[-1]._running:
            await asyncio.sleep(0.05)
    await world.fleet.update_weights(world.second, 1, abort=True)
    for result in await asyncio.gather(*running):
        assert all(span.version == 0 for span in result.version_spans)
        assert len(result.response_ids) < 390
    after = await world.fleet.generate(np.array([5, 6], np.int32), group_id=1, max_tokens=16)
    assert [span.version for span in after.version_spans] == [1]
    rows = direct_logprobs(world.second, [5, 6, *after.response_ids.tolist()])[1:]
    labels = torch.from_numpy(after.response_ids.astype(np.int64))[:, None]
    np.testing.assert_allclose(after.logprobs, rows.gather(1, labels)[:, 0], atol=1e-4)


async def test_a_killed_server_is_replaced_by_one_with_the_current_weights(world: World) -> None:
    process = world.replicas[-1]._process
    assert process is not None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    waiting = asyncio.create_task(world.fleet.generate(np.array([5, 6], np.int32), group_id=1, max_tokens=390))
    await asyncio.sleep(0)
    os.kill(int(children[0]), 9)
    result = await waiting
    assert len(world.replicas) == 2
    assert [span.version for span in result.version_spans] == [1]
    assert all(start_ticks(int(pid)) is None for pid in children)
