"""Does every documented signal learn? A table, a picture, and failure when a bar of tests/bench/bars.yaml is missed.

Each signal is a short run of our trainer on SmolLM2-135M, whose student is measured from outside before and after, and the
pairs that go elsewhere are followed on eight tokens. `signals.py --only k1-advantage` measures some anew and keeps the
others' results, `--redraw` only draws. Results are in results/signals.json, the page is docs/experiments.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import recipe
import yaml
from bars import check_signals

STEPS, PROMPTS_PER_STEP, LEARNING_RATE = 6, 4, 5e-5
_TOP = {"signal": "loss", "topK": 32, "tail": "tail"}
SIGNALS: dict[str, dict[str, Any]] = {
    "k1-advantage": {"signal": "advantage", "divergence": "reverse_kl"},
    "k1-advantage, TROPD α 0.2": {"signal": "advantage", "divergence": "reverse_kl", "proximalTeacherAlpha": 0.2},
    "k2-loss": {"signal": "loss", "divergence": "k2"},
    "teacher-top-k forward KL": {**_TOP, "tokenSelection": "teacher_topk", "divergence": "forward_kl"},
    "teacher-top-k reverse KL": {**_TOP, "tokenSelection": "teacher_topk", "divergence": "reverse_kl"},
    "teacher-top-k JSD": {**_TOP, "tokenSelection": "teacher_topk", "divergence": "jsd"},
    "student-top-k reverse KL": {**_TOP, "tokenSelection": "student_topk", "divergence": "reverse_kl"},
    "union JSD": {**_TOP, "tokenSelection": "union", "divergence": "jsd"},
}


def options_of(name: str, folders: recipe.Folders, work: Path) -> dict[str, Any]:
    """The run of one signal."""
    return {
        "job": {"backend": "transformers", "distillation": SIGNALS[name]},
        "learning_rate": LEARNING_RATE,
        "steps": STEPS,
        "every": STEPS,
        "prompts_per_step": PROMPTS_PER_STEP,
        "student": "student",
        "dtype": "fp32",
        "data": str(folders.data),
        "out": str(work / "signals" / name.replace(" ", "-")),
    }


def measure(names: list[str], work: Path, threads: int) -> dict[str, Any]:
    """Train with each signal, then look at all students from outside, the untrained one first."""
    folders = recipe.prepare(work / "data")
    jobs = {name: options_of(name, folders, work) for name in names}
    recipe.run(recipe.OURS_PYTHON, "ours.py", list(jobs.values()), threads=threads)
    students = {"untrained": folders.student_of("student")}
    students |= {name: Path(job["out"]) / "weights" / str(STEPS) for name, job in jobs.items()}
    seen = recipe.seen_from_outside(folders, students, work / "outside.json", threads=threads)
    shutil.rmtree(work / "signals")
    return {
        name: {"distillation": SIGNALS[name], "steps": STEPS, "before": seen["untrained"], "after": seen[name]}
        for name in names
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=list(SIGNALS), help="measure this one; all when absent")
    parser.add_argument("--missing", action="store_true", help="measure what has no result yet")
    parser.add_argument("--redraw", action="store_true", help="measure nothing")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=recipe.WORK)
    options = parser.parse_args()
    results = recipe.Results("signals")
    if not options.redraw:
        names = [n for n in options.only or SIGNALS if not (options.missing and n in results.rows)]
        for name, row in measure(names, options.work, options.threads).items() if names else ():
            results.put(name, row)
        out = options.work / "elsewhere.json"
        recipe.run(recipe.OURS_PYTHON, "elsewhere.py", {"out": str(out)}, threads=options.threads)
        results.put("elsewhere", json.loads(out.read_text()))
    rows = [results.rows[name] | {"name": name} for name in SIGNALS if name in results.rows]
    recipe.run(recipe.OURS_PYTHON, "draw.py", {"what": "signals"}, threads=options.threads)
    missed = check_signals(rows, yaml.safe_load(recipe.BARS.read_text())["learning"]["signals"])
    missed += [f"{name}: no result" for name in SIGNALS if name not in results.rows]
    missed += [
        f"{pair['name']}: ends at {pair['seen']:.2f}, docs/what-is-optimised.md says {pair['expected']:.2f}"
        for pair in results.rows["elsewhere"]
        if not pair["agrees"]
    ]
    print("\n".join(f"MISSED {line}" for line in missed) or "all bars met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
