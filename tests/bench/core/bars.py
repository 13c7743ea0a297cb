"""From measurements to a table and a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

CLOCKS = ("seconds", "cpu_seconds")

Measurements = dict[str, list[dict[str, float]]]
"""Contestant → its runs."""


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile); of a single value three times itself."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, middle, upper


def waiting_share(measured: Measurements) -> float:
    """Median over all runs: time that threads waited for a processor over the run's time."""
    return statistics.median(run["waited_seconds"] / run["seconds"] for runs in measured.values() for run in runs)


def table(case: str, measured: Measurements) -> str:
    """Markdown: time and memory, minimum/median/maximum, and the ratio of medians to ours with its spread."""
    ours = {key: [run[key] for run in measured[f"{case}/ours"]] for key in CLOCKS}
    lines = [
        f"\n### {case}\n",
        "| contestant | seconds min/median/max | forward | backward | processor seconds | peak MiB min/median/max | "
        "time against ours (quartiles) | processor time against ours |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, runs in measured.items():
        column = {key: [run[key] for run in runs] for key in runs[0]}
        forward, backward = (statistics.median(column[key]) for key in ("forward_seconds", "backward_seconds"))
        ratios = [_ratio(column[key], ours[key]) for key in CLOCKS]
        lines.append(
            f"| {name.partition('/')[2]} | {_spread(column['seconds'], '.2f')} | {forward:.2f} | {backward:.2f} | "
            f"{_spread(column['cpu_seconds'], '.2f')} | {_spread(column['peak_mib'], '.0f')} | {ratios[0]} | {ratios[1]} |"
        )
    return "\n".join(lines)


def check(case: str, measured: Measurements, bars: dict[str, Any], clock: str = "seconds") -> list[str]:
    """What was missed, in words, by one of the CLOCKS.

    Bars: `peak_mib` bounds our median peak. `not_slower_than` (a list) fails when we are slower than the fastest of these
    outside the spread, `faster_than` when we are not faster than each of these outside the spread. Outside the spread means
    that the quartile ranges do not touch.
    """
    seconds = {name.partition("/")[2]: [run[clock] for run in runs] for name, runs in measured.items()}
    ours = quartiles(seconds["ours"])
    missed = []
    peak = statistics.median(run["peak_mib"] for run in measured[f"{case}/ours"])
    if peak > bars["peak_mib"]:
        missed.append(f"{case}: peak {peak:.0f} MiB, the bar is {bars['peak_mib']}")
    if peers := bars.get("not_slower_than"):
        fastest = min(peers, key=lambda name: statistics.median(seconds[name]))
        if ours[0] > quartiles(seconds[fastest])[2]:
            missed.append(
                f"{case}: {ours[1]:.2f} s, slower than {fastest} at {statistics.median(seconds[fastest]):.2f} s"
            )
    missed += [
        f"{case}: {ours[1]:.2f} s, not faster than {name} at {statistics.median(seconds[name]):.2f} s"
        for name in bars.get("faster_than", [])
        if ours[2] >= quartiles(seconds[name])[0]
    ]
    return missed


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """Ratio of medians, and its range when both move within their quartiles."""
    their_low, their_middle, their_high = quartiles(theirs)
    low, middle, high = quartiles(ours)
    return f"{their_middle / middle:.2f} ({their_low / high:.2f}-{their_high / low:.2f})"


def _spread(values: Sequence[float], form: str) -> str:
    return "/".join(format(value, form) for value in (min(values), statistics.median(values), max(values)))
