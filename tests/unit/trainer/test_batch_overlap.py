"""How many of a position's best tokens student and teacher share, from the sets that a union or an intersection keeps."""

from __future__ import annotations

import numpy as np
import pytest

from opd_api.v1alpha1 import TokenSelection
from opd_trainer.controller.batch_metrics import set_overlap
from opd_trainer.sample import Sample, TokenSet
from opd_trainer.teachers.selection import selected_tokens
from opd_trainer.teachers.wire import ScoreAnswer


def token_set(ids: list[list[int]]) -> TokenSet:
    shape = np.array(ids).shape
    return TokenSet(np.array(ids, np.int32), np.full(shape, -1.0, np.float32), np.ones(shape, np.bool_))


def scored(selection: TokenSelection, student: list[list[int]], teacher: list[list[int]]) -> Sample:
    ours, theirs = token_set(student), token_set(teacher)
    answer = ScoreAnswer(np.zeros(len(student), np.float32), theirs, ours.logprobs)
    sample = Sample(1, 1, "", np.array([1], np.int32), student_topk=ours)
    sample.selected = selected_tokens(selection, answer, ours)
    return sample


@pytest.mark.parametrize("selection", [TokenSelection.UNION, TokenSelection.INTERSECTION])
@pytest.mark.parametrize(
    ("student", "teacher", "share"),
    [
        ([[1, 2], [3, 4]], [[2, 5], [3, 4]], 0.75),
        ([[1, 2]], [[2, 1]], 1.0),
        ([[1, 2]], [[3, 4]], 0.0),
    ],
)
def test_the_share_of_common_tokens(
    selection: TokenSelection, student: list[list[int]], teacher: list[list[int]], share: float
) -> None:
    assert set_overlap([scored(selection, student, teacher)]) == pytest.approx(share)


def test_one_sides_tokens_have_no_overlap() -> None:
    assert set_overlap([scored(TokenSelection.STUDENT_TOPK, [[1, 2]], [[2, 1]])]) is None
    assert set_overlap([]) is None
