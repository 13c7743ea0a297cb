"""What a job's options do to the student's parameters in one step, on fixed samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from opd_testing import learner as testing
from opd_testing.tiny_models import write_model
from opd_trainer.learner.sharding import local_tensor

#: Options that several cases start from. `CRITIC` and `OTHER` become folders.
SETS = {"signal": "loss", "tokenSelection": "teacher_topk", "topK": 4, "divergence": "reverse_kl"}
TASK = {"reward": "exact_match", "taskAdvWeight": 0.5, "advantageEstimator": "grpo"}
GAE = {**TASK, "advantageEstimator": "gae", "critic": {"model": {"source": "CRITIC"}}}
#: Two updates on the same samples make ratios differ from 1, so that clips and old log-probabilities matter.
SEVERAL = {"updatesPerStep": 3, "learningRate": 0.05}
SEQUENCES = {"lossAggregation": "seq-mean-token-mean"}


def named(sections: Any, models: dict[str, Path]) -> Any:
    """CRITIC and OTHER become folders."""
    places = {"CRITIC": str(models["student"]), "OTHER": str(models["teacher"])}
    if isinstance(sections, dict):
        return {key: named(value, models) for key, value in sections.items()}
    return places.get(sections, sections) if isinstance(sections, str) else sections


class Update:
    """What steps on fixed samples do to a student."""

    def __init__(self, models: dict[str, Path], folder: Path) -> None:
        self._models = models
        self._folder = folder
        self._known: dict[str, torch.Tensor] = {}
        self.samples = testing.samples(6, teacher=models["teacher"], student=models["student"])
        for sample in self.samples:
            # The engine is a little off, sometimes by a lot.
            noise = 0.1 * torch.sin(torch.arange(sample.response_length) * 1.7 + sample.sample_id).numpy()
            sample.rollout_logprobs = sample.rollout_logprobs + noise

    def __call__(self, sections: dict[str, Any]) -> torch.Tensor:
        """All parameters, flat, after a step; after two with a critic, whose first values are 0."""
        sections = named(sections, self._models)
        key = repr(sections)
        if key not in self._known:
            self._known[key] = self._run(sections)
        return self._known[key]

    def _run(self, sections: dict[str, Any]) -> torch.Tensor:
        plain = {"steps": 10, "dtype": "fp32", "learningRate": 0.01, "activationCheckpointing": False}
        training = {**plain, **sections.get("training", {})}
        config = testing.job(self._models["student"], self._folder, **{**sections, "training": training})
        learner = testing.started(config, total_steps=config.training.steps or 10)
        options = config.distillation
        batch = testing.with_first(self.samples, options.top_k or 4)
        if options.top_k is not None:
            testing.select_like_a_server(batch, self._models["teacher"], options.token_selection)
        for _ in range(1 if config.task.critic is None else 2):
            learner.step(testing.work(config, batch))
        return torch.cat([local_tensor(p).detach().flatten() for p in learner._student.parameters()])


def update_of(folder: Path) -> Iterator[Update]:
    """An Update with models of its own, in a process group of one; the body of a fixture."""
    shape: dict[str, Any] = {"family": "qwen2", "hidden": 16, "layers": 1}
    models = {
        "student": write_model(folder / "student", seed=1, **shape),
        "teacher": write_model(folder / "teacher", seed=2, scale=2.0, **shape),
    }
    torch.set_num_threads(1)
    with testing.process_group():
        yield Update(models, folder / "run")
