"""The first batch's look at the head, and how often and when teachers inside the learner are asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opd_testing import learner as testing
from opd_testing.gradients import write_models
from opd_testing.tiny_models import write_model, write_tokenizer
from transformers import AutoModelForCausalLM

from opd_trainer.learner.models import CHECKED_ROWS, FrozenTeacher
from opd_trainer.sample import Sample

TRAINING: dict[str, Any] = {"steps": 20, "learningRate": 0.01}
WHOLE = {"signal": "loss", "tokenSelection": "full", "divergence": "reverse_kl"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"), layers=1)


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    torch.set_num_threads(1)
    with testing.process_group():
        yield


def inside(folder: Path, run: Path, teacher: Path, **training: Any) -> Any:
    model = {"source": str(teacher), "dtype": "fp32"}
    return testing.job(
        folder,
        run,
        teachers=[{"name": "teacher", "backend": "inprocess", "model": model}],
        distillation=WHOLE,
        training={**TRAINING, "dtype": "fp32", **training},
    )


def bare(batch: list[Sample]) -> list[Sample]:
    return [dataclasses.replace(sample, teacher_logprobs=None, selected=None) for sample in batch]


def test_the_rounding_of_large_logits_in_bf16_does_not_switch_the_fused_head_off(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "large", layers=1, tied=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(100)
    model.save_pretrained(folder)
    batch = testing.samples(6, student=folder)
    # What makes this a test: one rounded logit alone is further off than the limit.
    ids = torch.from_numpy(batch[0].prompt_ids.astype(np.int64))[None]
    largest = float(model(ids).logits.detach().abs().max())
    assert largest * torch.finfo(torch.bfloat16).eps / 2 > 0.05
    config = testing.job(folder, tmp_path / "run", training={**TRAINING, "dtype": "bf16"})
    assert testing.started(config).step(testing.work(config, batch)).metrics["fused_head"] == 1


def test_the_check_of_the_head_forms_the_logits_of_a_few_rows_only(models: dict[str, Path], tmp_path: Path) -> None:
    batch = testing.samples(40, student=models["student"])
    config = testing.job(models["student"], tmp_path, training={**TRAINING, "dtype": "fp32", "promptsPerStep": 40})
    learner = testing.started(config)
    head = learner._student.model.get_output_embeddings()
    rows: list[int] = []
    head.register_forward_hook(lambda module, inputs, output: rows.append(output.shape[:-1].numel()))
    assert learner.step(testing.work(config, batch)).metrics["fused_head"] == 1
    assert len(rows) == 1
    assert 0 < rows[0] <= CHECKED_ROWS


def test_a_loss_over_the_whole_vocabulary_runs_the_teacher_once_for_each_micro_batch(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    original = FrozenTeacher.forward
    monkeypatch.setattr(FrozenTeacher, "forward", lambda self, b: (calls.append(1), original(self, b))[1])
    config = inside(models["student"], tmp_path, models["teacher"], maxTokensPerMicroBatch=30)
    batch = testing.samples(6, teacher=models["teacher"], student=models["student"])
    result = testing.started(config).step(testing.work(config, bare(batch)))
    assert result.metrics["micro_batches"] > 1
    assert len(calls) == result.metrics["micro_batches"]
    for sample in batch:
        kept = sample.loss_mask > 0
        np.testing.assert_allclose(
            result.teacher_logprobs[sample.sample_id][kept], sample.teacher_logprobs[kept], atol=1e-4
        )


def test_a_token_beyond_the_vocabulary_of_a_whole_teacher_trains_nothing(
    models: dict[str, Path], tmp_path: Path
) -> None:
    wide = AutoModelForCausalLM.from_pretrained(models["student"], dtype=torch.float32)
    wide.resize_token_embeddings(testing.VOCABULARY + 4)
    wide.save_pretrained(tmp_path / "wide")
    write_tokenizer(tmp_path / "wide")
    batch = bare(testing.samples(6, student=models["student"]))
    batch[0].response_ids[0] = testing.VOCABULARY + 1
    config = inside(tmp_path / "wide", tmp_path / "run", models["teacher"])
    metrics = testing.started(config).step(testing.work(config, batch)).metrics
    assert metrics["tokens_teacher_lacks"] == 1
    assert metrics["tokens"] == sum(float(s.loss_mask.sum()) for s in batch) - 1
    assert np.isfinite(metrics["grad_norm"])
    assert np.isfinite(metrics["opd_loss"])
