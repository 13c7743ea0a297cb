"""The benchmark's verdict: a missed bar is named, and the spread of a busy machine is not a miss."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

_FILE = Path(__file__).parents[2] / "bench" / "core" / "bars.py"


@pytest.fixture(scope="module")
def bars() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_bars", _FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _runs(seconds: list[float], peak: float) -> list[dict[str, float]]:
    return [
        {
            "seconds": value,
            "forward_seconds": value / 2,
            "backward_seconds": value / 2,
            "cpu_seconds": 2 * value,
            "peak_mib": peak,
        }
        for value in seconds
    ]


@pytest.mark.parametrize(
    ("ours", "peak", "complaints"),
    [
        ([1.0, 1.0, 1.1], 200, []),
        ([1.0, 1.0, 1.1], 301, ["peak 301 MiB"]),
        ([2.0, 2.6, 3.4], 200, ["not faster than slow"]),  # quartiles touch those of the slow peer
        ([5.0, 5.0, 5.1], 200, ["slower than quick", "not faster than slow"]),
    ],
)
def test_a_missed_bar_is_named(bars: ModuleType, ours: list[float], peak: float, complaints: list[str]) -> None:
    measured = {
        "case/ours": _runs(ours, peak),
        "case/quick": _runs([1.5, 2.0, 2.9], 500),
        "case/slow": _runs([2.8, 3.0, 3.2], 500),
    }
    rules = {"peak_mib": 300, "not_slower_than": ["quick", "slow"], "faster_than": ["slow"]}
    missed = bars.check("case", measured, rules)
    assert len(missed) == len(complaints)
    assert all(words in line for words, line in zip(complaints, missed, strict=True))


def test_the_table_has_a_row_per_contestant(bars: ModuleType) -> None:
    text = bars.table("case", {"case/ours": _runs([1.0], 200), "case/peer": _runs([2.0], 500)})
    assert "| ours | 1.00/1.00/1.00 |" in text
    assert "500/500/500 | 2.00 (2.00-2.00) | 2.00 (2.00-2.00) |" in text


def test_a_busy_machine_is_judged_by_processor_time(bars: ModuleType) -> None:
    measured = {"case/ours": _runs([3.0], 200), "case/peer": _runs([2.0], 500)}
    measured["case/peer"][0]["cpu_seconds"] = 7.0
    rules = {"peak_mib": 300, "not_slower_than": ["peer"]}
    assert bars.check("case", measured, rules) == ["case: 3.00 s, slower than peer at 2.00 s"]
    assert not bars.check("case", measured, rules, "cpu_seconds")


def test_a_run_counts_as_disturbed_when_its_threads_waited_for_a_processor(bars: ModuleType) -> None:
    measured = {"case/ours": _runs([2.0, 2.0], 200), "case/peer": _runs([1.0], 500)}
    for runs in measured.values():
        for run in runs:
            run["waited_seconds"] = 0.5
    assert bars.waiting_share(measured) == 0.25
