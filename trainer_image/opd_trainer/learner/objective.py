"""What one micro-batch contributes to the loss, from the job's options. Tensors in, tensors out; no model, no ranks.

Signals (docs/what-is-optimised.md): `advantage` turns the teacher into per-token advantages of a policy loss; `loss`
back-propagates a divergence. A task reward adds its own policy loss term in the second case and its advantages in the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opd_api.trainer_config import TrainerConfig
from opd_api.v1alpha1 import (
    SAMPLED_ESTIMATOR,
    AdvantageEstimator,
    CorrectionType,
    Divergence,
    Signal,
    StudentLogProbs,
    TokenSelection,
    Whiten,
)
from opd_trainer import core
from opd_trainer.core import Moments
from opd_trainer.learner.batch import MicroBatch

Metrics = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Normaliser:
    """Counts over all ranks and micro-batches of one optimizer update."""

    tokens: float
    sequences: float
    data_parallel_size: int


class Objective:
    """The loss of a job as functions of tensors."""

    def __init__(self, config: TrainerConfig) -> None:
        self._distillation = config.distillation
        self._task = config.task
        self._training = config.training
        self._horizon = float(config.rollout.max_response_tokens)
        self.has_task = (
            config.task.task_adv_weight > 0 and config.task.advantage_estimator is not AdvantageEstimator.NONE
        )
        self.uses_critic = self.has_task and config.task.advantage_estimator is AdvantageEstimator.GAE

    # --- what a step needs -------------------------------------------------------------------------------------------
    @property
    def advantage_signal(self) -> bool:
        """Whether the teacher becomes advantages."""
        return self._distillation.signal is Signal.ADVANTAGE

    @property
    def compares_sets(self) -> bool:
        """Whether positions are compared by more than the sampled token."""
        return self._distillation.token_selection is not TokenSelection.STUDENT_SAMPLED

    @property
    def old_from_engine(self) -> bool:
        """Whether the engine's log-probabilities stand for the old policy."""
        return self._distillation.student_log_probs is StudentLogProbs.ROLLOUT

    @property
    def corrects(self) -> bool:
        """Whether the gap between engine and learner is corrected."""
        return self._training.rollout_correction.type is not CorrectionType.NONE and not self.old_from_engine

    def needs_pass_one(self, updates: int) -> bool:
        """Whether a pass without gradient must come before the first update.

        With one update the policy of the update is the old policy, so its own detached values serve, unless something
        needs the whole step's values first: moments over all tokens, or a correction that drops tokens from the count.
        """
        several = updates > 1
        if self.corrects or (self._needs_moments and not (self.old_from_engine and not self.compares_sets)):
            return True
        if self.advantage_signal and self.compares_sets:
            return several
        uses_old = self.advantage_signal or self.has_task or self._distillation.importance_clip is not None
        return several and uses_old and not self.old_from_engine

    @property
    def _needs_moments(self) -> bool:
        """Whether advantages of the distillation signal depend on all tokens of the step."""
        if not self.advantage_signal:
            return False
        return self._distillation.subtract_baseline or self._distillation.whiten is Whiten.AFTER_DISTILLATION

    # --- advantages ---------------------------------------------------------------------------------------------------
    def distillation_advantages(self, batch: MicroBatch, old: Tensor, divergence: Tensor | None) -> Tensor:
        """[B, T] in advantage sign, before baseline, clip and discount. `divergence` is D of the old policy for sets."""
        options = self._distillation
        if self.compares_sets:
            if divergence is None:
                raise ValueError("a divergence in advantage sign needs its value under the old policy")
            return -divergence.detach()
        student, teacher = self._floored(old.detach()), self._floored(self._teacher(batch))
        gap = core.distillation_advantage(student, teacher, alpha=options.proximal_teacher_alpha)
        kind = SAMPLED_ESTIMATOR[options.divergence]
        if kind is Divergence.K1:
            return gap
        return -core.sampled_kl(student, student + gap, kind.value)

    def baseline(self, x: Tensor, batch: MicroBatch, moments: Moments) -> Tensor:
        """subtractBaseline with the step's moments."""
        return core.center(x, batch.trained, moments)

    @property
    def subtracts_baseline(self) -> bool:
        """Whether `baseline` is applied."""
        return self.advantage_signal and self._distillation.subtract_baseline

    @property
    def whitens_task(self) -> bool:
        """Whether task advantages are whitened before the teacher's are added."""
        return self.has_task and self._distillation.whiten is Whiten.BEFORE_DISTILLATION

    @property
    def whitens_sum(self) -> bool:
        """Whether the sum of task and distillation advantages is whitened."""
        whitened = self._distillation.whiten is Whiten.AFTER_DISTILLATION
        return whitened and (self.advantage_signal or self.has_task)

    def combine(self, batch: MicroBatch, task: Tensor | None, distillation: Tensor | None) -> Tensor:
        """A = w · task + λ · x, clipped unless the sum is whitened afterwards; [B, T]."""
        options = self._distillation
        zeros = torch.zeros(batch.trained.shape, dtype=batch.token_rewards.dtype, device=batch.trained.device)
        return core.combine_advantages(
            task,
            zeros if distillation is None else distillation,
            batch.trained,
            task_weight=self._task.task_adv_weight,
            coefficient=options.coefficient,
            discount=options.discount_factor,
            per_token_clip=options.per_token_clip,
            clip=None if self.whitens_sum else options.advantage_clip,
        )

    def whiten(self, x: Tensor, batch: MicroBatch, moments: Moments, *, final: bool) -> Tensor:
        """Whitened with the step's moments; the final advantages are then clipped."""
        white = core.whiten(x, batch.trained, moments)
        bound = self._distillation.advantage_clip
        return white.clamp(-bound, bound) if final and bound is not None else white

    # --- correction ---------------------------------------------------------------------------------------------------
    def correction(self, batch: MicroBatch, old: Tensor) -> tuple[Tensor, Tensor, Metrics]:
        """(weights [B, T], tokens that stay [B, T], metrics) of the gap between engine and learner."""
        options = self._training.rollout_correction
        if batch.rollout is None:
            raise ValueError("rolloutCorrection needs the engine's log-probabilities")
        weights, kept, metrics = core.correction_weights(
            old,
            batch.rollout,
            batch.trained,
            kind=options.type.value,
            level=options.level.value,
            low=options.low,
            high=options.high,
            veto=options.veto,
        )
        return weights, kept > 0, {f"correction_{name}": value for name, value in metrics.items()}

    # --- loss ---------------------------------------------------------------------------------------------------------
    def loss(
        self, batch: MicroBatch, logprobs: Tensor, old: Tensor, divergence: Tensor | None, normaliser: Normaliser
    ) -> tuple[Tensor, Metrics]:
        """The micro-batch's share of the loss, a scalar scaled for FSDP's averaging, and metrics over its trained tokens.

        Args:
            batch: with `advantages` (advantage signal or task) and `weights` (correction) filled in.
            logprobs: [B, T] of the current policy at the sampled tokens; differentiable.
            old: [B, T] of the old policy; detached.
            divergence: [B, T] of the current policy for the loss signal on sets; differentiable.
        """
        total: Tensor | None = None
        metrics: Metrics = {}
        if not self.advantage_signal:
            total, metrics = self._distillation_loss(batch, logprobs, old, divergence)
        if self.advantage_signal or self.has_task:
            policy, policy_metrics = self._policy_loss(batch, logprobs, old)
            total = policy if total is None else total + policy
            metrics |= policy_metrics
        assert total is not None
        scalar = core.aggregate(
            total,
            batch.trained,
            self._training.loss_aggregation.value,
            num_tokens=normaliser.tokens,
            num_sequences=normaliser.sequences,
            horizon=self._horizon,
            data_parallel_size=normaliser.data_parallel_size,
        )
        return scalar, metrics

    def value_loss(self, batch: MicroBatch, values: Tensor, normaliser: Normaliser) -> tuple[Tensor, Metrics]:
        """The critic's share of its loss: clipped squared error, token-mean over the update."""
        critic = self._task.critic
        if critic is None or batch.values is None or batch.returns is None:
            raise ValueError("the value loss needs a critic, its old values and returns")
        loss, metrics = core.value_loss(values, batch.values, batch.returns, batch.trained, clip=critic.clip)
        scalar = core.aggregate(
            loss,
            batch.trained,
            "token-mean",
            num_tokens=normaliser.tokens,
            data_parallel_size=normaliser.data_parallel_size,
        )
        return scalar, {f"value_{name}": value for name, value in metrics.items()}

    def _policy_loss(self, batch: MicroBatch, logprobs: Tensor, old: Tensor) -> tuple[Tensor, Metrics]:
        if batch.advantages is None:
            raise ValueError("the policy loss needs advantages")
        options = self._task.policy_loss
        return core.policy_loss(
            options.type.value,
            logprobs,
            old,
            batch.advantages,
            batch.trained,
            clip_low=options.clip_ratio_low,
            clip_high=options.clip_ratio_high,
            clip_c=options.clip_ratio_c,
            tau_pos=options.tau_pos,
            tau_neg=options.tau_neg,
            weights=batch.weights,
        )

    def _distillation_loss(
        self, batch: MicroBatch, logprobs: Tensor, old: Tensor, divergence: Tensor | None
    ) -> tuple[Tensor, Metrics]:
        options = self._distillation
        if not self.compares_sets:
            divergence = core.sampled_kl(
                self._floored(logprobs),
                self._floored(self._teacher(batch)),
                SAMPLED_ESTIMATOR[options.divergence].value,
                straight_through=options.straight_through,
            )
        if divergence is None:
            raise ValueError("the loss signal needs a divergence")
        loss, metrics = core.distillation_loss(
            divergence,
            logprobs,
            old,
            batch.trained,
            per_token_clip=options.per_token_clip,
            importance_clip=options.importance_clip,
        )
        if batch.weights is not None:
            loss = loss * batch.weights
        return loss * options.coefficient, metrics

    def _teacher(self, batch: MicroBatch) -> Tensor:
        if batch.teacher is None:
            raise ValueError("the teacher's log-probabilities are missing")
        return batch.teacher

    def _floored(self, logprobs: Tensor) -> Tensor:
        """logProbFloor: raised values have no gradient."""
        floor = self._distillation.log_prob_floor
        return logprobs if floor is None else logprobs.clamp_min(floor)
