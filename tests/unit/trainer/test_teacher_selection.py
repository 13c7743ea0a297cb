"""Token sets and ensembles: the layout is core's, the numbers are the teacher's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from opd_api.v1alpha1 import TokenSelection
from opd_trainer.core.divergences import mixture_logprobs, select_tokens
from opd_trainer.sample import Sample, TokenSet
from opd_trainer.teachers.selection import mix, query_for, selected_tokens, without_foreign
from opd_trainer.teachers.wire import ScoreAnswer

ROWS, K = 5, 4


def tables(seed: int = 0) -> tuple[TokenSet, ScoreAnswer, np.ndarray]:
    """Student's and teacher's top-k over a vocabulary of 12 and the teacher's whole distribution."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(ROWS, 12))
    whole = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
    student_ids = np.argsort(generator.random((ROWS, 12)), 1)[:, :K].astype(np.int32)
    teacher_ids = np.argsort(-whole, 1)[:, :K].astype(np.int32)
    student = TokenSet(student_ids, np.zeros((ROWS, K), np.float32), np.ones((ROWS, K), bool))
    top = TokenSet(teacher_ids, np.take_along_axis(whole, teacher_ids, 1), np.ones((ROWS, K), bool))
    return student, ScoreAnswer(whole[:, 0], top, np.take_along_axis(whole, student_ids, 1)), whole


@pytest.mark.parametrize(
    "selection",
    [
        TokenSelection.STUDENT_TOPK,
        TokenSelection.TEACHER_TOPK,
        TokenSelection.UNION,
        TokenSelection.INTERSECTION,
    ],
)
def test_the_layout_is_that_of_core_select_tokens(selection: TokenSelection) -> None:
    student, answer, whole = tables()
    chosen = selected_tokens(selection, answer, student)
    assert chosen is not None
    assert answer.top is not None
    ids, valid = select_tokens(
        torch.from_numpy(student.ids).long(), torch.from_numpy(answer.top.ids).long(), selection.value
    )
    assert np.array_equal(chosen.ids, ids.numpy())
    assert np.array_equal(chosen.valid, valid.numpy())
    np.testing.assert_array_equal(chosen.logprobs, np.take_along_axis(whole, chosen.ids.astype(np.int64), 1))


def test_a_union_counts_every_token_once() -> None:
    student, answer, _ = tables(3)
    chosen = selected_tokens(TokenSelection.UNION, answer, student)
    assert chosen is not None
    for ids, valid in zip(chosen.ids, chosen.valid, strict=True):
        kept = ids[valid].tolist()
        assert len(kept) == len(set(kept))


def test_the_sampled_signal_has_no_set() -> None:
    student, answer, _ = tables()
    assert selected_tokens(TokenSelection.STUDENT_SAMPLED, answer, student) is None


def test_an_ensemble_is_the_mixture_of_core() -> None:
    answers = [tables(seed)[1] for seed in range(3)]
    weights = [1.0, 2.0, 0.5]
    mixed = mix(answers, weights)
    expected = mixture_logprobs(torch.tensor(np.stack([answer.sampled for answer in answers])), torch.tensor(weights))
    np.testing.assert_allclose(mixed.sampled, expected.numpy(), atol=1e-6)
    assert mixed.at is not None
    assert mixed.at.shape == (ROWS, K)


def test_an_ensemble_of_one_teacher_twice_is_that_teacher() -> None:
    answer = tables()[1]
    np.testing.assert_allclose(mix([answer, answer], [0.3, 0.7]).sampled, answer.sampled, atol=1e-6)


def sample(top: TokenSet | None) -> Sample:
    response = np.arange(ROWS, dtype=np.int32)
    return Sample(1, 1, "", np.array([1, 2], np.int32), response_ids=response, student_topk=top)


def test_ids_that_the_teacher_lacks_are_not_sent_and_have_probability_zero() -> None:
    student, answer, _ = tables()
    query = query_for(sample(student), TokenSelection.STUDENT_TOPK, K, reuse_prefix=True, vocabulary=6)
    assert query.at_ids is not None
    assert query.at_ids.max() < 6
    chosen = selected_tokens(TokenSelection.STUDENT_TOPK, without_foreign(answer, sample(student), 6), student)
    assert chosen is not None
    assert np.array_equal(chosen.valid, student.ids < 6)


def test_a_student_set_without_the_rollouts_top_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="top tokens"):
        query_for(sample(None), TokenSelection.UNION, K, reuse_prefix=True)


def test_only_what_the_selection_needs_is_asked_for() -> None:
    student = tables()[0]
    wanted = {
        selection: query_for(sample(student), selection, K, reuse_prefix=True)
        for selection in (TokenSelection.STUDENT_SAMPLED, TokenSelection.TEACHER_TOPK, TokenSelection.STUDENT_TOPK)
    }
    assert wanted[TokenSelection.STUDENT_SAMPLED].top_k == 0
    assert wanted[TokenSelection.STUDENT_SAMPLED].at_ids is None
    assert wanted[TokenSelection.TEACHER_TOPK].top_k == K
    assert wanted[TokenSelection.TEACHER_TOPK].at_ids is None
    assert wanted[TokenSelection.STUDENT_TOPK].top_k == 0
    assert wanted[TokenSelection.STUDENT_TOPK].at_ids is not None
