"""One run of TRL's DistillationTrainer: `peer_trl.py '[{"learning_rate": …, "beta": …, "steps": …, "out": …}]'`.

On-policy (the trainer has no other way), full vocabulary, without activation checkpointing, with the
same optimizer and clip. Writes steps.jsonl and kept weights under `out`; saving stops the clocks (bench environment).
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from recipe import OPTIMIZER, SEED, Folders
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer


class StepClock(TrainerCallback):
    """Seconds of wall and processor at the end of each step, without the time that saving takes."""

    def __init__(self, keep: Path, every: int, steps: int) -> None:
        self._keep, self._every, self._last = keep, every, steps
        self.steps: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Time counts from here."""
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Read the clocks, save, and take the time of saving out again."""
        wall, cpu = time.perf_counter(), time.process_time()
        step = state.global_step
        self.steps.append({"step": step, "seconds": wall - self._wall, "cpu_seconds": cpu - self._cpu})
        print(f"step {step}: {wall - self._wall:.1f} s, {cpu - self._cpu:.1f} processor seconds", flush=True)
        if step % self._every == 0 or step == self._last:
            model.save_pretrained(self._keep / str(step))
        self._wall += time.perf_counter() - wall
        self._cpu += time.process_time() - cpu

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show what the trainer says."""
        print(json.dumps({k: round(v, 4) for k, v in (logs or {}).items() if isinstance(v, float)}), flush=True)


def main() -> None:
    [options] = json.loads(sys.argv[1])
    bf16 = options["dtype"] == "bf16"
    folders, out = Folders(Path(options["data"])), Path(options["out"])
    shutil.rmtree(out, ignore_errors=True)
    records = [json.loads(line) for line in folders.prompts.read_text().splitlines()]
    arguments = DistillationConfig(
        output_dir=str(out / "run"),
        beta=options["beta"],
        learning_rate=options["learning_rate"],
        max_steps=options["steps"],
        per_device_train_batch_size=options["prompts_per_step"],
        max_completion_length=options["answer_tokens"],
        adam_beta1=OPTIMIZER["betas"][0],
        adam_beta2=OPTIMIZER["betas"][1],
        weight_decay=OPTIMIZER["weight_decay"],
        max_grad_norm=OPTIMIZER["clip"],
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=bf16,
        use_cpu=True,
        seed=options.get("seed", SEED),
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    clock = StepClock(out / "weights", options["every"], options["steps"])
    student = AutoModelForCausalLM.from_pretrained(folders.student_of(options["student"]), dtype=torch.float32)
    trainer = DistillationTrainer(
        model=student,
        teacher_model=AutoModelForCausalLM.from_pretrained(
            folders.teacher, dtype=torch.bfloat16 if bf16 else torch.float32
        ),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": record["prompt"]} for record in records]),
        processing_class=AutoTokenizer.from_pretrained(folders.student_of(options["student"]), padding_side="left"),
        callbacks=[clock],
    )
    trainer.train()
    (out / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in clock.steps))


if __name__ == "__main__":
    main()
