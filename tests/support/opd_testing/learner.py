"""Small jobs, samples and ranks for tests of the learner. No Ray, no engine, no server."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from opd_api.trainer_config import Run, TrainerConfig, project
from opd_api.v1alpha1 import OPDJobSpec, TokenSelection
from opd_trainer.learner.packing import Layout
from opd_trainer.learner.process_group import open_store
from opd_trainer.learner.rank import LearnerRank
from opd_trainer.learner.step import RankWork
from opd_trainer.learner.work import split
from opd_trainer.sample import Sample, TokenSet, VersionSpan
from opd_trainer.teachers.selection import selected_tokens
from opd_trainer.teachers.wire import ScoreAnswer

DEADLINE = timedelta(seconds=120)
#: Importing torch and transformers once is most of it.
RANKS_DEADLINE_SECONDS = 500.0
VOCABULARY = 259


def job(student: Path, run: Path, /, **sections: Any) -> TrainerConfig:
    """A trainer configuration for CPU tests; sections are merged one level deep over the defaults."""
    spec: dict[str, Any] = {
        "runtime": {"device": "cpu"},
        "student": {"model": {"source": str(student), "dtype": "fp32"}},
        "teachers": [{"name": "teacher", "backend": "transformers", "model": {"source": str(student)}}],
        "data": {"source": "/data/prompts.jsonl"},
        "storage": {"claimName": "claim"},
        "rollout": {"engine": "transformers", "maxResponseTokens": 16},
        "training": {"steps": 10, "dtype": "fp32", "learningRate": 0.01, "promptsPerStep": 4},
    }
    for name, values in sections.items():
        spec[name] = {**spec.get(name, {}), **values} if isinstance(values, dict) else values
    identity = Run(
        namespace="local",
        name="job",
        uid8="00000000",
        attempt=1,
        directory=str(run),
        mount_path=str(run),
        progress_config_map=None,
        teachers=[],
    )
    return project(OPDJobSpec.model_validate(spec), identity)


def samples(
    count: int = 6,
    *,
    seed: int = 0,
    group_size: int = 2,
    top_k: int = 4,
    teacher: Path | None = None,
    student: Path | None = None,
    temperature: float = 1.0,
) -> list[Sample]:
    """Samples of different lengths with a few untrained tokens. Log-probabilities are those of real models where given.

    Without models they are noise. `selected` holds the teacher's best `top_k`, `student_topk` the student's.
    """
    generator = np.random.default_rng(seed)
    loaded = {
        name: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        for name, folder in (("teacher", teacher), ("student", student))
        if folder is not None
    }
    made = []
    for index in range(count):
        prompt = generator.integers(3, VOCABULARY, int(generator.integers(1, 7))).astype(np.int32)
        length = int(generator.integers(1, 12))
        response = generator.integers(3, VOCABULARY, length).astype(np.int32)
        mask = np.ones(length, np.float32)
        if length > 4:
            mask[2] = 0.0
        tables = {
            name: _table(loaded.get(name), prompt, response, generator, temperature if name == "student" else 1.0)
            for name in ("teacher", "student")
        }
        at = np.arange(length)
        made.append(
            Sample(
                sample_id=index,
                group_id=index // group_size,
                data_source="test",
                prompt_ids=prompt,
                response_ids=response,
                rollout_logprobs=tables["student"][at, response].astype(np.float32),
                loss_mask=mask,
                finish_reason="stop",
                version_spans=(VersionSpan(0, 0, length),),
                reward=float(generator.integers(0, 2)),
                teacher="teacher",
                teacher_logprobs=tables["teacher"][at, response].astype(np.float32),
                selected=_top(tables["teacher"], top_k, tables["teacher"]),
                student_topk=_top(tables["student"], top_k, tables["student"]),
            )
        )
    return made


def select_like_a_server(batch: list[Sample], teacher: Path, selection: str) -> None:
    """`selected` as the teachers' client builds it from a server's answers."""
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64).eval()
    for sample in batch:
        assert sample.student_topk is not None
        assert sample.response_ids is not None
        assert sample.selected is not None
        table = _table(model, sample.prompt_ids, sample.response_ids, np.random.default_rng(0), 1.0)
        at_student = np.take_along_axis(table, sample.student_topk.ids, 1).astype(np.float32)
        answer = ScoreAnswer(sample.teacher_logprobs, sample.selected, at_student)
        sample.selected = selected_tokens(TokenSelection(selection), answer, sample.student_topk)


def _table(model: Any, prompt: np.ndarray, response: np.ndarray, generator: Any, temperature: float) -> np.ndarray:
    """[R, V] log-probabilities at the positions that predict the response."""
    if model is None:
        logits = torch.from_numpy(generator.normal(size=(len(response), VOCABULARY)))
    else:
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1).numpy()


def _top(order: np.ndarray, top_k: int, logprobs: np.ndarray) -> TokenSet:
    ids = np.argsort(-order, axis=1)[:, :top_k].astype(np.int32)
    values = np.take_along_axis(logprobs, ids, 1).astype(np.float32)
    return TokenSet(ids, values, np.ones(ids.shape, dtype=bool))


def work(
    config: TrainerConfig, batch: list[Sample], *, rank: int = 0, ranks: int = 1, layout: Layout = Layout.PADDED
) -> RankWork:
    """One rank's work of a step, as the group makes it."""
    return split(config, batch, ranks=ranks, layout=layout)[rank]


