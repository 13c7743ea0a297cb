"""AdamW, the schedule of the learning rate, clipping, and the scaling of fp16 gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from opd_api.v1alpha1 import Schedule, Training
from opd_trainer.learner.sharding import local_tensor

_GROWTH_INTERVAL = 1000
_INITIAL_SCALE = 2.0**15


def learning_rate_factor(update: int, *, total: int, warmup: int, schedule: Schedule) -> float:
    """Factor on the peak rate of the 0-based `update`: linear warm-up, then constant, or to 0 linearly or as a cosine."""
    if update < warmup:
        return (update + 1) / warmup
    if schedule is Schedule.CONSTANT:
        return 1.0
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    return 1.0 - progress if schedule is Schedule.LINEAR else 0.5 * (1.0 + math.cos(math.pi * progress))


def adamw(parameters: Iterable[nn.Parameter], *, learning_rate: float, training: Training) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; vectors (norms, biases) are not decayed.

    Fused: one pass over the parameters. torch's default on CPUs makes ten, which took 8 times as long.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=learning_rate,
        betas=(training.betas[0], training.betas[1]),
        fused=True,
    )


@dataclass(slots=True)
class GradientScaler:
    """Power-of-two scale that keeps fp16 gradients representable; 1 for other types."""

    enabled: bool
    scale: float = 1.0
    good_updates: int = 0

    @classmethod
    def for_dtype(cls, dtype: torch.dtype) -> GradientScaler:
        """Enabled for fp16 only."""
        enabled = dtype == torch.float16
        return cls(enabled, _INITIAL_SCALE if enabled else 1.0)

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the scale."""
        if self.enabled:
            for parameter in parameters:
                if parameter.grad is not None:
                    local_tensor(parameter.grad).div_(self.scale)

    def update(self, finite: bool) -> None:
        """Halve after an overflow, double after many good updates."""
        if not self.enabled:
            return
        self.good_updates = self.good_updates + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good_updates % _GROWTH_INTERVAL == 0:
            self.scale *= 2

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"scale": self.scale, "good_updates": self.good_updates}

    def restore(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        if self.enabled:
            self.scale, self.good_updates = float(state["scale"]), int(state["good_updates"])


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale gradients so that their norm over all ranks is at most `limit`; the norm before. A collective."""
    norm = torch.nn.utils.clip_grad_norm_(list(parameters), limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """For every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Parameters with gradients."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
