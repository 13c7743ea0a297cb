"""The closed vocabularies of the core: every `kind`, `tail`, `mode` and `level` argument is one of these.

All are string enums, so callers may pass either the member or its value. An unknown name raises `ValueError` that
lists what is accepted.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class _Named(StrEnum):
    """A string enum whose parse error says what to write instead."""

    @classmethod
    def _aliases(cls) -> dict[str, str]:
        return {}

    @classmethod
    def _missing_(cls, value: object) -> Self:
        alias = cls._aliases().get(str(value))
        if alias is not None:
            return cls(alias)
        names = ", ".join([*(member.value for member in cls), *cls._aliases()])
        raise ValueError(f"unknown {cls.__name__} {value!r}: write one of {names}")


class SampledKind(_Named):
    """Estimators of KL(student‖teacher) from one sampled token, with d = log s − log t."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    ABS = "abs"

    @classmethod
    def _aliases(cls) -> dict[str, str]:
        return {"kl": "k1", "reverse_kl": "k1", "mse": "k2", "low_var_kl": "k3"}


class SetKind(_Named):
    """Divergences over a set of tokens (or the whole vocabulary, except `low_var_kl`)."""

    FORWARD_KL = "forward_kl"
    REVERSE_KL = "reverse_kl"
    JSD = "jsd"
    MIXED = "mixed"
    LOW_VAR_KL = "low_var_kl"


class TailMode(_Named):
    """What happens to the probability outside the set: one extra bucket, renormalise, or ignore."""

    TAIL = "tail"
    NORM = "norm"
    TRUNC = "trunc"


class Selection(_Named):
    """How a token set is built from the top-k lists of student and teacher."""

    STUDENT_TOPK = "student_topk"
    TEACHER_TOPK = "teacher_topk"
    UNION = "union"
    INTERSECTION = "intersection"


class PolicyLossKind(_Named):
    """Policy-gradient surrogates."""

    VANILLA = "vanilla"
    GSPO = "gspo"
    SAPO = "sapo"
    CISPO = "cispo"
    REINFORCE = "reinforce"
    IMPORTANCE_SAMPLING = "importance_sampling"


class AggregationMode(_Named):
    """Reductions of a [B, T] loss to a scalar."""

    TOKEN_MEAN = "token-mean"
    TOKEN_SUM = "token-sum"
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"


class CorrectionKind(_Named):
    """Train/rollout mismatch corrections: truncate the ratio, zero it out of bounds, or drop the token."""

    TIS = "tis"
    ICEPOP = "icepop"
    MIS = "mis"


class CorrectionLevel(_Named):
    """What one importance ratio covers: a token, the product over a sequence, or its geometric mean."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    GEOMETRIC = "geometric"
