"""Health of an engine replica: a restarted one serves only after it has loaded the weights of the moment."""

from __future__ import annotations

from opd_trainer.rollout.engines.health import (
    PROBE_STRIKES,
    REQUEST_STRIKES,
    RESTART_BUDGET,
    RESTART_WINDOW_SECONDS,
    Health,
    ReplicaHealth,
)


def healthy() -> ReplicaHealth:
    return ReplicaHealth().started().loaded(3, current=3)


def test_a_started_replica_is_stale_until_it_has_the_current_weights() -> None:
    started = ReplicaHealth().started()
    assert started.state is Health.STALE
    assert not started.probe_passed().serves, "answering probes is no proof of current weights"
    assert not started.request_passed().serves
    assert not started.loaded(2, current=3).serves
    assert started.loaded(3, current=3).state is Health.HEALTHY


def test_newer_weights_make_a_serving_replica_stale() -> None:
    assert healthy().outdated().state is Health.STALE
    assert healthy().outdated().loaded(4, current=4).state is Health.HEALTHY


def test_one_failed_probe_makes_suspect_and_three_make_dead() -> None:
    health = healthy()
    for strike in range(1, PROBE_STRIKES + 1):
        health = health.probe_failed()
        assert health.state is (Health.DEAD if strike == PROBE_STRIKES else Health.SUSPECT)


def test_passed_probes_forget_failed_ones() -> None:
    health = healthy()
    for _ in range(10):
        health = health.probe_failed().probe_passed()
    assert health.state is Health.HEALTHY


def test_a_wedged_engine_that_answers_probes_dies_of_its_failed_requests() -> None:
    health = healthy()
    for _ in range(REQUEST_STRIKES):
        health = health.request_failed().probe_passed()
    assert health.state is Health.DEAD


def test_a_response_is_the_best_proof_of_health() -> None:
    assert healthy().request_failed().request_passed() == healthy()


def test_late_news_do_not_wake_the_dead() -> None:
    dead = healthy().died()
    assert dead.loaded(3, current=3).state is Health.DEAD
    assert dead.probe_passed().state is Health.DEAD
    assert dead.request_passed().state is Health.DEAD


def test_the_restart_budget_counts_within_a_window() -> None:
    health = healthy()
    for moment in range(RESTART_BUDGET):
        assert health.may_restart(float(moment))
        health = health.restarting(float(moment))
    assert not health.may_restart(float(RESTART_BUDGET))
    assert health.may_restart(RESTART_WINDOW_SECONDS + 1)
