"""When failed samples end the run."""

from __future__ import annotations

import pytest

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.controller.failures import FailureBook
from opd_trainer.errors import Failure, TrainerError

DATA = Failure(FailureClass.DATA, Reason.DATA_ERROR, "no tokens")
TEACHER = Failure(FailureClass.TEACHER, Reason.TEACHER_ERROR, "HTTP 500", "big")


def test_a_single_failure_in_a_small_run_is_no_verdict() -> None:
    book = FailureBook(max_fraction=0.05, batch_samples=4)
    book.failure(DATA)
    with pytest.raises(TrainerError):
        book.failure(DATA)


def test_no_tolerance_means_no_failure_at_all() -> None:
    with pytest.raises(TrainerError):
        FailureBook(max_fraction=0.0, batch_samples=4).failure(DATA)


def test_a_teacher_that_goes_bad_late_is_noticed_within_a_batch() -> None:
    book = FailureBook(max_fraction=0.05, batch_samples=100)
    for _ in range(100_000):
        book.success()
    with pytest.raises(TrainerError) as error:
        for _ in range(100):
            book.failure(TEACHER)
    assert error.value.failure.failure_class is FailureClass.TEACHER
    assert error.value.failure.teacher == "big"


def test_old_failures_leave_the_window() -> None:
    book = FailureBook(max_fraction=0.1, batch_samples=5)
    for _ in range(200):
        book.failure(DATA)
        for _ in range(19):
            book.success()
    assert book.total[FailureClass.DATA] == 200


def test_mixed_failures_get_the_class_of_the_majority() -> None:
    book = FailureBook(max_fraction=0.15, batch_samples=4)
    with pytest.raises(TrainerError, match=r"HTTP 500|no tokens") as error:
        for failure in (DATA, TEACHER, DATA, DATA):
            book.failure(failure)
    assert error.value.failure.failure_class is FailureClass.DATA
