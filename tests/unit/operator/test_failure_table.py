"""Every failure of the table (docs/failures.md) on the operator's decisions: the same fault again and again until the end."""

from __future__ import annotations

import pytest
from named_tests import problem_of
from opd_failures import FAILURES
from opd_failures.at_api import AT_API, AT_API_TEST
from opd_failures.play import ROUNDS, play
from opd_failures.row import Failure, Shown, Step, Then

from opd_api.v1alpha1 import Lifecycle
from opd_api.vocabulary import FailureClass, Reason

BACKOFF_LIMIT = Lifecycle().backoff_limit
TEACHER_DEADLINE = Lifecycle().teacher_ready_deadline_seconds
START_DEADLINE = Lifecycle().pre_running_deadline_seconds
#: What each class may lead to: design decisions, not observations.
ANSWERS = {
    FailureClass.CONFIG: {Then.FAILS, Then.WAITS, Then.HOLDS},
    FailureClass.DATA: {Then.FAILS},
    FailureClass.TEACHER: {Then.RESTARTS, Then.WAITS, Then.HOLDS},
    FailureClass.INFRASTRUCTURE: {Then.RETRIES, Then.RETRIES_STEP},
    FailureClass.CAPACITY: {Then.WAITS, Then.RELEASES, Then.HOLDS},
    FailureClass.INTERNAL: {Then.ONCE, Then.FAILS},
    FailureClass.DEADLINE: {Then.FAILS, Then.WAITS},
    FailureClass.STALL: {Then.ONCE},
    None: {Then.NOT_COUNTED},
}
#: Words of jobs that are well, of steps on the way, and of answers to failures. Every other reason is a row of the table.
NO_FAILURE = {
    Reason.RECEIVED,
    Reason.ACCEPTED,
    Reason.CHECK_PASSED,
    Reason.CHECK_DISABLED,
    Reason.PROBE_PASSED,
    Reason.TEACHERS_READY,
    Reason.TEACHERS_RELEASED,
    Reason.RAY_JOB_CREATED,
    Reason.TRAINING_RUNNING,
    Reason.EXPORTING,
    Reason.CHECKPOINT_SAVED,
    Reason.SUSPEND_REQUESTED,
    Reason.SUSPENDED,
    Reason.RESUMED,
    Reason.ATTEMPT_STARTED,
    Reason.SUCCEEDED,
    Reason.HOLDING,
    Reason.RELEASING,
    Reason.KEPT_FOR_INSPECTION,
    Reason.CHANGE_DEFERRED,
    # A finding that the job may run with.
    Reason.RESPONSE_CAP_SHORT,
    # The event that tells of a status that the API server refuses; the job goes on.
    Reason.STATUS_REFUSED,
    # The event that tells of a failed attempt; its reason is the attempt's.
    Reason.ATTEMPT_FAILED,
}


@pytest.fixture(scope="module")
def shown() -> dict[str, Shown]:
    return {}


def show(failure: Failure, shown: dict[str, Shown]) -> Shown:
    """Each failure is run once for all tests."""
    if failure.id not in shown:
        shown[failure.id] = play(failure)
    return shown[failure.id]


def ids(failure: Failure) -> str:
    return failure.id


@pytest.mark.parametrize("failure", FAILURES, ids=ids)
def test_a_failure_has_its_class_its_reason_and_a_hint(failure: Failure, shown: dict[str, Shown]) -> None:
    seen = show(failure, shown)
    assert (seen.failure_class, seen.reason) == (failure.failure_class, failure.reason)
    assert seen.hint.endswith((".", "?")) or failure.no_hint
    assert seen.reason in {*seen.reasons, seen.end}, "the reason was never told"


@pytest.mark.parametrize("failure", FAILURES, ids=ids)
def test_a_failure_is_answered_as_its_class_says(failure: Failure, shown: dict[str, Shown]) -> None:
    assert failure.then in ANSWERS[failure.failure_class]
    seen = show(failure, shown)
    begun = failure.step in (Step.STUDENT, Step.TRAINING)
    expected = {
        Then.FAILS: (int(begun), 0, True),
        Then.RETRIES: (BACKOFF_LIMIT + 1, BACKOFF_LIMIT, True),
        Then.RETRIES_STEP: (0, BACKOFF_LIMIT, True),
        Then.ONCE: (2, 1, True),
        Then.RESTARTS: (2 * begun, 1, True),
        Then.WAITS: (int(begun), seen.repeats, True),
        Then.RELEASES: (ROUNDS, ROUNDS - 1, False),
        Then.NOT_COUNTED: (seen.attempts, ROUNDS - 1, False),
        Then.HOLDS: (int(begun), 0, False),
    }[failure.then]
    assert (seen.attempts, seen.repeats, seen.failed) == expected
    assert seen.teacher_restarts == (failure.then is Then.RESTARTS)
    if failure.then is Then.WAITS:
        assert seen.seconds == (TEACHER_DEADLINE if failure.step in (Step.TEACHERS, Step.PROBE) else START_DEADLINE)
    if failure.then is Then.RETRIES:
        assert seen.end == Reason.BACKOFF_LIMIT_EXCEEDED


@pytest.mark.parametrize("failure", FAILURES, ids=ids)
def test_a_failure_leaves_nothing_behind(failure: Failure, shown: dict[str, Shown]) -> None:
    assert show(failure, shown).left == ()


@pytest.mark.parametrize("failure", FAILURES, ids=ids)
def test_the_tests_that_a_row_names_exist(failure: Failure) -> None:
    assert [problem for proof in failure.proofs if (problem := problem_of(proof))] == []


def test_what_is_done_at_the_api_server_is_in_the_table() -> None:
    assert set(AT_API) <= {failure.id for failure in FAILURES}
    assert problem_of(AT_API_TEST) == ""


def test_rows_have_names_of_their_own() -> None:
    assert len({failure.id for failure in FAILURES}) == len(FAILURES)


def test_every_class_has_a_row() -> None:
    assert {failure.failure_class for failure in FAILURES} >= set(FailureClass)


def test_every_reason_that_tells_of_a_failure_is_in_the_table(shown: dict[str, Shown]) -> None:
    told = {reason for failure in FAILURES for reason in (failure.reason, *show(failure, shown).reasons)}
    assert set(Reason) - told - NO_FAILURE == set(), "no row shows them"


def test_no_row_is_about_a_word_that_is_no_failure() -> None:
    assert {failure.reason for failure in FAILURES} & NO_FAILURE == set()


def test_a_named_test_that_is_not_there_is_noticed() -> None:
    here = "tests/unit/operator/test_failure_table.py"
    assert problem_of(f"{here}::test_every_class_has_a_row") == ""
    assert "no such test" in problem_of(f"{here}::test_of_tomorrow")
    assert "there is no" in problem_of("tests/unit/operator/test_of_tomorrow.py::test_x")
    assert "no case" in problem_of(f"{here}::test_every_class_has_a_row[somewhere " + "else]")
