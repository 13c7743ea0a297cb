"""From curves to a verdict. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Of a curve, in the order of its fields.
AXES = ("steps", "seconds", "cpu_seconds", "reverse_kl", "length")


@dataclass(frozen=True)
class Curve:
    """One training run as it is seen from outside; the first point is the untrained student at 0 seconds."""

    side: str
    learning_rate: float
    steps: Sequence[float]
    seconds: Sequence[float]
    cpu_seconds: Sequence[float]
    reverse_kl: Sequence[float]
    length: Sequence[float]

    def reach(self, level: float, axis: str) -> float | None:
        """Where on `axis` (steps, seconds, cpu_seconds) the KL first is at `level`; None: never.

        Between two points the KL decays exponentially: a chord would be late on both sides.
        """
        x = getattr(self, axis)
        for i in range(1, len(x)):
            before, after = self.reverse_kl[i - 1], self.reverse_kl[i]
            if after <= level:
                return x[i - 1] + (x[i] - x[i - 1]) * math.log(before / level) / math.log(before / after)
        return None


def mean(curves: Sequence[Curve]) -> Curve:
    """One curve of several runs that differ in their seed only; point by point."""

    def over(axis: str) -> list[float]:
        return [sum(values) / len(curves) for values in zip(*(getattr(curve, axis) for curve in curves), strict=True)]

    first = curves[0]
    return Curve(first.side, first.learning_rate, *(over(axis) for axis in AXES))


def best(curves: Sequence[Curve], share: float, clock: str) -> Curve | None:
    """The curve that is first at `share` of its start; None when none gets there."""
    reached = [(curve.reach(share * curve.reverse_kl[0], clock), curve) for curve in curves]
    there = [(when, curve) for when, curve in reached if when is not None]
    return min(there, key=lambda pair: pair[0])[1] if there else None


def check_signals(rows: Sequence[Mapping[str, Any]], bars: Mapping[str, Any]) -> list[str]:
    """What was missed: every signal ends at no more than `of_start` of the start, outside the noise of the measurement."""
    missed = []
    for row in rows:
        before, after = row["before"], row["after"]
        noise = (before["standard_error"] ** 2 + after["standard_error"] ** 2) ** 0.5
        if after["reverse_kl"] > bars["of_start"] * before["reverse_kl"]:
            missed.append(
                f"{row['name']}: {before['reverse_kl']:.3f} -> {after['reverse_kl']:.3f}, the bar is {bars['of_start']} of it"
            )
        elif before["reverse_kl"] - after["reverse_kl"] < 2 * noise:
            missed.append(f"{row['name']}: the fall is within the noise of the measurement")
    return missed


def check_against_peer(ours: Sequence[Curve], peer: Sequence[Curve], bars: Mapping[str, Any], clock: str) -> list[str]:
    """What was missed of the learning bar, by one of the clocks. Best of the learning rates on each side."""
    share = bars["of_start"]
    mine, theirs = best(ours, share, clock), best(peer, share, clock)
    if mine is None:
        return [f"ours never reaches {share} of the start"]
    missed = []
    change = abs(mine.length[-1] / mine.length[0] - 1)
    if change > bars["length_change"]:
        missed.append(f"ours: answers change by {change:.0%} in length, the bar is {bars['length_change']:.0%}")
    # A peer that does not get there in all its runs has not won by that: it needs at least the longest of them.
    there = [theirs] if theirs is not None else list(peer)
    level = share * there[0].reverse_kl[0]

    def needed(axis: str) -> float:
        return max(curve.reach(level, axis) or getattr(curve, axis)[-1] for curve in there)

    if needed("steps") < bars["peer_steps_at_least"]:
        missed.append(f"the recipe does not separate: the peer needs {needed('steps'):.1f} steps")
    ratio = mine.reach(share * mine.reverse_kl[0], clock) / needed(clock)
    if ratio > bars["of_peer"]:
        missed.append(f"ours needs {ratio:.2f} of the peer's {clock}, the bar is {bars['of_peer']}")
    return missed
