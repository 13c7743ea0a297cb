"""Rules 9, 10, 14, 15 and 17: numbers, sampling, task reward, policy loss and correction."""

from __future__ import annotations

from opd_api.rules.finding import Hits, Level, rule
from opd_api.v1alpha1 import (
    AdvantageEstimator,
    CorrectionType,
    LossAggregation,
    OPDJob,
    PolicyLoss,
    PolicyLossType,
    Signal,
    StudentLogProbs,
    Whiten,
)

DISTILLATION = "spec.distillation"
TASK = "spec.task"
#: Above this, full fine-tuning by OPD got worse in every published comparison.
FULL_LEARNING_RATE = 2e-5
_WHITENED = frozenset(
    {
        AdvantageEstimator.GAE,
        AdvantageEstimator.REINFORCE_PLUS_PLUS,
        AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE,
    }
)
_SEQUENCE_LOSSES = frozenset({PolicyLossType.GSPO, PolicyLossType.SAPO})


@rule(9, "PerTokenClipRange", Level.ERROR, "perTokenClip is positive")
def per_token_clip_range(job: OPDJob) -> Hits:
    value = job.spec.distillation.per_token_clip
    if value is not None and value <= 0:
        yield f"{DISTILLATION}.perTokenClip", f"{value} would clip everything away. Write a bound in nats, such as 5."


@rule(9, "ImportanceClipRange", Level.ERROR, "importanceClip is greater than 1")
def importance_clip_range(job: OPDJob) -> Hits:
    value = job.spec.distillation.importance_clip
    if value is not None and value <= 1:
        yield (
            f"{DISTILLATION}.importanceClip",
            f"{value} would clip ratios that have not moved. Write a bound greater than 1, such as 2.",
        )


@rule(9, "LogProbFloorRange", Level.ERROR, "logProbFloor is negative")
def log_prob_floor_range(job: OPDJob) -> Hits:
    value = job.spec.distillation.log_prob_floor
    if value is not None and value >= 0:
        yield (
            f"{DISTILLATION}.logProbFloor",
            f"log-probabilities are negative, so a floor of {value} would make every token certain. Write -10 or lower.",
        )


@rule(9, "CorrectionRange", Level.ERROR, "rolloutCorrection.low is lower than high")
def correction_range(job: OPDJob) -> Hits:
    correction = job.spec.training.rollout_correction
    if correction.low is not None and correction.low >= correction.high:
        yield (
            "spec.training.rolloutCorrection.low",
            f"low {correction.low} is not lower than high {correction.high}, so no ratio lies between. Write low: 0.5.",
        )


@rule(10, "TemperatureNotOne", Level.WARNING, "the teacher scores at temperature 1")
def temperature_not_one(job: OPDJob) -> Hits:
    value = job.spec.rollout.sampling.temperature
    if value != 1:
        yield (
            "spec.rollout.sampling.temperature",
            f"the student samples at temperature {value} but the teacher scores at 1, so they are compared at different "
            "temperatures. Write temperature: 1.",
        )


@rule(10, "TruncatedSampling", Level.ERROR, "topP and topK are off")
def truncated_sampling(job: OPDJob) -> Hits:
    sampling = job.spec.rollout.sampling
    if sampling.top_p < 1:
        yield (
            "spec.rollout.sampling.topP",
            f"with topP {sampling.top_p} the engine's log-probabilities are not those of the policy that wrote the tokens. "
            "Write topP: 1.",
        )
    if sampling.top_k > 0:
        yield (
            "spec.rollout.sampling.topK",
            f"with topK {sampling.top_k} the engine's log-probabilities are not those of the policy that wrote the tokens. "
            "Write topK: -1.",
        )


@rule(14, "SequenceLossAggregation", Level.ERROR, "gspo and sapo need seq-mean-token-mean")
def sequence_loss_aggregation(job: OPDJob) -> Hits:
    loss, aggregation = job.spec.task.policy_loss.type, job.spec.training.loss_aggregation
    if loss in _SEQUENCE_LOSSES and aggregation is not LossAggregation.SEQ_MEAN_TOKEN_MEAN:
        yield (
            "spec.training.lossAggregation",
            f"{loss} weighs whole sequences, so {aggregation} would weigh them again by length. Write lossAggregation: "
            "seq-mean-token-mean.",
        )


@rule(14, "GaeNeedsCritic", Level.ERROR, "gae needs task.critic")
def gae_needs_critic(job: OPDJob) -> Hits:
    if job.spec.task.advantage_estimator is AdvantageEstimator.GAE and job.spec.task.critic is None:
        yield (
            f"{TASK}.critic",
            "advantageEstimator: gae needs a value model. Write critic: {model: {source: …}}, or advantageEstimator: grpo.",
        )


