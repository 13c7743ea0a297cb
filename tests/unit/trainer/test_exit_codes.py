"""Exit codes and final documents say the same."""

from __future__ import annotations

import pytest

from opd_api.progress import FinalDocument
from opd_api.vocabulary import FailureClass, Outcome
from opd_trainer.runner import exit_code_of


@pytest.mark.parametrize(
    ("outcome", "failure_class", "code"),
    [
        (Outcome.SUCCEEDED, None, 0),
        (Outcome.PREEMPTED, None, 75),
        (Outcome.FAILED, FailureClass.CONFIG, 64),
        (Outcome.FAILED, FailureClass.DATA, 65),
        (Outcome.FAILED, FailureClass.TEACHER, 69),
        (Outcome.FAILED, FailureClass.INTERNAL, 70),
        (Outcome.FAILED, FailureClass.STALL, 70),
        (Outcome.FAILED, FailureClass.INFRASTRUCTURE, 75),
    ],
)
def test_exit_codes_say_the_same_as_the_document(
    outcome: Outcome, failure_class: FailureClass | None, code: int
) -> None:
    assert exit_code_of(FinalDocument(attempt=1, outcome=outcome, failure_class=failure_class)) == code
