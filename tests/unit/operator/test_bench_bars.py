"""The operator benchmark's verdicts, and the figures that they judge."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

_FOLDER = Path(__file__).parents[2] / "bench" / "operator"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"operator_bench_{name}", _FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bars() -> ModuleType:
    return _load("bars")


@pytest.fixture(scope="module")
def stage() -> ModuleType:
    return _load("stage")


@pytest.mark.parametrize(
    ("bar", "value", "reached"),
    [
        ({"p99_seconds": 2}, 2.0, True),
        ({"p99_seconds": 2}, 2.01, False),
        ({"at_least_p99_seconds": 0.7}, 0.7, True),
        ({"at_least_p99_seconds": 0.7}, 0.69, False),
        ({"p99_seconds": 0}, 1, False),
    ],
)
def test_a_bar_is_a_limit_from_above_unless_it_says_at_least(
    bars: ModuleType, bar: dict[str, float], value: float, reached: bool
) -> None:
    (verdict,) = bars.judge("apply", {"p99_seconds": value, "other": 9}, bar)
    assert verdict.reached is reached
    assert ("MISSED" in str(verdict)) is not reached


def test_a_bar_without_a_figure_is_an_error_and_no_success(bars: ModuleType) -> None:
    with pytest.raises(KeyError):
        bars.judge("apply", {}, {"p99_seconds": 2})


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (30, 30), (100, 99), (200, 198)])
def test_the_99th_percentile_of_few_values_is_their_largest(stage: ModuleType, count: int, expected: int) -> None:
    assert stage.percentile(list(range(1, count + 1)), 0.99) == expected


async def test_no_more_than_the_limit_is_under_way(stage: ModuleType) -> None:
    alive, most, done = 0, 0, []

    async def each(name: str) -> None:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        await asyncio.sleep(0)
        alive -= 1
        done.append(name)

    names = [str(number) for number in range(20)]
    await stage.together(names, each, 3)
    assert sorted(done) == sorted(names)
    assert most == 3
