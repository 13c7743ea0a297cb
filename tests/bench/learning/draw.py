"""`draw.py '{"what": "signals" | "trl"}'`: pictures and generated blocks of docs/experiments.md from results/ (trainer environment)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import recipe
import yaml
from bars import Curve, best
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PAGE = recipe.ROOT / "docs/experiments.md"
IMAGES = recipe.ROOT / "docs/images"
#: Okabe-Ito: distinguishable for everyone.
BLUE, ORANGE, GREEN, AMBER, INK, FAINT = "#0072b2", "#d55e00", "#009e73", "#e69f00", "#3d4451", "#d9dde4"
STYLE = {
    "svg.fonttype": "path",
    "svg.hashsalt": "experiments",
    "font.size": 9,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
}


# --- signals ----------------------------------------------------------------------------------------------------------
def draw_signals(rows: dict[str, Any]) -> None:
    """Left: every signal's fall of the reverse KL. Right: where the pairs that go elsewhere go."""
    pairs = rows["elsewhere"]
    signals = [row | {"name": name} for name, row in rows.items() if name != "elsewhere"]
    signals.sort(key=lambda row: row["after"]["reverse_kl"], reverse=True)
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1])
    for place, row in enumerate(signals):
        start, end = row["before"]["reverse_kl"], row["after"]["reverse_kl"]
        left.plot([start, end], [place, place], color=FAINT, linewidth=3, zorder=1)
        left.errorbar(end, place, xerr=2 * row["after"]["standard_error"], color=BLUE, fmt="o", markersize=5, capsize=2)
        left.plot(start, place, "o", color=INK, markersize=5)
        left.annotate(
            f"{end:.2f}", (end, place), (0, 6), textcoords="offset points", ha="center", color=BLUE, fontsize=8
        )
    left.set_yticks(range(len(signals)), [row["name"] for row in signals])
    left.set_ylim(-0.6, len(signals) - 0.2)
    left.set_xlim(0, None)
    left.set_xlabel("KL(student ‖ teacher) on held-out prompts, nats a token")
    steps = signals[0]["steps"]
    left.annotate(f"{start:.2f}", (start, place), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    left.set_title(f"SmolLM2-135M, {steps} steps: before (dark)\nand after (blue, ±2 standard errors)")
    _draw_pairs(right, pairs)
    _save(figure, "experiments-signals")


def _draw_pairs(axes: Axes, pairs: list[dict[str, Any]]) -> None:
    steps = len(pairs[0]["curve"]) - 1
    labels = []
    for pair in pairs:
        colour = GREEN if pair["expected"] < 0.05 else ORANGE
        axes.plot(range(steps + 1), pair["curve"], color=colour, linewidth=1.2, alpha=0.9)
        axes.plot(steps, pair["expected"], "o", color=colour, markersize=4, markerfacecolor="white")
        labels.append((pair["curve"][-1], pair["name"], colour))
    _label_ends(axes, steps, labels)
    axes.set_xlim(0, steps)
    axes.set_ylim(0, None)
    axes.set_xlabel("steps of descent on sampled tokens")
    axes.set_ylabel("KL(student ‖ teacher), nats")
    axes.set_title(
        "Eight tokens: seen (lines) and expected (circles);\ngreen pairs go to the teacher, orange ones elsewhere"
    )


def _label_ends(axes: Axes, x: float, labels: Sequence[tuple[float, str, str]], gap: float = 0.045) -> None:
    """Names right of the lines' ends, pushed apart so that none covers another."""
    labels = sorted(labels)
    places = [value for value, _, _ in labels]
    for _ in range(500):
        places[0] = max(places[0], 0.0)
        for lower in range(len(places) - 1):
            excess = gap - (places[lower + 1] - places[lower])
            if excess > 0:
                places[lower] -= excess / 2
                places[lower + 1] += excess / 2
    for place, (value, name, colour) in zip(places, labels, strict=True):
        axes.annotate(
            name,
            (x, value),
            (1.06 * x, place),
            textcoords="data",
            va="center",
            fontsize=7.5,
            color=colour,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.5, "shrinkB": 3},
        )


