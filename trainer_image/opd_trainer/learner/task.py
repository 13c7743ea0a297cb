"""Task advantages of a whole step, before it is distributed over ranks: groups and whitening see every sample. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from opd_api.v1alpha1 import AdvantageEstimator, Task
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer import core
from opd_trainer.errors import TrainerError
from opd_trainer.sample import Sample

Advantages = dict[int, NDArray[np.float64]]


def task_advantages(samples: Sequence[Sample], task: Task) -> Advantages | None:
    """sample_id -> [R] task advantages; None when the task has no weight, or when the critic's ranks compute them (gae).

    Raises TrainerError(Data) when a sample lacks its reward.
    """
    estimator = task.advantage_estimator
    if not task.task_adv_weight or estimator in (AdvantageEstimator.NONE, AdvantageEstimator.GAE):
        return None
    check_rewards(samples)
    width = max(s.response_length for s in samples)
    mask = torch.zeros(len(samples), width, dtype=torch.float64)
    for row, sample in enumerate(samples):
        own = np.ones(sample.response_length) if sample.loss_mask is None else np.asarray(sample.loss_mask) > 0
        mask[row, : sample.response_length] = torch.from_numpy(own.astype(np.float64))
    grid = _estimate(samples, mask, estimator).numpy()
    return {sample.sample_id: grid[row, : sample.response_length] for row, sample in enumerate(samples)}


def check_rewards(samples: Sequence[Sample]) -> None:
    """Raises TrainerError(Data) when a sample lacks its reward."""
    missing = [sample.sample_id for sample in samples if sample.reward is None]
    if missing:
        raise TrainerError(
            FailureClass.DATA,
            Reason.DATA_ERROR,
            f"task.taskAdvWeight needs a reward for every sample, but {len(missing)} of {len(samples)} have none"
            f" (first: sample {missing[0]}); set task.reward",
        )


def _estimate(samples: Sequence[Sample], mask: torch.Tensor, estimator: AdvantageEstimator) -> torch.Tensor:
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    groups = torch.tensor([sample.group_id for sample in samples])
    if estimator is AdvantageEstimator.GRPO:
        return core.grpo(rewards, groups, mask)
    if estimator is AdvantageEstimator.DR_GRPO:
        return core.grpo(rewards, groups, mask, normalize_std=False)
    if estimator is AdvantageEstimator.RLOO:
        return core.rloo(rewards, groups, mask)
    if estimator is AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE:
        return core.reinforce_plus_plus_baseline(rewards, groups, mask)
    # REINFORCE++ with gamma 1: the reward at the last trained token is the return of every earlier one.
    token_rewards = torch.zeros_like(mask)
    for row in range(len(samples)):
        at = mask[row].nonzero()
        if len(at):
            token_rewards[row, at[-1]] = rewards[row]
    return core.reinforce_plus_plus(token_rewards, mask)
