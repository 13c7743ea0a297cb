"""From figures to verdicts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """One figure beside its bar. `at_least_x` bounds x from below, `x` from above."""

    case: str
    name: str
    value: float
    bar: float
    below: bool

    @property
    def reached(self) -> bool:
        """Whether the bar is reached."""
        return self.value >= self.bar if self.below else self.value <= self.bar

    def __str__(self) -> str:
        word = "at least" if self.below else "at most"
        end = "reached" if self.reached else "MISSED"
        return f"{self.case}: {self.name} {self.value:.3g}, bar {word} {self.bar:g}: {end}"


def judge(case: str, measured: Mapping[str, Any], bars: Mapping[str, float]) -> list[Verdict]:
    """A verdict for each bar of a case. Raises KeyError for a bar whose figure was not measured."""
    found = []
    for key, bar in bars.items():
        name = key.removeprefix("at_least_")
        found.append(Verdict(case, name, float(measured[name]), bar, below=key != name))
    return found