@rule(14, "CriticNeedsGae", Level.ERROR, "task.critic is for gae")
def critic_needs_gae(job: OPDJob) -> Hits:
    task = job.spec.task
    if task.critic is not None and task.advantage_estimator is not AdvantageEstimator.GAE:
        yield (
            f"{TASK}.critic",
            f"nothing reads the critic with advantageEstimator: {task.advantage_estimator}. Remove it, or write "
            "advantageEstimator: gae.",
        )


@rule(14, "TaskWeightNeedsReward", Level.ERROR, "taskAdvWeight needs a reward and an estimator")
def task_weight_needs_reward(job: OPDJob) -> Hits:
    task = job.spec.task
    if task.task_adv_weight == 0:
        return
    if task.reward == "none":
        yield (
            f"{TASK}.reward",
            "taskAdvWeight is set but there is no reward. Write reward: math_verify, or taskAdvWeight: 0.",
        )
    if task.advantage_estimator is AdvantageEstimator.NONE:
        yield (
            f"{TASK}.advantageEstimator",
            "taskAdvWeight is set but rewards do not become advantages. Write advantageEstimator: grpo, or taskAdvWeight: 0.",
        )


@rule(14, "WhitenedTwice", Level.ERROR, "gae and reinforce_plus_plus whiten already")
def whitened_twice(job: OPDJob) -> Hits:
    estimator = job.spec.task.advantage_estimator
    if job.spec.distillation.whiten is Whiten.BEFORE_DISTILLATION and estimator in _WHITENED:
        yield (
            f"{DISTILLATION}.whiten",
            f"{estimator} whitens its advantages already. Write whiten: none.",
        )


@rule(14, "WhitenRemovesGap", Level.WARNING, "whitening after the teacher's term removes a constant gap")
def whiten_removes_gap(job: OPDJob) -> Hits:
    if job.spec.distillation.whiten is Whiten.AFTER_DISTILLATION:
        yield (
            f"{DISTILLATION}.whiten",
            "afterDistillation takes the mean away, so a constant gap between teacher and student teaches nothing, and the "
            "coefficient is no longer in nats. Write whiten: none or beforeDistillation.",
        )


@rule(15, "CorrectionNeedsTrainLogProbs", Level.ERROR, "rolloutCorrection compares with the learner")
def correction_needs_train_log_probs(job: OPDJob) -> Hits:
    correction = job.spec.training.rollout_correction.type
    if correction is not CorrectionType.NONE and (job.spec.distillation.student_log_probs is StudentLogProbs.ROLLOUT):
        yield (
            "spec.training.rolloutCorrection.type",
            f"{correction} corrects from the engine's to the learner's log-probabilities, but studentLogProbs: rollout uses the "
            "engine's everywhere. Write studentLogProbs: train, or type: none.",
        )


@rule(15, "ClipHasNoEffect", Level.WARNING, "with one update and the learner's log-probabilities the ratio is 1")
def clip_has_no_effect(job: OPDJob) -> Hits:
    spec = job.spec
    if spec.training.updates_per_step > 1 or spec.distillation.student_log_probs is not StudentLogProbs.TRAIN:
        return
    message = "updatesPerStep is 1 and studentLogProbs is train, so every ratio is exactly 1 and nothing is clipped. "
    if spec.distillation.signal is Signal.LOSS and spec.distillation.importance_clip is not None:
        yield f"{DISTILLATION}.importanceClip", message + "Remove it, or write updatesPerStep: 2."
    for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"):
        field = PolicyLoss.model_fields[name]
        if getattr(spec.task.policy_loss, name) != field.default:
            yield f"{TASK}.policyLoss.{field.alias}", message + "Remove it, or write updatesPerStep: 2."


@rule(17, "LearningRateHigh", Level.WARNING, "full fine-tuning above 2e-5 forgets")
def learning_rate_high(job: OPDJob) -> Hits:
    rate = job.spec.training.learning_rate
    if job.spec.student.lora is None and rate > FULL_LEARNING_RATE:
        yield (
            "spec.training.learningRate",
            f"{rate:g} is high for full fine-tuning; published runs got worse above 2e-5. Write 1e-6 to 1e-5, or train "
            "adapters (student.lora).",
        )


RULES = (
    per_token_clip_range,
    importance_clip_range,
    log_prob_floor_range,
    correction_range,
    temperature_not_one,
    truncated_sampling,
    sequence_loss_aggregation,
    gae_needs_critic,
    critic_needs_gae,
    task_weight_needs_reward,
    whitened_twice,
    whiten_removes_gap,
    correction_needs_train_log_probs,
    clip_has_no_effect,
    learning_rate_high,
)
