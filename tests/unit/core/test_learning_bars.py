"""The learning benchmark's verdict: who is first at half of the start, and which bar is missed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_FILE = Path(__file__).parents[2] / "bench" / "learning" / "bars.py"
_BARS = {"of_start": 0.5, "of_peer": 0.7, "peer_steps_at_least": 10, "length_change": 0.2}


@pytest.fixture(scope="module")
def bars() -> ModuleType:
    spec = importlib.util.spec_from_file_location("learning_bars", _FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _curve(
    bars: ModuleType, kl: list[float], *, seconds: float = 10.0, steps: float = 4.0, length: float = 20.0
) -> Any:
    points = range(len(kl))
    return bars.Curve(
        side="side",
        learning_rate=1e-4,
        steps=[steps * i for i in points],
        seconds=[seconds * i for i in points],
        cpu_seconds=[2 * seconds * i for i in points],
        reverse_kl=kl,
        length=[20.0, *[length] * (len(kl) - 1)],
    )


def test_a_level_is_reached_between_two_points(bars: ModuleType) -> None:
    curve = _curve(bars, [3.0, 2.0, 0.5])
    assert curve.reach(1.0, "seconds") == pytest.approx(15.0)  # half-way from 2 to 1/2, by ratios
    assert curve.reach(1.0, "cpu_seconds") == pytest.approx(30.0)
    assert curve.reach(0.4, "seconds") is None


def test_the_best_learning_rate_is_the_first_at_the_level(bars: ModuleType) -> None:
    slow, fast, never = (_curve(bars, kl) for kl in ([2.0, 1.6, 1.0], [2.0, 1.0, 1.2], [2.0, 1.9, 1.8]))
    assert bars.best([slow, fast, never], 0.5, "seconds") is fast
    assert bars.best([never], 0.5, "seconds") is None


@pytest.mark.parametrize(
    ("ours", "peer", "complaints"),
    [
        ({"seconds": 6.0}, {}, []),
        ({"seconds": 9.0}, {}, ["0.90 of the peer's seconds"]),
        ({"seconds": 6.0, "length": 10.0}, {}, ["50% in length"]),
        ({"seconds": 6.0}, {"steps": 2.0}, ["does not separate"]),
    ],
)
def test_a_missed_learning_bar_is_named(bars: ModuleType, ours: dict, peer: dict, complaints: list[str]) -> None:
    falling = [2.0, 1.6, 1.2, 0.9]
    missed = bars.check_against_peer([_curve(bars, falling, **ours)], [_curve(bars, falling, **peer)], _BARS, "seconds")
    assert len(missed) == len(complaints)
    assert all(words in line for words, line in zip(complaints, missed, strict=True))


def test_a_peer_that_never_gets_there_needs_at_least_its_whole_run_and_we_must_get_there(bars: ModuleType) -> None:
    falling, flat = _curve(bars, [2.0, 0.9]), _curve(bars, [2.0, 1.9, 1.8, 1.7])
    assert bars.check_against_peer([falling], [flat], _BARS, "seconds") == []
    short = _curve(bars, [2.0, 1.9])
    [steps, ratio] = bars.check_against_peer([falling], [short], _BARS, "seconds")
    assert "the peer needs 4.0 steps" in steps
    assert "0.87 of the peer's seconds" in ratio
    assert bars.check_against_peer([flat], [falling], _BARS, "seconds") == ["ours never reaches 0.5 of the start"]


@pytest.mark.parametrize(("after", "missed"), [(0.5, 0), (0.99, 1), (1.4, 1)])
def test_a_signal_that_does_not_learn_is_named(bars: ModuleType, after: float, missed: int) -> None:
    row = {
        "name": "k1",
        "before": {"reverse_kl": 1.0, "standard_error": 0.05},
        "after": {"reverse_kl": after, "standard_error": 0.05},
    }
    assert len(bars.check_signals([row], {"of_start": 1.0})) == missed


def test_runs_that_differ_in_their_seed_become_one_curve(bars: ModuleType) -> None:
    one = bars.mean([_curve(bars, [4.0, 2.0], seconds=10), _curve(bars, [4.0, 1.0], seconds=30, length=10.0)])
    assert one.reverse_kl == [4.0, 1.5]
    assert one.seconds == [0.0, 20.0]
    assert one.cpu_seconds == [0.0, 40.0]
    assert one.length == [20.0, 15.0]
    assert (one.side, one.learning_rate) == ("side", 1e-4)
