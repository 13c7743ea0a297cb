"""From a teacher's answer to the token set that the divergence compares. NumPy only: it runs in the controller."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from opd_api.v1alpha1 import TokenSelection
from opd_trainer.sample import Sample, TokenSet
from opd_trainer.teachers.wire import ScoreAnswer, ScoreQuery, valid_entries

#: Selections that need the teacher's own best tokens / the teacher at the student's tokens.
NEEDS_TEACHER_TOP = frozenset({TokenSelection.TEACHER_TOPK, TokenSelection.UNION, TokenSelection.INTERSECTION})
NEEDS_STUDENT_TOP = frozenset({TokenSelection.STUDENT_TOPK, TokenSelection.UNION, TokenSelection.INTERSECTION})


def query_for(
    sample: Sample, selection: TokenSelection, top_k: int, *, reuse_prefix: bool, vocabulary: int | None = None
) -> ScoreQuery:
    """What has to be asked for. Raises ValueError when the rollout lacks the student's top tokens.

    Ids that only the student's (padded) vocabulary has are replaced by 0; `without_foreign` takes their scores out again.
    """
    if sample.response_ids is None:
        raise ValueError(f"sample {sample.sample_id} has no response")
    at_ids = None
    if selection in NEEDS_STUDENT_TOP:
        if sample.student_topk is None:
            raise ValueError(f"{selection} needs the student's top tokens, but the rollout of the sample has none")
        at_ids = sample.student_topk.ids
        if vocabulary is not None:
            at_ids = np.where(at_ids < vocabulary, at_ids, 0).astype(np.int32)
    return ScoreQuery(
        sample.prompt_ids,
        sample.response_ids,
        top_k if selection in NEEDS_TEACHER_TOP else 0,
        at_ids,
        reuse_prefix,
        vocabulary,
    )


def without_foreign(answer: ScoreAnswer, sample: Sample, vocabulary: int | None) -> ScoreAnswer:
    """Probability zero at tokens that the teacher's vocabulary lacks."""
    if answer.at is None or sample.student_topk is None or vocabulary is None:
        return answer
    at = np.where(sample.student_topk.ids < vocabulary, answer.at, np.float32(-np.inf))
    return ScoreAnswer(answer.sampled, answer.top, at)


def selected_tokens(selection: TokenSelection, answer: ScoreAnswer, student: TokenSet | None) -> TokenSet | None:
    """The set with the teacher's log-probabilities; None for student_sampled.

    Layout of `core.select_tokens`: student ids, then teacher ids; an id that both have is valid in the first half only.
    """
    if selection is TokenSelection.TEACHER_TOPK:
        return answer.top
    if selection not in NEEDS_STUDENT_TOP:
        return None
    if student is None or answer.at is None:
        raise ValueError(f"{selection} needs the teacher's log-probabilities at the student's tokens")
    at_student = TokenSet(student.ids, answer.at, valid_entries(answer.at) & student.valid)
    if selection is TokenSelection.STUDENT_TOPK:
        return at_student
    if answer.top is None:
        raise ValueError(f"{selection} needs the teacher's top tokens")
    same = student.ids[:, :, None] == answer.top.ids[:, None, :]
    if selection is TokenSelection.UNION:
        first, second = at_student.valid, answer.top.valid & ~same.any(axis=1)
    else:
        first, second = at_student.valid & same.any(axis=2), np.zeros_like(answer.top.valid)
    return TokenSet(
        np.concatenate([student.ids, answer.top.ids], axis=1),
        np.concatenate([at_student.logprobs, answer.top.logprobs], axis=1),
        np.concatenate([first, second], axis=1),
    )


def mix(answers: Sequence[ScoreAnswer], weights: Sequence[float]) -> ScoreAnswer:
    """Ensemble in probability space, log Σ wᵢ tᵢ − log Σ wᵢ, at the sampled and at given tokens."""
    return ScoreAnswer(
        _mixture([answer.sampled for answer in answers], weights),
        None,
        _mixture([answer.at for answer in answers if answer.at is not None], weights)
        if answers[0].at is not None
        else None,
    )


def _mixture(logprobs: Sequence[NDArray[np.float32]], weights: Sequence[float]) -> NDArray[np.float32]:
    stacked = np.stack([values.astype(np.float64) for values in logprobs])
    logs = np.log(np.asarray(weights, dtype=np.float64)).reshape(-1, *[1] * (stacked.ndim - 1))
    result: NDArray[np.float32] = (np.logaddexp.reduce(stacked + logs, axis=0) - np.log(np.sum(weights))).astype(
        np.float32
    )
    return result
