"""The mathematics of on-policy distillation: tensors in, tensors out.

torch only; no configuration objects, no I/O, no state. float64 in, float64 out; half precision is computed in float32.
Shapes: [B, T] sequences × response positions, [N, …] flattened tokens, V vocabulary, K set size, natural logarithms.
"""

from opd_trainer.core.advantages import (
    Moments,
    center,
    combine_advantages,
    discounted_returns,
    distillation_advantage,
    gae,
    grpo,
    masked_moments,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    whiten,
)
from opd_trainer.core.aggregation import aggregate
from opd_trainer.core.correction import correction_weights
from opd_trainer.core.divergences import (
    full_divergence,
    mixture_logprobs,
    select_tokens,
    set_divergence,
    student_topk_surrogate,
    student_topk_surrogate_from_logprobs,
)
from opd_trainer.core.estimators import sampled_kl
from opd_trainer.core.kinds import (
    AggregationMode,
    CorrectionKind,
    CorrectionLevel,
    PolicyLossKind,
    SampledKind,
    Selection,
    SetKind,
    TailMode,
)
from opd_trainer.core.policy_losses import distillation_loss, policy_loss, value_loss
from opd_trainer.core.topk import (
    TopKResult,
    gather_logprobs,
    linear_gather_logprobs,
    linear_logprobs,
    linear_topk_divergence,
    topk_divergence,
)
from opd_trainer.core.vocab_parallel import vocab_parallel_gather_logprobs, vocab_parallel_logsumexp

__all__ = [
    "AggregationMode",
    "CorrectionKind",
    "CorrectionLevel",
    "Moments",
    "PolicyLossKind",
    "SampledKind",
    "Selection",
    "SetKind",
    "TailMode",
    "TopKResult",
    "aggregate",
    "center",
    "combine_advantages",
    "correction_weights",
    "discounted_returns",
    "distillation_advantage",
    "distillation_loss",
    "full_divergence",
    "gae",
    "gather_logprobs",
    "grpo",
    "linear_gather_logprobs",
    "linear_logprobs",
    "linear_topk_divergence",
    "masked_moments",
    "mixture_logprobs",
    "policy_loss",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "sampled_kl",
    "select_tokens",
    "set_divergence",
    "student_topk_surrogate",
    "student_topk_surrogate_from_logprobs",
    "topk_divergence",
    "value_loss",
    "vocab_parallel_gather_logprobs",
    "vocab_parallel_logsumexp",
    "whiten",
]
