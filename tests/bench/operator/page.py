"""Results of the cases on disk, and docs/scale.md from them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from bars import judge

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
RESULTS = HERE / "results"
PAGE = ROOT / "docs" / "scale.md"
BARS = ROOT / "tests" / "bench" / "bars.yaml"
#: Load of a core from which others wait for it. Each case makes about two by itself.
BUSY = 2.0
Measured = dict[str, Any]


def save(case: str, measured: Measured, folder: Path) -> None:
    """Keeps the figures of a case, with the load of the machine at its end."""
    folder.mkdir(exist_ok=True)
    kept = {**measured, "load_average": round(os.getloadavg()[0], 1), "cores": os.cpu_count()}
    (folder / f"{case}.json").write_text(json.dumps(kept, indent=1) + "\n")


def load() -> dict[str, Measured]:
    """Kept figures by case."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}


def verdicts(cases: dict[str, Measured]) -> str:
    """Every bar."""
    bars = yaml.safe_load(BARS.read_text())["operator"]
    lines = ["| case | figure | bar | measured | | load of the machine |", "| --- | --- | --- | --- | --- | --- |"]
    for case, found in bars.items():
        if case not in cases:
            lines.append(f"| {case} | | | not measured | | |")
            continue
        for verdict in judge(case, cases[case], found):
            word = "at least" if verdict.below else "at most"
            end = "reached" if verdict.reached else "**missed**"
            load = f"{cases[case]['load_average']:g} on {cases[case]['cores']} cores"
            name = verdict.name.replace("_", " ")
            lines.append(f"| {case} | {name} | {word} {verdict.bar:g} | {_number(verdict.value)} | {end} | {load} |")
    busy = [case for case in bars if case in cases and cases[case]["load_average"] > BUSY * cases[case]["cores"]]
    if busy:
        lines += [
            "",
            f"The machine was busy with other work during {', '.join(busy)}: times and rates of these say nothing",
        ]
        lines[-1] += " about the operator, and a run on a free machine is to replace them."
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def figures(cases: dict[str, Measured]) -> str:
    """Every number of every case."""
    lines = ["| case | figures |", "| --- | --- |"]
    for case, measured in cases.items():
        plain = [
            f"{key.replace('_', ' ')} {_number(value)}"
            for key, value in measured.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        lines.append(f"| {case} | {'; '.join(plain)} |")
    return "\n".join(lines)


def profile(cases: dict[str, Measured]) -> str:
    """The functions with the most time of their own."""
    if "profile" not in cases:
        return "not measured"
    measured = cases["profile"]
    lines = [
        f"{measured['passes']:.0f} passes of {measured['passes_a_job']:.1f} a job: {measured['own_milliseconds_a_pass']:.1f} ms "
        f"of the processor a pass under the profiler, with {measured['calls_a_pass']:.2f} calls to the API server.",
        "",
        "| function | calls a pass | own µs a pass | with callees | share |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in measured["rows"]:
        lines.append(
            f"| `{row['where']}` | {row['calls_a_pass']:.1f} | {row['own_microseconds_a_pass']:.0f} | "
            f"{row['with_callees_microseconds_a_pass']:.0f} | {row['share']:.1%} |"
        )
    return "\n".join(lines)


def writes(cases: dict[str, Measured]) -> str:
    """The calls of one job."""
    if "happy" not in cases:
        return "not measured"
    lines = ["| call | times |", "| --- | --- |"]
    lines += [f"| {call} | {count:.0f} |" for call, count in cases["happy"]["by_kind"].items()]
    return "\n".join(lines)


def fill(page: str, name: str, text: str) -> str:
    """The page with one generated block replaced. Raises ValueError unless it holds the block once."""
    page, count = re.subn(
        rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{text}\n{m[2]}", page, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"{PAGE.name} must hold the block {name!r} once, it does {count} times")
    return page


BLOCKS: tuple[Callable[[dict[str, Measured]], str], ...] = (verdicts, figures, writes, profile)


def write_page() -> None:
    """docs/scale.md with the figures that are on disk."""
    cases, page = load(), PAGE.read_text()
    for block in BLOCKS:
        page = fill(page, block.__name__, block(cases))
    PAGE.write_text(page)
