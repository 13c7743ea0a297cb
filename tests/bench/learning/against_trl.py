"""How long learning takes beside TRL's DistillationTrainer: a table, a picture, and failure when a bar is missed.

Same teacher, student, prompts in the same order, sampling, optimizer, clip, precision and threads. TRL answers the prompts of an
update just before it; it runs with four and with eight of them, and its best counts. Ours makes one update for every four
prompts and answers those of several updates in one batch (`updatesPerStep`), which decodes at a lower cost a token; the later
updates of a step see answers that are a few updates old. Four learning rates each; the sides take turns, so that a busy minute of the machine falls on both. Reverse KL is measured from
outside after training.
`against_trl.py --missing` goes on after an interruption, `--redraw` only draws. Results are in results/trl.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recipe
import yaml
from bars import Curve, check_against_peer, mean

STUDENT = "pruned"
#: At higher ones both sides are at the level within a few updates: too few to tell them apart.
LEARNING_RATES = (5e-5, 3e-5, 2e-5, 1e-5)
#: One run of 20 steps says little: with one seed the sides change places.
SEEDS = (7, 8)


@dataclass(frozen=True)
class Side:
    """A trainer with its configuration."""

    name: str
    python: Path
    script: str
    options: dict[str, Any]
    #: Prompts of an update.
    prompts: int
    #: Updates between two rollouts. A curve's steps are updates on every side.
    updates_per_step: int = 1


OURS = "ours"
#: TRL's default, and the one that is faster here for both.
DTYPE = "bf16"
UPDATES, EVERY = 20, 4
#: Longer than for the signals: answers are most of what on-policy training costs.
ANSWER_TOKENS = 32
#: More than the signals are measured on, because a ratio is drawn from it.
HELD_OUT = 24
SIDES = (
    Side("TRL, 4 prompts an update", recipe.PEER_PYTHON, "peer_trl.py", {"beta": 1.0}, prompts=4),
    Side("TRL, 8 prompts an update", recipe.PEER_PYTHON, "peer_trl.py", {"beta": 1.0}, prompts=8),
    Side(
        OURS,
        recipe.OURS_PYTHON,
        "ours.py",
        {
            "job": {
                "backend": "inprocess",
                "distillation": {"signal": "loss", "tokenSelection": "full", "divergence": "reverse_kl"},
            },
        },
        prompts=4,
        updates_per_step=2,
    ),
)


def train(side: Side, learning_rate: float, seed: int, folders: recipe.Folders, out: Path, threads: int) -> None:
    """One training run; not again when it is there."""
    if (out / "steps.jsonl").exists():
        return
    options = side.options | {
        "learning_rate": learning_rate,
        "seed": seed,
        "dtype": DTYPE,
        "prompts_per_step": side.prompts * side.updates_per_step,
        "updates_per_step": side.updates_per_step,
        "steps": UPDATES // side.updates_per_step,
        "every": EVERY // side.updates_per_step,
        "student": STUDENT,
        "answer_tokens": ANSWER_TOKENS,
        "data": str(folders.data),
        "out": str(out),
    }
    recipe.run(side.python, side.script, [options], threads=threads)


def curves_of(
    sides: Sequence[Side], learning_rate: float, folders: recipe.Folders, work: Path, threads: int
) -> list[Curve]:
    """Train with the sides in turn, then look at all their students from outside; the mean over the seeds."""
    outs = {(side.name, seed): work / f"{side.name}-{learning_rate:g}-{seed}" for seed in SEEDS for side in sides}
    for side, seed in ((side, seed) for seed in SEEDS for side in sides):
        print(f"  {side.name} {learning_rate:g}, seed {seed}", file=sys.stderr, flush=True)
        train(side, learning_rate, seed, folders, outs[side.name, seed], threads)
    students = {"untrained": folders.student_of(STUDENT)}
    for (name, seed), out in outs.items():
        students |= {f"{name}/{seed}/{folder.name}": folder for folder in (out / "weights").iterdir()}
    seen = recipe.seen_from_outside(
        folders, students, work / "outside.json", threads=threads, held_out=HELD_OUT, answer_tokens=ANSWER_TOKENS
    )
    curves = [
        mean([_curve(side, learning_rate, seed, outs[side.name, seed], seen) for seed in SEEDS]) for side in sides
    ]
    shutil.rmtree(work)
    return curves


def _curve(side: Side, learning_rate: float, seed: int, out: Path, seen: dict[str, Any]) -> Curve:
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    points = [({"step": 0, "seconds": 0.0, "cpu_seconds": 0.0}, seen["untrained"])]
    points += [(line, measured) for line in lines if (measured := seen.get(f"{side.name}/{seed}/{line['step']}"))]
    return Curve(
        side=side.name,
        learning_rate=learning_rate,
        steps=[line["step"] * side.updates_per_step for line, _ in points],
        seconds=[line["seconds"] for line, _ in points],
        cpu_seconds=[line["cpu_seconds"] for line, _ in points],
        reverse_kl=[measured["reverse_kl"] for _, measured in points],
        length=[measured["length"] for _, measured in points],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--missing", action="store_true", help="measure what has no result yet")
    parser.add_argument("--redraw", action="store_true", help="measure nothing")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=recipe.WORK)
    options = parser.parse_args()
    results = recipe.Results("trl")
    if not options.redraw:
        subprocess.run([str(recipe.HERE / "setup.sh")], check=True)
        folders = recipe.prepare(options.work / "data")
        if not options.missing:
            shutil.rmtree(options.work / "trl", ignore_errors=True)
        for learning_rate in LEARNING_RATES:
            known = results.rows if options.missing else {}
            sides = [side for side in SIDES if f"{side.name} {learning_rate:g}" not in known]
            if not sides:
                continue
            for curve in curves_of(sides, learning_rate, folders, options.work / "trl", options.threads):
                results.put(f"{curve.side} {learning_rate:g}", {"curve": vars(curve), "load": os.getloadavg()[0]})
    if not results.rows:
        print(f"MISSED no result is in {recipe.RESULTS.relative_to(recipe.ROOT)}/trl.json: run without --redraw")
        return 1
    recipe.run(recipe.OURS_PYTHON, "draw.py", {"what": "trl"}, threads=options.threads)
    bars = yaml.safe_load(recipe.BARS.read_text())["learning"]["trl"]
    curves = [Curve(**row["curve"]) for row in results.rows.values()]
    # Wall time of a machine that others use says little; then processor time decides, as in the other benchmarks.
    busy = max(row["load"] for row in results.rows.values()) > 1.5 * (os.cpu_count() or 1)
    clock = "cpu_seconds" if busy else "seconds"
    ours = [curve for curve in curves if curve.side == OURS]
    peers = [curve for curve in curves if curve.side != OURS]
    missed = check_against_peer(ours, peers, bars, clock)
    missed += [
        f"{side.name} {rate:g}: no result"
        for side in SIDES
        for rate in LEARNING_RATES
        if f"{side.name} {rate:g}" not in results.rows
    ]
    print("judged by processor time: the machine was busy" if busy else "judged by wall time")
    print("\n".join(f"MISSED {line}" for line in missed) or "all bars met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
