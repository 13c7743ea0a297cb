"""What a rank counts: bad gradients of each model, and the steps behind its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opd_testing import learner as testing
from opd_testing.gradients import write_models

from opd_trainer.errors import TrainerError
from opd_trainer.learner.optimizer import clip_gradients, trainable
from opd_trainer.learner.rank import LearnerRank
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


@pytest.mark.parametrize(("bad", "dtype"), [("student", "fp32"), ("critic", "fp32"), ("critic", "fp16")])
def test_a_good_gradient_of_one_model_excuses_no_bad_one_of_the_other(
    models: dict[str, Path],
    tmp_path: Path,
    batch: list[Sample],
    monkeypatch: pytest.MonkeyPatch,
    bad: str,
    dtype: str,
) -> None:
    config = testing.job(
        models["student"],
        tmp_path,
        task={"reward": "exact_match", "taskAdvWeight": 0.5, "advantageEstimator": "gae",
              "critic": {"model": {"source": str(models["student"])}}},
        training={**FAST, "dtype": dtype},
    )  # fmt: skip
    learner = testing.started(config)
    names = {"student": "skipped_updates", "critic": "critic_skipped_updates"}
    chosen = trainable(learner._student if bad == "student" else learner._critic)

    def clip(parameters: list[torch.nn.Parameter], limit: float) -> float:
        norm = clip_gradients(parameters, limit)
        return float("nan") if parameters[0] is chosen[0] else norm

    monkeypatch.setattr("opd_trainer.learner.rank.clip_gradients", clip)
    for _ in range(2):
        metrics = learner.step(testing.work(config, batch)).metrics
        assert {name for name in names.values() if name in metrics} == {names[bad]}
    with pytest.raises(TrainerError, match=rf"gradient of the {bad} was nan in 3 updates in a row"):
        learner.step(testing.work(config, batch))


def test_a_checkpoint_says_how_many_steps_its_weights_have_behind_them(
    models: dict[str, Path], tmp_path: Path, batch: list[Sample]
) -> None:
    """Steps and not updates: a step makes fewer of these when it has fewer samples, and updatesPerStep may be edited."""
    training = {**FAST, "updatesPerStep": 4}
    config = testing.job(models["student"], tmp_path, training=training)
    learner = testing.started(config)
    learner.step(testing.work(config, batch))
    learner.step(testing.work(config, batch[:3]))
    learner.save(tmp_path / "checkpoint")
    resumed = LearnerRank(config, total_steps=10)
    assert resumed.start(tmp_path / "checkpoint").steps == 2
    assert resumed._updates == 4 + 3


def test_a_checkpoint_from_before_steps_were_counted_resumes_without_a_count(
    models: dict[str, Path], tmp_path: Path, batch: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = testing.job(models["student"], tmp_path, training=FAST)
    learner = testing.started(config)
    learner.step(testing.work(config, batch))
    schedule = learner._schedule()
    monkeypatch.setattr(learner, "_schedule", lambda: {k: v for k, v in schedule.items() if k != "steps"})
    learner.save(tmp_path / "old")
    resumed = LearnerRank(config, total_steps=10)
    assert resumed.start(tmp_path / "old").steps is None
    assert resumed._updates == 1
    resumed.step(testing.work(config, batch))
    resumed.save(tmp_path / "later")
    assert LearnerRank(config, total_steps=10).start(tmp_path / "later").steps is None, "an unknown count stays unknown"
