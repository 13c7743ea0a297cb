"""One rank: it learns with every signal, resumes to the bit, exports what reloads, and survives empty and bad batches."""

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
from opd_testing.tiny_models import write_model
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from opd_api.v1alpha1 import Schedule
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError
from opd_trainer.learner.memory import MemoryNeed, check_memory
from opd_trainer.learner.optimizer import learning_rate_factor
from opd_trainer.learner.rank import LearnerRank
from opd_trainer.learner.sharding import local_tensor
from opd_trainer.sample import Sample

FAST: dict[str, Any] = {"steps": 20, "dtype": "fp32", "learningRate": 0.01}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"), layers=1)


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    torch.set_num_threads(1)
    with testing.process_group():
        yield


@pytest.fixture(scope="module")
def batch(models: dict[str, Path]) -> list[Sample]:
    return testing.samples(6, teacher=models["teacher"], student=models["student"])


def parameters(learner: LearnerRank) -> list[torch.Tensor]:
    return [local_tensor(p).detach().clone() for p in learner._student.parameters()]


def divergence_to_teacher(folder: Path, teacher: Path, batch: list[Sample]) -> float:
    """Mean full-vocabulary reverse KL at the trained positions, measured from outside."""
    tables = []
    for place in (folder, teacher):
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float64)
        rows = []
        for sample in batch:
            ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64))[None]
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
            rows.append(torch.log_softmax(logits, -1)[torch.from_numpy(sample.loss_mask) > 0])
        tables.append(torch.cat(rows))
    student, target = tables
    return float((student.exp() * (student - target)).sum(-1).mean())