def signals_table(rows: dict[str, Any]) -> str:
    """Markdown: before, after, their share, and the answers' length."""
    lines = [
        "| signal | the job's `distillation` | KL before | KL after | of the start | answer tokens before → after |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        if name == "elsewhere":
            continue
        before, after = row["before"], row["after"]
        options = ", ".join(f"{key}: {value}" for key, value in row["distillation"].items())
        lines.append(
            f"| {name} | `{options}` | {_with_error(before)} | {_with_error(after)} | "
            f"{after['reverse_kl'] / before['reverse_kl']:.0%} | {before['length']:.1f} → {after['length']:.1f} |"
        )
    return "\n".join(lines)


def elsewhere_table(rows: dict[str, Any]) -> str:
    """Markdown: where each pair should end and where it did."""
    lines = ["| pair | KL at the start | the page says | seen |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {pair['name']} | {pair['start']:.2f} | {pair['expected']:.2f} | {pair['seen']:.2f} |"
        for pair in rows["elsewhere"]
    ]
    return "\n".join(lines)


def _with_error(measured: dict[str, float]) -> str:
    return f"{measured['reverse_kl']:.3f} ± {measured['standard_error']:.3f}"


# --- against TRL --------------------------------------------------------------------------------------------------------
def draw_trl(rows: dict[str, Any]) -> None:
    """All curves over processor and wall time; the best of each side strong, with its name."""
    bars = yaml.safe_load(recipe.BARS.read_text())["learning"]["trl"]
    curves = [Curve(**row["curve"]) for row in rows.values()]
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    clocks = {"cpu_seconds": "processor seconds of training", "seconds": "wall seconds of training"}
    for axes, (clock, label) in zip(figure.subplots(1, 2), clocks.items(), strict=True):
        _draw_curves(axes, curves, clock, bars["of_start"])
        axes.set_xlabel(label)
    _save(figure, "experiments-trl")


def _draw_curves(axes: Axes, curves: list[Curve], clock: str, share: float) -> None:
    level = share * curves[0].reverse_kl[0]
    axes.axhline(level, color=INK, linewidth=0.8, linestyle=":")
    sides = dict.fromkeys(curve.side for curve in curves)
    for number, (side, colour) in enumerate(zip(sides, (ORANGE, BLUE, AMBER)[: len(sides)], strict=True)):
        own = [curve for curve in curves if curve.side == side]
        winner = best(own, share, clock) or min(own, key=lambda curve: curve.reverse_kl[-1])
        for curve in own:
            strong = curve is winner
            axes.plot(
                getattr(curve, clock),
                curve.reverse_kl,
                color=colour,
                alpha=1 if strong else 0.3,
                linewidth=2 if strong else 1,
                marker="o",
                markersize=4 if strong else 2,
            )
        when = winner.reach(level, clock)
        name = f"{side}, {winner.learning_rate:g}" + ("" if when is None else f": {when:.0f} s")
        # In a corner: the lines end close to each other.
        place = 0.97 - 0.07 * number
        axes.text(0.98, place, name, transform=axes.transAxes, ha="right", va="top", color=colour, weight="bold")
    axes.annotate(
        f"{share:.0%} of the start",
        (1, level),
        (-4, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=8,
    )
    axes.set_xlim(0, None)
    axes.set_ylim(0, None)
    axes.set_ylabel("KL(student ‖ teacher) on held-out prompts, nats a token")
    rates = len({curve.learning_rate for curve in curves})
    axes.set_title(f"Best of {rates} learning rates each (strong)" if rates > 1 else "One learning rate each")


def trl_table(rows: dict[str, Any]) -> str:
    """Markdown: every run, and when it was at the level."""
    share = yaml.safe_load(recipe.BARS.read_text())["learning"]["trl"]["of_start"]
    lines = [
        f"| side | learning rate | steps to {share:.0%} | wall seconds to it | processor seconds to it | "
        "processor seconds a step | KL at the end | answer tokens start → end |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    # Not as they were measured: the highest rate first, the sides side by side.
    curves = sorted((Curve(**row["curve"]) for row in rows.values()), key=lambda item: (-item.learning_rate, item.side))
    for curve in curves:
        level = share * curve.reverse_kl[0]
        reached = [curve.reach(level, axis) for axis in ("steps", "seconds", "cpu_seconds")]
        cells = [
            "–" if value is None else f"{value:.{digits}f}" for value, digits in zip(reached, (1, 0, 0), strict=True)
        ]
        lines.append(
            f"| {curve.side} | {curve.learning_rate:g} | {' | '.join(cells)} | {curve.cpu_seconds[-1] / curve.steps[-1]:.1f} | "
            f"{curve.reverse_kl[-1]:.2f} | {curve.length[0]:.1f} → {curve.length[-1]:.1f} |"
        )
    return "\n".join(lines)


def _save(figure: Figure, name: str) -> None:
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})


def fill(page: str, name: str, text: str) -> str:
    """The page with one generated block replaced."""
    page, count = re.subn(
        rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{text}\n{m[2]}", page, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"{PAGE.name} must hold the block {name!r} once, it does {count} times")
    return page


def main() -> None:
    what = json.loads(sys.argv[1])["what"]
    rows = recipe.Results(what).rows
    blocks = {"signals": (signals_table, elsewhere_table), "trl": (trl_table,)}[what]
    with mpl.rc_context(STYLE):
        {"signals": draw_signals, "trl": draw_trl}[what](rows)
    page = PAGE.read_text()
    for block in blocks:
        page = fill(page, block.__name__.removesuffix("_table"), block(rows))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
