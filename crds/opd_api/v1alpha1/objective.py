"""What is optimised: the distillation signal and the task reward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from opd_api.v1alpha1.base import ApiModel, Entrypoint
from opd_api.v1alpha1.enums import (
    AdvantageEstimator,
    Divergence,
    PolicyLossType,
    Signal,
    StudentLogProbs,
    Tail,
    TokenSelection,
    Whiten,
)
from opd_api.v1alpha1.models import Model


class Distillation(ApiModel):
    """The distillation signal; names and formulas in docs/what-is-optimised.md."""

    signal: Signal = Field(
        Signal.ADVANTAGE, description="advantage (policy gradient) or loss (back-propagated divergence)."
    )
    coefficient: Annotated[float, Field(gt=0)] = Field(1.0, description="Weight of the distillation term, in nats.")
    token_selection: TokenSelection = Field(
        TokenSelection.STUDENT_SAMPLED,
        description="Which tokens of a position are compared. student_sampled: the one that the student wrote; student_topk, "
        "teacher_topk: the topK likeliest of that model; union, intersection: of both models; full: the whole vocabulary.",
    )
    top_k: Annotated[int, Field(ge=1, le=131_072)] | None = Field(
        None, description="Size of the token set; set selections only."
    )
    divergence: Divergence = Field(
        Divergence.REVERSE_KL,
        description="On sets: reverse_kl: KL(student, teacher), keeps to what the teacher likes; forward_kl: KL(teacher, student), "
        "covers all that it likes; jsd: between them, bounded; mixed: their weighted sum; low_var_kl: k3 of each token. "
        "On the sampled token, with d = log student - log teacher: k1 (= reverse_kl, kl): d; k2 (= mse): half of d squared; "
        "k3 (= low_var_kl): exp(-d) - 1 + d; abs: the size of d. The page docs/what-is-optimised.md says where each leads.",
    )
    jsd_alpha: float = Field(0.5, description="Mixture (1-a)s + a*t; 0 is reverse_kl, 1 is forward_kl.")
    mixed_forward_weight: Annotated[float, Field(ge=0, le=1)] = Field(0.5, description="Weight of forward_kl in mixed.")
    tail: Tail = Field(
        Tail.TAIL,
        description="What happens to probability outside the set. tail: one more bucket holds it; norm: dropped, the set is "
        "scaled to 1; trunc: dropped, the set stays as it is; sampled: the term of a sampled token outside the set makes the "
        "gradient that of the whole vocabulary (signal loss, reverse_kl on student_topk).",
    )
    straight_through: bool = Field(False, description="Value of the named estimator with the gradient of k2.")
    log_prob_floor: float | None = Field(None, description="Lower bound of log-probabilities, < 0.")
    per_token_clip: float | None = Field(
        None,
        description="Bound of the per-token signal, > 0: of its size for signal advantage, from above for signal loss.",
    )
    importance_clip: float | None = Field(
        None, description="Upper bound of the importance ratio of the loss signal, > 1."
    )
    discount_factor: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="Credit of later tokens, in [0, 1).")
    proximal_teacher_alpha: float = Field(1.0, description="TROPD mixture of teacher and student, in (0, 1].")
    subtract_baseline: bool = Field(False, description="Subtract the masked global mean of the step, after mixing.")
    student_log_probs: StudentLogProbs = Field(
        StudentLogProbs.TRAIN, description="train: old log-probabilities from the learner; rollout: the engine's."
    )
    whiten: Whiten = Field(
        Whiten.NONE,
        description="Whether and when advantages are scaled to mean 0 and deviation 1 over the step. none: never; "
        "beforeDistillation: those of the task, before the teacher's term is added; afterDistillation: the sum of both.",
    )
    advantage_clip: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Symmetric bound of the final advantage."
    )


class Critic(ApiModel):
    """Value model of GAE."""

    model: Model = Field(description="Initial weights of the critic.")
    learning_rate: Annotated[float, Field(gt=0, le=1)] = Field(1e-5, description="Learning rate of the critic.")
    clip: Annotated[float, Field(gt=0)] = Field(0.2, description="Clip range of value predictions.")


class PolicyLoss(ApiModel):
    """Policy loss of the advantage signal."""

    type: PolicyLossType = Field(
        PolicyLossType.VANILLA,
        description="Loss of a token with advantage A and ratio r to the old policy. vanilla: PPO with dual clip; gspo: r of "
        "the whole sequence, clipped; sapo: a smooth gate in place of the clip; cispo: the clipped r as a constant weight of "
        "A log s; reinforce: A log s, no ratio; importance_sampling: A r, no clip.",
    )
    clip_ratio_low: Annotated[float, Field(ge=0)] = Field(0.2, description="Lower clip distance of the ratio.")
    clip_ratio_high: Annotated[float, Field(ge=0)] = Field(0.2, description="Upper clip distance of the ratio.")
    clip_ratio_c: Annotated[float, Field(gt=1)] = Field(3.0, description="Dual clip bound for negative advantages.")
    tau_pos: Annotated[float, Field(gt=0)] = Field(1.0, description="SAPO temperature for positive advantages.")
    tau_neg: Annotated[float, Field(gt=0)] = Field(1.05, description="SAPO temperature for negative advantages.")


class Task(ApiModel):
    """Task reward and how it is mixed in."""

    reward: Literal["none", "math_verify", "exact_match"] | Entrypoint = Field(
        "none", description="none, math_verify, exact_match, or module:function."
    )
    filter: Entrypoint | None = Field(None, description="module:function that keeps or drops a completed group.")
    task_adv_weight: Annotated[float, Field(ge=0)] = Field(0.0, description="Weight of the task advantage.")
    advantage_estimator: AdvantageEstimator = Field(
        AdvantageEstimator.NONE,
        description="How rewards become advantages. grpo: less the group's mean, over its deviation; dr_grpo: less the mean "
        "only; rloo: less the mean of the others of the group; gae: with task.critic; reinforce_plus_plus: whitened over the "
        "step; reinforce_plus_plus_baseline: less the group's mean, then whitened; none: not at all.",
    )
    critic: Critic | None = Field(None, description="Value model; gae only.")
    policy_loss: PolicyLoss = Field(default_factory=PolicyLoss, description="Policy loss and its clips.")