#: Signals that are losses of the samples at hand. Advantages need fresh rollouts and are shown in the quickstart.
LOSSES = {
    "sampled k2": {"signal": "loss", "divergence": "k2"},
    "sampled k3": {"signal": "loss", "divergence": "k3"},
    "teacher_topk reverse": {"signal": "loss", "tokenSelection": "teacher_topk", "topK": 32, "divergence": "reverse_kl"},
    "teacher_topk forward": {"signal": "loss", "tokenSelection": "teacher_topk", "topK": 32, "divergence": "forward_kl"},
    "teacher_topk jsd": {"signal": "loss", "tokenSelection": "teacher_topk", "topK": 32, "divergence": "jsd"},
    "teacher_topk mixed": {"signal": "loss", "tokenSelection": "teacher_topk", "topK": 32, "divergence": "mixed"},
    "student_topk reverse": {"signal": "loss", "tokenSelection": "student_topk", "topK": 32, "divergence": "reverse_kl"},
    "union jsd": {"signal": "loss", "tokenSelection": "union", "topK": 32, "divergence": "jsd"},
    "full reverse": {"signal": "loss", "tokenSelection": "full", "divergence": "reverse_kl"},
    "full floored": {"signal": "loss", "tokenSelection": "full", "divergence": "mixed", "logProbFloor": -20.0},
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_falls_and_so_does_the_divergence_to_the_in_process_teacher(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    wide = testing.samples(6, teacher=models["teacher"], student=models["student"], top_k=32)
    bare = [dataclasses.replace(sample, teacher_logprobs=None, selected=None) for sample in wide]
    config = testing.job(
        models["student"],
        tmp_path,
        teachers=[
            {"name": "teacher", "backend": "inprocess", "model": {"source": str(models["teacher"]), "dtype": "fp32"}}
        ],
        distillation=LOSSES[name],
        training=FAST,
    )
    learner = testing.started(config)
    results = [learner.step(testing.work(config, bare)) for _ in range(8)]
    assert results[-1].metrics["opd_loss"] < 0.5 * results[0].metrics["opd_loss"]
    learner.export(tmp_path / "export")
    if not name.startswith("sampled"):
        before = divergence_to_teacher(models["student"], models["teacher"], wide)
        assert divergence_to_teacher(tmp_path / "export", models["teacher"], wide) < 0.995 * before
    for sample in wide:
        kept = sample.loss_mask > 0
        np.testing.assert_allclose(
            results[0].teacher_logprobs[sample.sample_id][kept], sample.teacher_logprobs[kept], atol=1e-4
        )


SELECTIONS = ("student_topk", "teacher_topk", "union", "intersection")


@pytest.mark.parametrize("selection", SELECTIONS)
def test_an_in_process_teacher_says_what_a_server_says(models: dict[str, Path], tmp_path: Path, selection: str) -> None:
    """The same update from token sets that came with the samples and from sets that the learner asked for."""
    options = {"signal": "loss", "tokenSelection": selection, "topK": 4, "divergence": "jsd"}
    served_samples = testing.samples(6, teacher=models["teacher"], student=models["student"])
    testing.select_like_a_server(served_samples, models["teacher"], selection)
    bare = [dataclasses.replace(sample, teacher_logprobs=None, selected=None) for sample in served_samples]
    training = {**FAST, "maxTokensPerMicroBatch": 30}
    served = testing.started(
        config := testing.job(models["student"], tmp_path, distillation=options, training=training)
    )
    first = served.step(testing.work(config, served_samples)).metrics
    config = testing.job(
        models["student"],
        tmp_path,
        teachers=[
            {"name": "teacher", "backend": "inprocess", "model": {"source": str(models["teacher"]), "dtype": "fp32"}}
        ],
        distillation=options,
        training=training,
    )
    inside = testing.started(config)
    second = inside.step(testing.work(config, bare)).metrics
    for name in ("opd_loss", "grad_norm", "opd_reverse_kl", "student_mass", "teacher_mass"):
        assert second[name] == pytest.approx(first[name], rel=1e-4), name


def test_two_in_process_teachers_score_their_own_samples_and_an_ensemble_mixes(
    models: dict[str, Path], tmp_path: Path, batch: list[Sample]
) -> None:
    def scores(owner: str) -> dict[int, np.ndarray]:
        config = testing.job(
            models["student"],
            tmp_path,
            teachers=[
                {"name": name, "backend": "inprocess", "model": {"source": str(models[place]), "dtype": "fp32"}, "weight": weight}
                for name, place, weight in (("one", "teacher", 3.0), ("two", "student", 1.0))
            ],
            routing={"default": "one"},
            training=FAST,
        )  # fmt: skip
        owned = [
            dataclasses.replace(sample, teacher_logprobs=None, teacher=owner if owner != "each" else ("one", "two")[sample.sample_id % 2])
            for sample in batch
        ]  # fmt: skip
        return testing.started(config).step(testing.work(config, owned)).teacher_logprobs

    one, two, each, both = scores("one"), scores("two"), scores("each"), scores("one+two")
    for sample in batch:
        kept, number = sample.loss_mask > 0, sample.sample_id
        np.testing.assert_allclose(each[number][kept], (one, two)[number % 2][number][kept], atol=1e-5)
        mixed = np.log((3 * np.exp(one[number]) + np.exp(two[number])) / 4)
        np.testing.assert_allclose(both[number][kept], mixed[kept], atol=1e-4)
        np.testing.assert_allclose(one[number][kept], sample.teacher_logprobs[kept], atol=1e-4)


def test_a_resumed_rank_goes_on_bit_by_bit(models: dict[str, Path], tmp_path: Path, batch: list[Sample]) -> None:
    config = testing.job(
        models["student"],
        tmp_path,
        task={"reward": "exact_match", "taskAdvWeight": 0.5, "advantageEstimator": "gae",
              "critic": {"model": {"source": str(models["student"])}, "learningRate": 0.01}},
        training={**FAST, "schedule": "cosine", "warmupSteps": 2, "updatesPerStep": 2, "dtype": "bf16"},
    )  # fmt: skip
    straight = testing.started(config)
    straight.step(testing.work(config, batch))
    straight.save(tmp_path / "checkpoint")
    resumed = testing.started(config, tmp_path / "checkpoint")
    for _ in range(2):
        one = straight.step(testing.work(config, batch)).metrics
        two = resumed.step(testing.work(config, batch)).metrics
        for name in ("opd_loss", "grad_norm", "learning_rate", "value_loss", "critic_grad_norm"):
            assert one[name] == two[name], name
    for left, right in zip(parameters(straight), parameters(resumed), strict=True):
        assert torch.equal(left, right)


def test_a_checkpoint_before_the_first_update_resumes_too(
    models: dict[str, Path], tmp_path: Path, batch: list[Sample]
) -> None:
    config = testing.job(models["student"], tmp_path, training=FAST)
    straight = testing.started(config)
    straight.save(tmp_path / "checkpoint")
    resumed = testing.started(config, tmp_path / "checkpoint")
    for learner in (straight, resumed):
        learner.step(testing.work(config, batch))
    for left, right in zip(parameters(straight), parameters(resumed), strict=True):
        assert torch.equal(left, right)


def test_a_checkpoint_of_another_model_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    config = testing.job(models["student"], tmp_path, training=FAST)
    testing.started(config).save(tmp_path / "checkpoint")
    other = write_model(tmp_path / "other", family="qwen2", layers=3)
    with pytest.raises(TrainerError, match="does not fit") as caught:
        testing.started(testing.job(other, tmp_path, training=FAST), tmp_path / "checkpoint")
    assert caught.value.failure.failure_class is FailureClass.CONFIG


@pytest.mark.parametrize(("dtype", "stored"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_the_export_reloads_and_gives_the_learners_numbers(
    models: dict[str, Path], tmp_path: Path, batch: list[Sample], dtype: str, stored: torch.dtype
) -> None:
    config = testing.job(
        models["student"],
        tmp_path,
        student={"model": {"source": str(models["student"]), "dtype": dtype}},
        training=FAST,
    )
    learner = testing.started(config)
    learner.step(testing.work(config, batch))
    learner.export(tmp_path / "export")
    learner.publish(tmp_path / "published")
    old = learner.step(testing.work(config, batch)).old_logprobs
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert exported.dtype == stored
    assert exported.generation_config.eos_token_id == 1
    published = AutoModelForCausalLM.from_pretrained(tmp_path / "published")
    assert published.dtype == torch.float32  # training.dtype: what the learner computes in
    assert published.lm_head.weight is published.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.eos_token == "<eos>"
    for sample in batch:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logits = published(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
        direct = torch.log_softmax(logits.float(), -1)[
            torch.arange(sample.response_length), ids[0, len(sample.prompt_ids) :]
        ]
        kept = sample.loss_mask > 0
        np.testing.assert_allclose(old[sample.sample_id][kept], direct.numpy()[kept], atol=1e-5)


def test_adapters_are_trained_alone_and_exported_merged_and_alone(
    models: dict[str, Path], tmp_path: Path, batch: list[Sample]
) -> None:
    config = testing.job(
        models["student"],
        tmp_path,
        student={"model": {"source": str(models["student"]), "dtype": "fp32"}, "lora": {"rank": 4, "alpha": 8.0}},
        training=FAST,
    )
    learner = testing.started(config)
    before = dict(zip(dict(learner._student.named_parameters()), parameters(learner), strict=True))
    for _ in range(3):
        learner.step(testing.work(config, batch))
    for name, parameter in learner._student.named_parameters():
        assert torch.equal(before[name], local_tensor(parameter)) is ("lora_" not in name), name
    learner.save(tmp_path / "checkpoint")
    assert sum(f.stat().st_size for f in (tmp_path / "checkpoint").iterdir()) < 4 * 3 * 40_000
    resumed = testing.started(config, tmp_path / "checkpoint")
    for left, right in zip(parameters(learner), parameters(resumed), strict=True):
        assert torch.equal(left, right)
    learner.export(tmp_path / "export")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    base = AutoModelForCausalLM.from_pretrained(models["student"])
    adapted = PeftModel.from_pretrained(base, tmp_path / "export" / "adapter")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, atol=1e-5, rtol=0)
        assert (
            merged(ids).logits - AutoModelForCausalLM.from_pretrained(models["student"])(ids).logits
        ).abs().max() > 1e-2


def test_a_batch_without_trained_tokens_moves_nothing(
    models: dict[str, Path], tmp_path: Path, batch: list[Sample]
) -> None:
    config = testing.job(models["student"], tmp_path, training={**FAST, "weightDecay": 0.1})
    learner = testing.started(config)
    learner.step(testing.work(config, batch))
    before = parameters(learner)
    masked = [dataclasses.replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in batch]
    metrics = learner.step(testing.work(config, masked)).metrics
    assert metrics["opd_loss"] == 0
    assert metrics["grad_norm"] == 0
    assert metrics["tokens"] == 0
    for left, right in zip(before, parameters(learner), strict=True):
        assert torch.equal(left, right)


def test_a_token_that_the_teacher_does_not_know_trains_nothing(
    models: dict[str, Path], tmp_path: Path, batch: list[Sample]
) -> None:
    config = testing.job(models["student"], tmp_path, training=FAST)
    foreign = [dataclasses.replace(s, teacher_logprobs=s.teacher_logprobs.copy()) for s in batch]
    foreign[0].teacher_logprobs[0] = -np.inf
    metrics = testing.started(config).step(testing.work(config, foreign)).metrics
    assert metrics["tokens_teacher_lacks"] == 1
    assert metrics["tokens"] == sum(float(s.loss_mask.sum()) for s in batch) - 1
    assert np.isfinite(metrics["grad_norm"])


def test_gradients_that_stay_infinite_end_the_run(models: dict[str, Path], tmp_path: Path, batch: list[Sample]) -> None:
    config = testing.job(models["student"], tmp_path, training=FAST)
    learner = testing.started(config)
    before = parameters(learner)
    huge = [dataclasses.replace(s, teacher_logprobs=np.full_like(s.teacher_logprobs, -3e38)) for s in batch]
    for _ in range(2):
        assert learner.step(testing.work(config, huge)).metrics["skipped_updates"] == 1
    for left, right in zip(before, parameters(learner), strict=True):
        assert torch.equal(left, right)
    with pytest.raises(TrainerError, match="in 3 updates in a row"):
        learner.step(testing.work(config, huge))


def test_the_models_own_logits_are_used_when_the_fused_head_differs(
    models: dict[str, Path], tmp_path: Path, batch: list[Sample], caplog: pytest.LogCaptureFixture
) -> None:
    config = testing.job(
        models["student"], tmp_path, distillation=LOSSES["teacher_topk jsd"] | {"topK": 4}, training=FAST
    )
    fused = testing.started(config).step(testing.work(config, batch)).metrics
    plain = testing.started(config)
    model = plain._student.model
    original = type(model).forward
    # A model that does something to its logits that no config names.
    try:
        type(model).forward = lambda self, *a, **k: _scaled(original(self, *a, **k))
        changed = plain.step(testing.work(config, batch)).metrics
    finally:
        type(model).forward = original
    assert fused["fused_head"] == 1
    assert changed["fused_head"] == 0
    assert "fused head differs" in caplog.text
    assert changed["opd_loss"] != pytest.approx(fused["opd_loss"], rel=1e-3)


def _scaled(output: Any) -> Any:
    output.logits = output.logits * 0.5
    return output


def test_missing_rewards_are_a_data_error(models: dict[str, Path], tmp_path: Path, batch: list[Sample]) -> None:
    task = {"reward": "exact_match", "taskAdvWeight": 0.5, "advantageEstimator": "grpo"}
    config = testing.job(models["student"], tmp_path, task=task, training=FAST)
    with pytest.raises(TrainerError, match=r"needs a reward.*1 of 6") as caught:
        testing.work(config, [dataclasses.replace(batch[0], reward=None), *batch[1:]])
    assert caught.value.failure.failure_class is FailureClass.DATA


def test_too_little_memory_is_told_with_the_arithmetic() -> None:
    need = MemoryNeed(trained=8_000_000_000)
    check_memory(need, ranks=8, free=16.1e9)
    with pytest.raises(
        TrainerError, match=r"16 bytes x 8,000,000,000 trained parameters / 2 ranks = 59\.60 GiB.*gpus to 8"
    ) as caught:
        check_memory(need, ranks=2, free=17e9)
    assert caught.value.failure.failure_class is FailureClass.CONFIG
    assert caught.value.failure.reason is Reason.NOT_ENOUGH_MEMORY
    adapters = MemoryNeed(trained=10, frozen=1000, teachers=2000)
    assert adapters.per_rank(2) == (160 + 4000 + 2000) / 2


def test_the_memory_of_the_job_is_checked_before_loading(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opd_trainer.learner.rank.free_memory", lambda *_: 1000.0)
    with pytest.raises(TrainerError, match="each rank needs 16 bytes x"):
        testing.started(testing.job(models["student"], tmp_path, training=FAST))


def test_the_schedule_warms_up_and_decays() -> None:
    def rates(schedule: Schedule) -> list[float]:
        return [round(learning_rate_factor(u, total=10, warmup=2, schedule=schedule), 3) for u in (0, 1, 2, 6, 10, 12)]

    assert rates(Schedule.CONSTANT) == [0.5, 1, 1, 1, 1, 1]
    assert rates(Schedule.LINEAR) == [0.5, 1, 1, 0.5, 0, 0]
    assert rates(Schedule.COSINE) == [0.5, 1, 1, 0.5, 0, 0]


def test_fp16_gradients_are_scaled_and_give_the_same_update(
    models: dict[str, Path], tmp_path: Path, batch: list[Sample]
) -> None:
    norms = {}
    for dtype in ("fp32", "fp16"):
        config = testing.job(models["student"], tmp_path, training={**FAST, "dtype": dtype})
        norms[dtype] = testing.started(config).step(testing.work(config, batch)).metrics["grad_norm"]
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.05)
