"""Curves of a run as inline SVG (matplotlib without its global state: a report is written beside a running trainer)."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from opd_trainer.report import records as names
from opd_trainer.report.reading import RunData

#: Okabe-Ito: distinguishable for everyone.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#000000")
INK, FAINT = "#3d4451", "#d9dde4"
#: Points of one curve; more do not show.
POINTS = 600
BARS = 60
#: Order of the parts of a step, from the axis up.
PHASES = ("rollout", "train", "publish", "checkpoint", "evaluate")
STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture with its heading and a sentence that says how to read it."""

    title: str
    reading: str
    svg: str


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric in a chart. `smooth`: raw values faint, their running mean strong."""

    metric: str
    label: str
    smooth: bool = False
    #: Held-out metric of the same quantity, drawn as points.
    held_out: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a chart shows; it is left out when none of its metrics was recorded."""

    key: str
    title: str
    reading: str
    unit: str
    curves: tuple[Curve, ...]
    from_zero: bool = True
    logarithmic: bool = False


PLANS = (
    Plan(
        "kl",
        "Reverse KL",
        "Mean of log student − log teacher over the student's own tokens. Falls towards 0 as the student learns.",
        "nats a token",
        (Curve(names.REVERSE_KL, "training batch", smooth=True, held_out=f"eval_{names.REVERSE_KL}"),),
    ),
    Plan(
        "loss",
        "Loss",
        "The number that is minimised. For the advantage signal its value says little; see the reverse KL.",
        "",
        (Curve(names.LOSS, "loss", smooth=True),),
        from_zero=False,
    ),
    Plan(
        "length",
        "Response length",
        "Mean tokens of a response. A sudden rise or fall is the first sign of a student that no longer ends.",
        "tokens",
        (Curve(names.RESPONSE_LENGTH, "training batch", smooth=True, held_out=f"eval_{names.RESPONSE_LENGTH}"),),
    ),
    Plan(
        "entropy",
        "Entropy",
        "Mean entropy of the student's next-token distribution. A fall to 0 means that it has stopped exploring.",
        "nats",
        (Curve(names.ENTROPY, "student", smooth=True),),
    ),
    Plan(
        "mass",
        "Mass and overlap of the token set",
        "Probability that student and teacher have on the compared tokens, and the share of tokens that both rank high.",
        "",
        (
            Curve(names.STUDENT_MASS, "student mass"),
            Curve(names.TEACHER_MASS, "teacher mass"),
            Curve(names.OVERLAP, "overlap"),
        ),
        from_zero=False,
    ),
    Plan(
        "reward",
        "Task reward",
        "Mean reward. With task.taskAdvWeight 0 it is only watched.",
        "",
        (Curve(names.REWARD, "training batch", smooth=True, held_out=f"eval_{names.REWARD}"),),
    ),
    Plan(
        "staleness",
        "Staleness",
        "Age of the trained samples in weight versions; never above rollout.maxStaleness.",
        "versions",
        (Curve(names.STALENESS, "mean"), Curve("staleness_max", "oldest")),
    ),
    Plan(
        "gradient",
        "Gradient norm",
        "Before clipping.",
        "",
        (Curve(names.GRADIENT_NORM, "norm", smooth=True),),
    ),
)


def charts(data: RunData) -> list[Chart]:
    """The charts whose metrics were recorded, in reading order; the time split last."""
    found = [Chart(plan.title, plan.reading, _draw_plan(plan, data)) for plan in PLANS if _recorded(plan, data)]
    time = _time_split(data)
    return [*found, time] if time is not None else found


def _recorded(plan: Plan, data: RunData) -> bool:
    return any(data.series(curve.metric)[0] or _held_out(data, curve)[0] for curve in plan.curves)


def group_chart(data: RunData, kind: str) -> str | None:
    """Reverse KL by data source or teacher over the steps; None with fewer than two of them. `kind`: source or teacher."""
    prefix = f"{names.REVERSE_KL}/{kind}/"
    metrics = [name for name in data.metric_names() if name.startswith(prefix)][: len(COLOURS)]
    if len(metrics) < 2:
        return None
    plan = Plan(f"by-{kind}", "", "", "nats a token", tuple(Curve(name, name.removeprefix(prefix)) for name in metrics))
    return _draw_plan(plan, data)


def _held_out(data: RunData, curve: Curve) -> tuple[list[int], list[float]]:
    return data.series(curve.held_out, evaluation=True) if curve.held_out else ([], [])


