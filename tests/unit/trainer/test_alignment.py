"""Response token j stands at position P + j and is predicted at P - 1 + j."""

from __future__ import annotations

import pytest

from opd_trainer.alignment import AlignmentError, expected_rows, prediction_positions, response_rows, score_start


def test_rows_that_begin_at_the_start_position_are_exactly_the_response_after_the_boundary_row() -> None:
    sequence = list("PPPRR")
    rows = sequence[score_start(3) :]
    assert len(rows) == expected_rows(2)
    assert response_rows(rows, 2) == ["R", "R"]


def test_predictions_of_the_response_start_at_the_last_prompt_position() -> None:
    assert list(prediction_positions(3, 2)) == [2, 3]


def test_a_single_prompt_token_is_enough() -> None:
    assert score_start(1) == 0
    assert list(prediction_positions(1, 1)) == [0]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(AlignmentError):
        score_start(0)


@pytest.mark.parametrize("rows", [0, 1, 2, 4, 5])
def test_any_other_number_of_rows_is_an_error_and_never_cut_to_fit(rows: int) -> None:
    with pytest.raises(AlignmentError):
        response_rows([None] * rows, 2)
