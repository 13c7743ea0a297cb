"""Data, rollout, training, Ray, lifecycle, diagnostics and network."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from opd_api.v1alpha1.base import (
    ApiModel,
    Fraction,
    KubernetesObject,
    Name,
    NonNegativeInt,
    Path,
    PositiveInt,
    Seconds,
    ShortText,
)
from opd_api.v1alpha1.enums import (
    CleanupOnFailure,
    CleanupOnSuccess,
    CorrectionLevel,
    CorrectionType,
    Dtype,
    LossAggregation,
    OnUpdate,
    Overlong,
    RolloutEngine,
    Schedule,
    TopkStatsMode,
    WeightSync,
)
from opd_api.v1alpha1.placement import TemplatedPlacement


class Data(ApiModel):
    """The prompts."""

    source: Path = Field(description="Path of a jsonl or parquet file, or a hub id.")
    split: ShortText = Field("train", description="Split of a hub data set.")
    prompt_field: ShortText = Field("prompt", description="Field with the prompt: text or a list of chat messages.")
    data_source_field: ShortText = Field(
        "data_source", description="Field with the data source, used by routing and metrics."
    )
    answer_field: ShortText = Field("answer", description="Field with the reference answer, used by rewards.")
    chat_template: Path | None = Field(None, description="Chat template (file or text); default is the tokenizer's.")
    shuffle: bool = Field(True, description="Shuffle each epoch.")
    seed: NonNegativeInt = Field(0, description="Seed of the shuffle.")
    max_prompt_tokens: PositiveInt = Field(1024, description="Longest prompt, in tokens.")
    overlong: Overlong = Field(Overlong.DROP, description="What happens to longer prompts: drop, truncate or error.")
    max_failed_fraction: Fraction = Field(0.05, description="Fraction of failed samples past which the run stops.")


class Sampling(ApiModel):
    """Sampling of rollouts."""

    temperature: Annotated[float, Field(gt=0, le=10)] = Field(1.0, description="Sampling temperature.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Nucleus; below 1 the log-probabilities are no longer the behaviour policy's."
    )
    top_k: Annotated[int, Field(ge=-1)] = Field(-1, description="Top-k; -1 or 0 is off.")


class Rollout(ApiModel):
    """How the student writes its answers."""

    engine: RolloutEngine = Field(RolloutEngine.SGLANG, description="sglang or transformers.")
    replicas: Annotated[int, Field(ge=1, le=512)] = Field(1, description="Engine replicas.")
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = Field(1, description="Accelerators per engine replica.")
    samples_per_prompt: Annotated[int, Field(ge=1, le=1024)] = Field(
        1, description="Samples of one prompt (group size)."
    )
    max_response_tokens: PositiveInt = Field(4096, description="Longest response, in tokens.")
    sampling: Sampling = Field(default_factory=Sampling, description="Sampling parameters.")
    max_staleness: Annotated[int, Field(ge=0, le=64)] = Field(
        0, description="Oldest weight version a consumed sample may have; 0 is synchronous."
    )
    partial_rollout: bool = Field(
        False, description="Continue aborted responses on new weights; needs maxStaleness > 0."
    )
    on_update: OnUpdate = Field(
        OnUpdate.DRAIN,
        description="What a weight update does to running rollouts. abort: cuts them off; drain: waits for their end.",
    )


class RolloutCorrection(ApiModel):
    """Correction of the gap between engine and learner log-probabilities."""

    type: CorrectionType = Field(
        CorrectionType.NONE,
        description="What is done with the ratio learner/engine of a token's probability. none: nothing; tis: a weight, clamped "
        "to low..high; icepop: a weight, 0 outside low..high; mis: a weight, and what is outside leaves the loss and its mean.",
    )
    level: CorrectionLevel = Field(
        CorrectionLevel.TOKEN,
        description="What the ratio is of. token: each token; sequence: the product over the response; geometric: that product's "
        "mean of a token.",
    )
    low: Annotated[float, Field(ge=0)] | None = Field(None, description="Lower bound of the ratio.")
    high: Annotated[float, Field(gt=0)] = Field(2.0, description="Upper bound of the ratio.")
    veto: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Drop a sequence that has a token ratio below this."
    )


class Checkpoint(ApiModel):
    """When checkpoints are written and kept."""

    every_steps: PositiveInt = Field(20, description="Steps between checkpoints.")
    keep_last: PositiveInt = Field(2, description="Newest checkpoints kept.")
    keep_every_steps: PositiveInt | None = Field(None, description="Also keep each multiple of this step.")
    async_: bool = Field(True, alias="async", description="Write in the background.")
    resume: Path = Field("auto", description="auto, never, or the path of a checkpoint.")


class Evaluation(ApiModel):
    """Held-out prompts: reward mean and reverse KL."""

    every_steps: PositiveInt = Field(20, description="Steps between evaluations.")
    source: Path = Field(description="Path of a jsonl or parquet file, or a hub id.")
    samples: PositiveInt = Field(64, description="Prompts of one evaluation.")


class Training(ApiModel):
    """How the student is trained."""

    steps: PositiveInt | None = Field(None, description="Optimizer steps; exactly one of steps and epochs.")
    epochs: PositiveInt | None = Field(None, description="Passes over the prompts; exactly one of steps and epochs.")
    gpus: Annotated[int, Field(ge=1, le=4096)] = Field(1, description="Learner ranks, one accelerator each.")
    prompts_per_step: PositiveInt = Field(64, description="Prompts of one step.")
    updates_per_step: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="Optimizer updates on one step's samples."
    )
    learning_rate: Annotated[float, Field(gt=0, le=1)] = Field(1e-6, description="Peak learning rate.")
    schedule: Schedule = Field(
        Schedule.CONSTANT,
        description="Learning rate after the warm-up. constant: stays; linear: falls to 0 in a straight line; cosine: falls to 0 "
        "along half a cosine.",
    )
    warmup_steps: NonNegativeInt = Field(0, description="Steps of linear warm-up.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="AdamW weight decay.")
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = Field(
        default_factory=lambda: [0.9, 0.95], description="AdamW betas."
    )
    grad_clip: Annotated[float, Field(gt=0)] = Field(1.0, description="Largest gradient norm.")
    max_tokens_per_micro_batch: PositiveInt = Field(16_384, description="Tokens packed into one micro-batch of a rank.")
    activation_checkpointing: bool = Field(True, description="Recompute activations in the backward pass.")
    dtype: Dtype = Field(Dtype.BF16, description="Compute type; parameters, gradients and Adam state are fp32.")
    seed: NonNegativeInt = Field(0, description="Seed of the training.")
    loss_aggregation: LossAggregation = Field(
        LossAggregation.TOKEN_MEAN,
        description="How token losses become one number. token-mean: mean over the step's tokens; token-sum: their sum; "
        "seq-mean-token-sum: sum of each response, mean over responses; seq-mean-token-sum-norm: that over the longest length "
        "allowed; seq-mean-token-mean: mean of each response, mean over responses.",
    )
    rollout_correction: RolloutCorrection = Field(
        default_factory=RolloutCorrection, description="Engine/learner mismatch correction."
    )
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="Checkpoints.")
    evaluation: Evaluation | None = Field(None, description="Held-out evaluation; absent means none.")
    weight_sync: WeightSync = Field(WeightSync.DISK, description="How new weights reach the engines: disk or nccl.")


class RayWorkers(TemplatedPlacement):
    """Ray worker pods; their number is computed from the demand."""

    gpus_per_worker: Annotated[int, Field(ge=1, le=64)] | None = Field(
        None, description="Accelerators of one worker pod; default min(8, demand)."
    )


class Ray(ApiModel):
    """The Ray cluster of the student."""

    ray_version: ShortText | None = Field(
        None, description="Ray version in the image; default is the operator's setting."
    )
    head: TemplatedPlacement = Field(
        default_factory=TemplatedPlacement, description="Placement and template of the head."
    )
    workers: RayWorkers = Field(default_factory=RayWorkers, description="Placement and template of the workers.")
    runtime_env: KubernetesObject | None = Field(None, description="Ray runtime environment of the job.")


class Cleanup(ApiModel):
    """What is deleted at the end."""

    on_success: CleanupOnSuccess = Field(CleanupOnSuccess.ALL, description="All: teachers and Ray are deleted.")
    on_failure: CleanupOnFailure = Field(CleanupOnFailure.ALL, description="All, or KeepRay to look at the cluster.")
    keep_seconds: Seconds = Field(3600, description="How long KeepRay keeps it, in seconds.")


class Lifecycle(ApiModel):
    """Deadlines, retries and cleanup."""

    backoff_limit: Annotated[int, Field(ge=0, le=100)] = Field(
        3, description="New attempts after infrastructure failures."
    )
    active_deadline_seconds: Seconds | None = Field(None, description="Total time, in seconds; default unbounded.")
    teacher_ready_deadline_seconds: Seconds = Field(3600, description="Time until every teacher answers, in seconds.")
    pre_running_deadline_seconds: Seconds = Field(
        1800, description="Time of the check and of the start of the student, in seconds."
    )
    stall_timeout_seconds: Seconds = Field(1800, description="Time without any activity, in seconds.")
    heartbeat_timeout_seconds: Seconds = Field(180, description="Time without a heartbeat, in seconds.")
    teacher_idle_timeout_seconds: Seconds = Field(
        600, description="How long ready teachers wait for student capacity, in seconds."
    )
    ttl_seconds_after_finished: NonNegativeInt | None = Field(
        None, description="Delete the OPDJob this long after its end, in seconds."
    )
    cleanup: Cleanup = Field(default_factory=Cleanup, description="What is deleted at the end.")
    preemption_grace_seconds: Seconds = Field(
        120, description="Time to save a checkpoint when asked to stop, in seconds."
    )


class Diagnostics(ApiModel):
    """What the trainer records besides metrics; all bounded."""

    sample_stats: bool = Field(True, description="One JSONL record per sample.")
    sample_period: PositiveInt = Field(1, description="Every how many steps sample records are written (1-based).")
    log_responses: bool = Field(False, description="Include response text in sample records.")
    token_stats: bool = Field(False, description="Per-token log-probabilities.")
    token_period: PositiveInt = Field(5, description="Every how many steps token records are written.")
    topk_stats: bool = Field(False, description="Per-position top-k log-probabilities and overlaps.")
    topk_stats_mode: TopkStatsMode = Field(TopkStatsMode.ONLINE, description="online, or teacher values deferred.")
    topk_period: PositiveInt = Field(10, description="Every how many steps top-k records are written.")
    topk_stats_k: Annotated[int, Field(ge=1, le=1024)] = Field(16, description="K of top-k records.")
    topk_max_tokens: PositiveInt = Field(
        4096, description="Positions of one top-k record; sub-sampled before transfer."
    )
    report: bool = Field(True, description="Write the HTML report.")


class NetworkPolicy(ApiModel):
    """Ingress rules of the job's pods."""

    enabled: bool = Field(True, description="Create a NetworkPolicy for the job.")
    metrics_from: Annotated[list[KubernetesObject], Field(max_length=16)] = Field(
        default_factory=list, description="NetworkPolicyPeers that may scrape metrics; empty means any."
    )


__all__ = [
    "Checkpoint",
    "Cleanup",
    "Data",
    "Diagnostics",
    "Evaluation",
    "Lifecycle",
    "Name",
    "NetworkPolicy",
    "Ray",
    "RayWorkers",
    "Rollout",
    "RolloutCorrection",
    "Sampling",
    "Training",
]
