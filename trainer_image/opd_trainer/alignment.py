"""Where the score of a response token stands. One place for clients, packing and loss.

P prompt tokens (positions 0..P-1) and R response tokens (positions P..P+R-1). A causal model predicts the token at
position i from the hidden state at position i-1, so response token j is predicted at position P-1+j. A server that is
asked to start at P-1 reports the tokens from P-1 on; the first of these rows has no score (its predecessor is not part
of the answer) and is dropped, which leaves exactly R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Row = TypeVar("Row")


class AlignmentError(ValueError):
    """The number of rows does not fit the number of response tokens."""


def score_start(prompt_length: int) -> int:
    """First position to report, so that the rows after the boundary row are the response. Raises AlignmentError for P = 0."""
    if prompt_length < 1:
        raise AlignmentError("an empty prompt has no position that predicts the first response token")
    return prompt_length - 1


def expected_rows(response_length: int) -> int:
    """Rows of an answer that starts at `score_start`: the boundary row and R response rows."""
    return response_length + 1


def prediction_positions(prompt_length: int, response_length: int) -> range:
    """Positions whose output predicts the response tokens, in the coordinates of prompt + response."""
    start = score_start(prompt_length)
    return range(start, start + response_length)


def response_rows(rows: Sequence[Row], response_length: int) -> Sequence[Row]:
    """The R rows of the response from rows that begin at `score_start`. Raises AlignmentError on any other count."""
    if len(rows) != expected_rows(response_length):
        raise AlignmentError(
            f"{len(rows)} rows for {response_length} response tokens; {expected_rows(response_length)} were expected"
        )
    return rows[1:]
