"""The few numbers that a person wants first."""

from __future__ import annotations

from dataclasses import dataclass

from opd_trainer.report import records as names
from opd_trainer.report.reading import RunData


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with what it was at the start."""

    label: str
    value: str
    note: str = ""
    #: good, bad or empty.
    tone: str = ""


def headline(data: RunData) -> list[Figure]:
    """Reverse KL before and after, reward, length, steps and time; what was not recorded is left out."""
    found = [item for item in (reverse_kl(data), _reward(data), _length(data)) if item is not None]
    summary = data.summary
    total = f" of {summary.total_steps}" if summary.total_steps else ""
    attempts = f"{summary.attempt} attempts" if summary.attempt > 1 else "1 attempt"
    found.append(Figure("Steps", f"{summary.step}{total}", attempts))
    if summary.updated > summary.started > 0:
        found.append(Figure("Time", duration(summary.updated - summary.started), "since the first attempt began"))
    return found


def reverse_kl(data: RunData) -> Figure | None:
    """Held-out where there are two evaluations, else means of the first and the last tenth of the training steps."""
    steps, values = data.series(f"{names.EVALUATION_PREFIX}{names.REVERSE_KL}", evaluation=True)
    if len(values) >= 2:
        first, last, where = values[0], values[-1], f"held-out prompts, steps {steps[0]} and {steps[-1]}"
    else:
        steps, values = data.series(names.REVERSE_KL)
        if not values:
            return None
        size = max(1, len(values) // 10)
        first, last = sum(values[:size]) / size, sum(values[-size:]) / size
        where = (
            f"training batches, first and last {size} steps" if size > 1 else "training batches, first and last step"
        )
    share = f", {last / first:.0%} of the start" if first > 0 and len(values) > 1 else ""
    tone = "" if len(values) < 2 else "good" if last < first else "bad"
    return Figure("Reverse KL", f"{first:.3f} → {last:.3f}", f"nats a token{share}; {where}", tone)


def _reward(data: RunData) -> Figure | None:
    steps, values = data.series(f"{names.EVALUATION_PREFIX}{names.REWARD}", evaluation=True)
    where = "held-out prompts"
    if len(values) < 2:
        steps, values = data.series(names.REWARD)
        where = "training batches"
    if not steps:
        return None
    return Figure("Task reward", f"{values[0]:.3f} → {values[-1]:.3f}", where)


def _length(data: RunData) -> Figure | None:
    _, values = data.series(names.RESPONSE_LENGTH)
    if not values:
        return None
    return Figure("Response length", f"{values[0]:.0f} → {values[-1]:.0f}", "tokens, mean of a batch")


def duration(seconds: float) -> str:
    """3 h 05 min, 12 min 30 s, 45 s."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
