"""Runs of our trainer, each in one process: `ours.py '[{"job": …, "learning_rate": …, "steps": …, "out": …}, …]'`.

`job` is the part of an OPDJob's spec that is asked about (`distillation`, and `teacher` for its backend). The spec is
checked by the API's rules like a manifest. Writes steps.jsonl and kept weights under `out`. Runs are forked one after the
other from a process that has imported everything and computed nothing (trainer environment).
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import shutil
import sys
from pathlib import Path
from typing import Any

from in_process import StepClock, parts, teacher_server
from recipe import ANSWER_TOKENS, OPTIMIZER, PROMPT_TOKENS, SEED, Folders
from transformers import AutoTokenizer

from opd_api import rules
from opd_api.trainer_config import Run, TeacherAddress, TrainerConfig, project
from opd_api.vocabulary import Outcome
from opd_trainer.controller import Controller
from opd_trainer.controller.state import RunState
from opd_trainer.storage import RunDirectory


def configuration(options: dict[str, Any], folders: Folders, scratch: Path, port: int | None) -> TrainerConfig:
    """The trainer's configuration of a manifest. Raises ValueError when the API would refuse it."""
    backend, dtype = options["job"].get("backend", "transformers"), options["dtype"]
    spec = {
        "runtime": {"device": "cpu"},
        "storage": {"claimName": "claim"},
        "student": {"model": {"source": str(folders.student_of(options["student"])), "dtype": "fp32"}},
        "teachers": [
            {"name": "teacher", "backend": backend, "model": {"source": str(folders.teacher), "dtype": dtype}}
        ],
        "distillation": options["job"]["distillation"],
        "data": {"source": str(folders.prompts), "maxPromptTokens": PROMPT_TOKENS, "shuffle": False},
        "rollout": {"engine": "transformers", "maxResponseTokens": options.get("answer_tokens", ANSWER_TOKENS)},
        "training": {
            "steps": options["steps"],
            "promptsPerStep": options["prompts_per_step"],
            "updatesPerStep": options.get("updates_per_step", 1),
            "learningRate": options["learning_rate"],
            "betas": list(OPTIMIZER["betas"]),
            "weightDecay": OPTIMIZER["weight_decay"],
            "gradClip": OPTIMIZER["clip"],
            "dtype": dtype,
            "seed": options.get("seed", SEED),
            "activationCheckpointing": False,
            "maxTokensPerMicroBatch": 4096,
        },
    }
    document = {"apiVersion": "opd.dev/v1alpha1", "kind": "OPDJob", "metadata": {"name": "bench"}, "spec": spec}
    job, findings = rules.check_document(document, local=True)
    if job is None or rules.refused(findings):
        raise ValueError(f"the API refuses this job: {findings}")
    address = TeacherAddress(name="teacher", urls=[] if port is None else [f"http://127.0.0.1:{port}"])
    run = Run(
        namespace="local",
        name="bench",
        uid8="00000000",
        attempt=1,
        directory=str(scratch),
        mount_path=str(scratch),
        progress_config_map=None,
        teachers=[] if port is None else [address],
    )
    return project(job.spec, run)


async def train(options: dict[str, Any]) -> None:
    """Run to the end and write what was seen."""
    folders, out = Folders(Path(options["data"])), Path(options["out"])
    shutil.rmtree(out, ignore_errors=True)
    scratch = out / "run"
    if options["job"].get("backend") == "inprocess":
        await _controlled(configuration(options, folders, scratch, None), options, out)
        return
    ports: list[int] = []
    async with teacher_server(folders.teacher, ports.append):
        await _controlled(configuration(options, folders, scratch, ports[0]), options, out)


async def _controlled(config: TrainerConfig, options: dict[str, Any], out: Path) -> None:
    directory = RunDirectory(Path(config.run.directory), 1)
    clock = StepClock(directory.weights / "a1", out / "weights", options["every"])
    state = RunState(attempt=1)
    tokenizer = AutoTokenizer.from_pretrained(config.student.model.source)
    final = await Controller(config, parts(config, tokenizer, clock, out), directory, state).run()
    if final.outcome is not Outcome.SUCCEEDED:
        raise RuntimeError(f"the run ended {final.outcome}: {final.message}")
    clock.keep(options["steps"], directory.export)
    shutil.rmtree(directory.root)
    (out / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in clock.steps))


def main() -> int:
    """1 when a run failed; what it said is on standard error."""
    codes = []
    for options in json.loads(sys.argv[1]):
        process = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(train(options)))  # noqa: B023
        process.start()
        process.join()
        codes.append(process.exitcode)
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