def _draw_plan(plan: Plan, data: RunData) -> str:
    with mpl.rc_context({**STYLE, "svg.hashsalt": plan.key}):
        figure, axes = _axes(plan.unit)
        for colour, curve in zip(COLOURS, plan.curves, strict=False):
            _draw_curve(axes, data, curve, colour)
        _mark_attempts(axes, data)
        if plan.from_zero:
            axes.set_ylim(*_from_zero(plan, data))
        _legend(axes)
        return _svg(figure)


def _from_zero(plan: Plan, data: RunData) -> tuple[float, float]:
    """Limits with zero inside and some room above; up to one where every value is zero."""
    curves = [*(data.series(curve.metric)[1] for curve in plan.curves), *(_held_out(data, c)[1] for c in plan.curves)]
    values = [value for curve in curves for value in curve]
    low, high = min(0.0, *values), max(0.0, *values)
    room = 0.06 * (high - low) or 1.0
    return (low - room if low < 0 else 0.0), high + room


def _draw_curve(axes: Axes, data: RunData, curve: Curve, colour: str) -> None:
    steps, values = thinned(*data.series(curve.metric))
    if curve.smooth and len(values) >= 8:
        axes.plot(steps, values, color=colour, alpha=0.28, linewidth=1)
        axes.plot(
            steps, running_mean(values, max(3, len(values) // 20)), color=colour, linewidth=1.8, label=curve.label
        )
    elif steps:
        axes.plot(
            steps,
            values,
            color=colour,
            linewidth=1.6,
            label=curve.label,
            marker="o" if len(steps) < 40 else None,
            markersize=3,
        )
    steps, values = _held_out(data, curve)
    if steps:
        axes.plot(steps, values, color=COLOURS[1], linewidth=1, marker="D", markersize=4.5, label="held-out prompts")


def _time_split(data: RunData) -> Chart | None:
    recorded = [name for name in data.metric_names() if name.startswith(names.SECONDS_PREFIX)]
    known = [f"{names.SECONDS_PREFIX}{phase}" for phase in PHASES]
    metrics = [*(name for name in known if name in recorded), *(name for name in recorded if name not in known)]
    if not metrics:
        return None
    steps = [record.step for record in data.steps]
    shown = max(1, -(-len(steps) // BARS))
    blocks = [data.steps[start : start + shown] for start in range(0, len(steps), shown)]
    with mpl.rc_context({**STYLE, "svg.hashsalt": "time"}):
        figure, axes = _axes("seconds a step")
        bottom = [0.0] * len(blocks)
        for colour, metric in zip(COLOURS, metrics, strict=False):
            heights = [sum(r.metrics.get(metric, 0.0) for r in block) / len(block) for block in blocks]
            label = metric.removeprefix(names.SECONDS_PREFIX)
            axes.bar([b[0].step for b in blocks], heights, width=0.85 * shown, bottom=bottom, color=colour, label=label)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        _legend(axes)
        return Chart("Where a step's time goes", "What the trainer waited for, in each step.", _svg(figure))


def _axes(unit: str) -> tuple[Figure, Axes]:
    # Fixed margins: a layout engine draws everything several times, and this runs beside a training.
    figure = Figure(figsize=(5.6, 2.7))
    axes = figure.add_axes((0.115, 0.155, 0.875, 0.82))
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.ticklabel_format(axis="y", scilimits=(-3, 4))
    axes.margins(x=0.02)
    return figure, axes


def _mark_attempts(axes: Axes, data: RunData) -> None:
    for before, after in zip(data.steps, data.steps[1:], strict=False):
        if after.attempt != before.attempt:
            axes.axvline(before.step + 0.5, color=INK, linewidth=0.8, linestyle=":", label=f"attempt {after.attempt}")


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        axes.legend(
            handles,
            labels,
            facecolor="white",
            edgecolor="none",
            framealpha=0.9,
            fontsize=8,
            labelcolor=INK,
            ncols=min(6, len(labels)),
            columnspacing=1.2,
            handlelength=1.4,
            loc="upper right",
        )
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.16 * (high - low))


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r'<svg ([^>]*?)width="[\d.]+pt" height="[\d.]+pt"|<svg ', r'<svg \1role="img" ', text, count=1)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values at each place; at the start of as many as there are."""
    result, total = [], 0.0
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        result.append(total / min(index + 1, window))
    return result


def thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """At most POINTS points: means over equal blocks, the last step at its place."""
    size = -(-len(steps) // POINTS)
    if size <= 1:
        return list(steps), list(values)
    blocks = [(steps[i : i + size], values[i : i + size]) for i in range(0, len(steps), size)]
    return [block[-1] for block, _ in blocks], [sum(block) / len(block) for _, block in blocks]
