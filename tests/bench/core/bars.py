"""From measurements to a table and a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Measurements = dict[str, list[dict[str, float]]]
"""Contestant → its runs."""


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile); of a single value three times itself."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, middle, upper


def table(case: str, measured: Measurements) -> str:
    """Markdown: time and memory, minimum/median/maximum, and the ratio of medians to ours with its spread."""
    ours = _ours(case, measured)
    lines = [
        f"\n### {case}\n",
        "| contestant | seconds min/median/max | forward | backward | peak MiB min/median/max | time against ours (quartiles) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, runs in measured.items():
        seconds, peaks = ([run[key] for run in runs] for key in ("seconds", "peak_mib"))
        forward, backward = (
            statistics.median(run[key] for run in runs) for key in ("forward_seconds", "backward_seconds")
        )
        low, ratio, high = _ratio(seconds, ours)
        lines.append(
            f"| {name.partition('/')[2]} | {_spread(seconds, '.2f')} | {forward:.2f} | {backward:.2f} | {_spread(peaks, '.0f')} | "
            f"{ratio:.2f} ({low:.2f}-{high:.2f}) |"
        )
    return "\n".join(lines)


def check(case: str, measured: Measurements, bars: dict[str, Any]) -> list[str]:
    """What was missed, in words.

    Bars: `peak_mib` bounds our median peak. `not_slower_than` (a list) fails when we are slower than the fastest of these
    outside the spread, `faster_than` when we are not faster than each of these outside the spread. Outside the spread means
    that the quartile ranges do not touch.
    """
    seconds = {name.partition("/")[2]: [run["seconds"] for run in runs] for name, runs in measured.items()}
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


def _ours(case: str, measured: Measurements) -> list[float]:
    return [run["seconds"] for run in measured[f"{case}/ours"]]


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """Ratio of medians, and its range when both move within their quartiles."""
    their_low, their_middle, their_high = quartiles(theirs)
    low, middle, high = quartiles(ours)
    return their_low / high, their_middle / middle, their_high / low


def _spread(values: Sequence[float], form: str) -> str:
    return "/".join(format(value, form) for value in (min(values), statistics.median(values), max(values)))
