"""The schedules of `make chaos`: the same for ever from the same seed, and varied over many."""

from __future__ import annotations

from collections import Counter

import pytest
from opd_chaos.schedule import LIVES, ROUNDS_PER_REAL_KILL, STUDENT_FAULTS, document, make_round

from opd_api.rules import check_document

ROUNDS = [make_round(seed) for seed in range(100)]
ALL = [life for plan in ROUNDS for life in plan.lives]


def test_a_seed_is_a_schedule() -> None:
    assert make_round(7) == ROUNDS[7]
    assert make_round(8) != ROUNDS[7]


def test_a_hundred_rounds_in_a_row_are_two_thousand_lives_a_hundred_of_them_under_real_kills() -> None:
    assert len(ALL) == 2000
    killed = [plan for plan in ROUNDS if plan.processes]
    assert len(killed) * LIVES == 100 == 100 // ROUNDS_PER_REAL_KILL * LIVES
    assert all(death.manner == "crash" for plan in killed for row in plan.deaths for death in row)
    assert all(plan.deaths[0] for plan in killed)


def test_everything_that_can_happen_happens() -> None:
    faults = Counter(attempt.fault for life in ALL for attempt in life.attempts)
    assert set(STUDENT_FAULTS) <= set(faults)
    actions = Counter(action.what for life in ALL for action in life.actions)
    assert {"suspend", "delete", "recreate", "edit", "delete teacher", "delete pod", "annotate"} <= set(actions)
    assert {plan.mood.share for plan in ROUNDS} == {0.0, 0.05, 0.1, 0.2}
    assert {len(plan.deaths) for plan in ROUNDS} == {1, 2}
    assert 200 < sum(life.calm for life in ALL) < 1000


def test_a_calm_life_has_all_the_time_it_needs() -> None:
    for life in ALL:
        deadlines = document(life, "team")["spec"]["lifecycle"]
        names = (
            "teacherReadyDeadlineSeconds",
            "preRunningDeadlineSeconds",
            "stallTimeoutSeconds",
            "heartbeatTimeoutSeconds",
        )
        if life.calm:
            assert all(deadlines[name] >= 600 for name in names), life
            assert "activeDeadlineSeconds" not in deadlines


@pytest.mark.parametrize("plan", ROUNDS[::10], ids=lambda plan: f"seed {plan.seed}")
def test_every_life_is_an_opdjob_without_a_broken_rule(plan: object) -> None:
    for life in plan.lives:  # type: ignore[attr-defined]
        job, findings = check_document(document(life, "team"))
        assert job is not None
        assert not [finding for finding in findings if finding.severity == "Error"], life