@contextmanager
def process_group(rank: int = 0, ranks: int = 1, file: Path | None = None) -> Iterator[None]:
    """A gloo group in this process."""
    store = open_store("127.0.0.1", 1, DEADLINE) if file is None else dist.FileStore(str(file), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=DEADLINE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def started(
    config: TrainerConfig, checkpoint: Path | None = None, *, total_steps: int = 10, **options: Any
) -> LearnerRank:
    """A rank that is ready for steps; inside `process_group`."""
    rank = LearnerRank(config, total_steps=total_steps, **options)
    rank.start(checkpoint)
    return rank


def on_two_ranks(function: Callable[[int], Any], folder: Path) -> list[Any]:
    """Results of function(rank) on two gloo ranks. Exceptions of a rank are raised here with their text.

    The ranks are forked from a clean server that has imported the learner: torch's autograd cannot be forked once it ran.
    """
    # The server of Python 3.11 does not get sys.path: without this it imports nothing, and every rank everything.
    support = str(Path(__file__).parents[1])
    if support not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [support, os.environ.get("PYTHONPATH")]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["opd_testing.learner"])
    folder.mkdir(parents=True, exist_ok=True)
    program = cloudpickle.dumps(function)
    processes = [context.Process(target=_forked, args=(program, rank, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(RANKS_DEADLINE_SECONDS)
            assert process.exitcode is not None, "a rank did not end"
    finally:
        for process in processes:
            process.kill()
    results = []
    for rank in range(2):
        value = torch.load(folder / f"result-{rank}.pt", weights_only=False)
        if isinstance(value, _Raised):
            raise AssertionError(f"rank {rank}:\n{value.text}")
        results.append(value)
    return results


class _Raised:
    def __init__(self, text: str) -> None:
        self.text = text


def _forked(program: bytes, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    try:
        with process_group(rank, 2, folder / "store"):
            value = cloudpickle.loads(program)(rank)
    except BaseException:
        value = _Raised(traceback.format_exc())
    torch.save(value, folder / f"result-{rank}.pt")


def with_first(batch: list[Sample], top_k: int) -> list[Sample]:
    """Copies whose token sets have only the best `top_k`."""
    return [
        dataclasses.replace(s, selected=_first(s.selected, top_k), student_topk=_first(s.student_topk, top_k))
        for s in batch
    ]


def _first(tokens: TokenSet | None, count: int) -> TokenSet:
    assert tokens is not None
    return TokenSet(tokens.ids[:, :count], tokens.logprobs[:, :count], tokens.valid[:, :count])
