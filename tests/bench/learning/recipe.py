"""What both sides of a comparison share: models, prompts, sizes and the optimizer. SmolLM2-135M learns from itself.

The teacher is SmolLM2-135M-Instruct, the student the same weights with noise (examples/quickstart/prepare.py). Sizes are
chosen so that a run takes a minute or two on one processor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
#: The environment of the trainer, and the one with the peers' published packages.
OURS_PYTHON = ROOT / ".venv-trainer/bin/python"
PEER_PYTHON = ROOT / ".venv-bench/bin/python"
PEER_OVERLAY = ROOT / ".venv-bench/learning"
WORK = ROOT / "build/bench-learning"
RESULTS = HERE / "results"
BARS = ROOT / "tests/bench/bars.yaml"

#: Longest prompt, and tokens of an answer, in training and in the measurement from outside.
PROMPT_TOKENS = 64
ANSWER_TOKENS = 16
#: Prompts of the measurement from outside, the first of examples/quickstart/held-out.jsonl.
HELD_OUT = 20
#: AdamW and the clip on both sides.
OPTIMIZER = {"betas": (0.9, 0.95), "weight_decay": 0.0, "clip": 1.0}
SEED = 7
#: The student `pruned`: four of the teacher's 30 layers are gone, and noise in standard deviations of each matrix is added.
DROPPED_LAYERS = (8, 12, 16, 20)
NOISE = 0.11


@dataclass(frozen=True)
class Folders:
    """Where `prepare` put things."""

    data: Path

    @property
    def teacher(self) -> Path:
        return self.data / "models/teacher"

    def student_of(self, name: str) -> Path:
        """`student`: the quickstart's, with noise on every matrix. `pruned`: see damage.py."""
        return self.data / "models" / name

    @property
    def prompts(self) -> Path:
        """Training prompts, shuffled and short enough: both sides read them from the top."""
        return self.data / "shuffled.jsonl"

    @property
    def held_out(self) -> Path:
        return self.data / "prompts/held-out.jsonl"


def prepare(data: Path) -> Folders:
    """Models and prompts of the quickstart under `data`; nothing is made twice."""
    folders = Folders(data)
    subprocess.run([str(OURS_PYTHON), str(ROOT / "examples/quickstart/prepare.py"), str(data)], check=True)
    if not folders.prompts.exists():
        subprocess.run([str(OURS_PYTHON), str(HERE / "shuffle_prompts.py"), str(data)], check=True)
    if not folders.student_of("pruned").exists():
        subprocess.run([str(OURS_PYTHON), str(HERE / "damage.py"), str(data)], check=True)
    return folders


def run(python: Path, script: str, options: Any, *, threads: int) -> None:
    """A process with few threads and no network. `options` is its one argument, as JSON."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # Threads that spin while they wait would cost the other runs of a busy machine.
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "WANDB_DISABLED": "true",
        "PYTHONPATH": os.pathsep.join([str(PEER_OVERLAY)] if python == PEER_PYTHON else [str(ROOT / "trainer_image")]),
    }
    done = subprocess.run(
        [str(python), str(HERE / script), json.dumps(options)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{script} {options} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    sys.stderr.write("".join(f"    {line}\n" for line in done.stdout.splitlines()))


def seen_from_outside(
    folders: Folders,
    students: dict[str, Path],
    out: Path,
    *,
    threads: int,
    held_out: int = HELD_OUT,
    answer_tokens: int = ANSWER_TOKENS,
) -> dict[str, Any]:
    """Name -> what outside.py measures of the weights in a folder, on the first `held_out` prompts."""
    options = {
        "students": {name: str(folder) for name, folder in students.items()},
        "teacher": str(folders.teacher),
        "prompts": str(folders.held_out),
        "held_out": held_out,
        "answer_tokens": answer_tokens,
        "out": str(out),
    }
    run(OURS_PYTHON, "outside.py", options, threads=threads)
    measured: dict[str, Any] = json.loads(out.read_text())
    return measured


class Results:
    """results/NAME.json: measured rows by name, written after every one of them."""

    def __init__(self, name: str) -> None:
        self._file = RESULTS / f"{name}.json"
        self.rows: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def put(self, name: str, row: Any) -> None:
        """Remember a row."""
        self.rows[name] = row
        self._file.parent.mkdir(exist_ok=True)
        self._file.write_text(json.dumps(self.rows, indent=1, ensure_ascii=False) + "\n")
