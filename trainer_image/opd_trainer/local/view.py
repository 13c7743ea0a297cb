"""What `opd run` shows in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from opd_api.progress import FinalDocument, ProgressDocument
from opd_api.vocabulary import EXIT_CODE_OF_CLASS, ExitCode, Outcome, TrainerPhase, TrainerTask
from opd_trainer.errors import Failure

HELD_OUT = "eval_opd_reverse_kl"
DOING = {
    TrainerPhase.STARTING: "the student starts: models load",
    TrainerPhase.TRAINING: "training",
    TrainerPhase.STOPPING: "saving before the stop",
    TrainerPhase.EXPORTING: "exporting the student",
    TrainerTask.EVALUATE: "evaluating held-out prompts",
    TrainerTask.ROLLOUT: "rollout: the student answers, the teachers score",
    TrainerTask.TRAIN: "training",
    TrainerTask.PUBLISH: "publishing weights",
    TrainerTask.CHECKPOINT: "saving",
}


class View:
    """Lines for events, and one bar for the steps on a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=None, numbers="", visible=False)
        self._resumes = False
        self._doing = ""
        self._step_numbers = ""
        self._held_out: float | None = None
        self._checkpoint: int | None = None

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(text, markup=False)

    def phase(self, text: str) -> None:
        """A step begins."""
        self._console.print(f"• {text}", markup=False)

    def may_resume(self) -> None:
        """An earlier attempt ran here: a checkpoint in the first heartbeats is its."""
        self._resumes = True

    def progress(self, document: ProgressDocument) -> None:
        """A heartbeat: prints only what is new."""
        if self._resumes and document.last_checkpoint is not None:
            self.say(f"resumes from step {document.last_checkpoint.step}")
            self._checkpoint = document.last_checkpoint.step
        if document.step or document.phase is TrainerPhase.TRAINING:
            self._resumes = False
        numbers = _numbers(document.metrics)
        if numbers and numbers != self._step_numbers:
            self._step_numbers = numbers
            if not self._console.is_terminal:
                self.say(f"step {document.step}/{document.total_steps}  {numbers}")
        held_out = document.metrics.get(HELD_OUT)
        if held_out is not None and held_out != self._held_out:
            self._held_out = held_out
            self.say(f"held-out reverse KL {held_out:.4g} after {document.step} steps")
        if document.last_checkpoint is not None and document.last_checkpoint.step != self._checkpoint:
            self._checkpoint = document.last_checkpoint.step
            self.say(f"checkpoint of step {self._checkpoint}")
        self._say_what_it_does(document)
        self._move_bar(document, numbers)

    def _say_what_it_does(self, document: ProgressDocument) -> None:
        """Everything until the first step's numbers, which may take minutes; then only what is no part of each step."""
        doing = _doing(document)
        if not doing or doing == self._doing:
            return
        self._doing = doing
        inside = document.phase is TrainerPhase.TRAINING and document.task is not TrainerTask.EVALUATE
        if not self._step_numbers or not inside:
            self.phase(doing)

    def _move_bar(self, document: ProgressDocument, numbers: str) -> None:
        if document.total_steps and self._console.is_terminal:
            self._bar.start()
            self._bar.update(
                self._task,
                visible=True,
                description=self._doing.partition(":")[0],
                completed=document.step,
                total=document.total_steps,
                numbers=numbers,
            )

    def end(self, final: FinalDocument, directory: Path) -> int:
        """Last lines; returns the exit code."""
        self.close()
        if final.outcome is Outcome.PREEMPTED:
            self.say(f"stopped at step {final.step}; the same command goes on")
        else:
            self.say(f"{final.outcome} at step {final.step}: {final.message}")
        report = directory / "report" / "index.html"
        if final.result and final.result.held_out_reverse_kl:
            held_out = final.result.held_out_reverse_kl
            self.say(f"held-out reverse KL: {held_out.before} before, {held_out.after} after, in nats")
        exported = final.result.exported_model if final.result else None
        if exported:
            self.say(f"student:    {exported}")
        if final.checkpoint:
            self.say(f"checkpoint: {final.checkpoint.path}")
        written = final.result.report if final.result else str(report) if report.exists() else None
        if written:
            self.say(f"report:     {written}")
        self.say(f"tensorboard --logdir {directory / 'tensorboard'}")
        if final.outcome is Outcome.SUCCEEDED:
            return ExitCode.OK
        if final.outcome is Outcome.PREEMPTED or final.failure_class is None:
            return ExitCode.INFRASTRUCTURE
        return EXIT_CODE_OF_CLASS.get(final.failure_class, ExitCode.INTERNAL)

    def fail(self, failure: Failure) -> None:
        """A run that never got to a final document."""
        self.close()
        self._console.print(f"{failure.failure_class}/{failure.reason}: {failure.message}", markup=False, style="red")

    def close(self) -> None:
        """End the bar."""
        self._bar.stop()


def _doing(document: ProgressDocument) -> str:
    if document.unavailable_teacher:
        return f"teacher {document.unavailable_teacher} does not answer: samples are held"
    return DOING.get(document.task or document.phase, "")


def _numbers(metrics: dict[str, float]) -> str:
    """The last step's numbers; its seconds are those that the training waited, without an evaluation before it."""
    names = {"opd_reverse_kl": "reverse KL", "loss": "loss", "reward": "reward", "response_length": "length"}
    parts = [f"{text} {metrics[name]:.4g}" for name, text in names.items() if name in metrics]
    waits = [
        metrics[f"seconds_{task}"]
        for task in TrainerTask
        if task is not TrainerTask.EVALUATE and f"seconds_{task}" in metrics
    ]
    return "  ".join([*parts, *([f"{sum(waits):.3g} s a step"] if waits else [])])
