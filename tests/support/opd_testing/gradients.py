"""Gradients of whole steps, for tests that compare ways to cut a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opd_testing import learner as testing
from opd_testing.tiny_models import write_model
from opd_trainer.learner.packing import Layout
from opd_trainer.learner.sharding import whole_tensors


def write_models(folder: Path, *, layers: int = 2) -> dict[str, Path]:
    """A student and a teacher."""
    return {
        "student": write_model(folder / "student", seed=1, family="qwen2", layers=layers),
        "teacher": write_model(folder / "teacher", seed=2, family="qwen2", layers=layers, scale=2.0),
    }


#: Options that need numbers of the whole step: normalisers, moments, groups.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "advantage": {"distillation": {"subtractBaseline": True}},
    "whitened advantages with task": {
        "distillation": {"whiten": "afterDistillation", "discountFactor": 0.5},
        "task": {"taskAdvWeight": 0.5, "advantageEstimator": "grpo", "reward": "exact_match"},
        "training": {"lossAggregation": "seq-mean-token-sum-norm"},
    },
    "set loss": {
        "distillation": {"signal": "loss", "tokenSelection": "teacher_topk", "topK": 4, "divergence": "jsd"},
        "training": {"lossAggregation": "seq-mean-token-mean"},
    },
    "corrected advantages": {
        "training": {"rolloutCorrection": {"type": "mis", "low": 0.999, "high": 1.001}},
    },
}
#: One step moves the parameters by the gradient alone.
PLAIN = {"steps": 10, "dtype": "fp32", "learningRate": 1e-3, "gradClip": 1e9}


def gradients(
    models: dict[str, Path],
    folder: Path,
    *,
    sections: dict[str, Any],
    layout: Layout = Layout.PADDED,
    max_tokens: int = 10_000,
    rank: int = 0,
    ranks: int = 1,
    master: torch.dtype = torch.float64,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Whole gradients of the only update of a step; inside a process group."""
    training = {**PLAIN, "maxTokensPerMicroBatch": max_tokens, **sections.get("training", {})}
    config = testing.job(models["student"], folder, **{**sections, "training": training})
    learner = testing.started(config, layout=layout, master=master, **options)
    captured: dict[str, torch.Tensor] = {}

    def capture(*_: Any) -> None:
        for name, gradient in whole_tensors(_Gradients(learner._student)):
            captured[name] = gradient.clone()

    learner._optimizer.register_step_pre_hook(capture)
    batch = testing.samples(7, teacher=models["teacher"], student=models["student"])
    for sample in batch:
        sample.rollout_logprobs = sample.rollout_logprobs + np.float32(0.002) * np.sin(
            np.arange(sample.response_length)
        ).astype(np.float32)
    learner.step(testing.work(config, batch, rank=rank, ranks=ranks, layout=layout))
    return captured


class _Gradients:
    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._module.named_parameters():
            assert parameter.grad is not None, name
            yield name, parameter.grad


def compare(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    assert max(float(value.abs().max()) for value in wanted.values()) > 1e-3
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, atol=tolerance, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
