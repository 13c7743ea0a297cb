"""Enumerations a user may write. Names are the field's own (see docs/mapping.md for other systems' names)."""

from __future__ import annotations

from enum import StrEnum


class Device(StrEnum):
    CUDA = "cuda"
    CPU = "cpu"


class PullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class Dtype(StrEnum):
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class TeacherBackend(StrEnum):
    SGLANG = "sglang"
    VLLM = "vllm"
    LMDEPLOY = "lmdeploy"
    TRANSFORMERS = "transformers"
    INPROCESS = "inprocess"


class RoutingMode(StrEnum):
    ROUTE = "route"
    ENSEMBLE = "ensemble"


class Signal(StrEnum):
    ADVANTAGE = "advantage"
    LOSS = "loss"


class TokenSelection(StrEnum):
    STUDENT_SAMPLED = "student_sampled"
    STUDENT_TOPK = "student_topk"
    TEACHER_TOPK = "teacher_topk"
    UNION = "union"
    INTERSECTION = "intersection"
    FULL = "full"


#: Selections that keep a set of tokens per position and so need topK.
SET_SELECTIONS = frozenset(
    {TokenSelection.STUDENT_TOPK, TokenSelection.TEACHER_TOPK, TokenSelection.UNION, TokenSelection.INTERSECTION}
)


class Divergence(StrEnum):
    REVERSE_KL = "reverse_kl"
    FORWARD_KL = "forward_kl"
    JSD = "jsd"
    MIXED = "mixed"
    LOW_VAR_KL = "low_var_kl"
    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    ABS = "abs"
    KL = "kl"
    MSE = "mse"


#: Aliases of the one-token estimators, resolved to the name used in formulas.
SAMPLED_ESTIMATOR = {
    Divergence.REVERSE_KL: Divergence.K1,
    Divergence.KL: Divergence.K1,
    Divergence.K1: Divergence.K1,
    Divergence.MSE: Divergence.K2,
    Divergence.K2: Divergence.K2,
    Divergence.LOW_VAR_KL: Divergence.K3,
    Divergence.K3: Divergence.K3,
    Divergence.ABS: Divergence.ABS,
}


class Tail(StrEnum):
    TAIL = "tail"
    NORM = "norm"
    TRUNC = "trunc"
    SAMPLED = "sampled"


class StudentLogProbs(StrEnum):
    TRAIN = "train"
    ROLLOUT = "rollout"


class Whiten(StrEnum):
    NONE = "none"
    BEFORE_DISTILLATION = "beforeDistillation"
    AFTER_DISTILLATION = "afterDistillation"


class AdvantageEstimator(StrEnum):
    NONE = "none"
    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"
    GAE = "gae"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"


class PolicyLossType(StrEnum):
    VANILLA = "vanilla"
    GSPO = "gspo"
    SAPO = "sapo"
    CISPO = "cispo"
    REINFORCE = "reinforce"
    IMPORTANCE_SAMPLING = "importance_sampling"


class LossAggregation(StrEnum):
    TOKEN_MEAN = "token-mean"  # noqa: S105 - the name of an aggregation, no secret
    TOKEN_SUM = "token-sum"  # noqa: S105
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"  # noqa: S105
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"  # noqa: S105
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"  # noqa: S105


class CorrectionType(StrEnum):
    NONE = "none"
    TIS = "tis"
    ICEPOP = "icepop"
    MIS = "mis"


class CorrectionLevel(StrEnum):
    TOKEN = "token"  # noqa: S105
    SEQUENCE = "sequence"
    GEOMETRIC = "geometric"


class Overlong(StrEnum):
    DROP = "drop"
    TRUNCATE = "truncate"
    ERROR = "error"


class RolloutEngine(StrEnum):
    SGLANG = "sglang"
    TRANSFORMERS = "transformers"


class OnUpdate(StrEnum):
    ABORT = "abort"
    DRAIN = "drain"


class Schedule(StrEnum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class WeightSync(StrEnum):
    DISK = "disk"
    NCCL = "nccl"


class CleanupOnSuccess(StrEnum):
    ALL = "All"


class CleanupOnFailure(StrEnum):
    ALL = "All"
    KEEP_RAY = "KeepRay"


class TopkStatsMode(StrEnum):
    ONLINE = "online"
    STUDENT_ONLINE_TEACHER_DEFERRED = "student_online_teacher_deferred"
