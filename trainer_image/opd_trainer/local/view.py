"""What `opd run` shows in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from opd_api.progress import FinalDocument, ProgressDocument
from opd_api.vocabulary import EXIT_CODE_OF_CLASS, ExitCode, Outcome
from opd_trainer.errors import Failure


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
        self._last: tuple[object, ...] = ()
        self._checkpoint: int | None = None

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(text, markup=False)

    def phase(self, text: str) -> None:
        """A step begins."""
        self._console.print(f"• {text}", markup=False)

    def progress(self, document: ProgressDocument) -> None:
        """A heartbeat: prints only what is new."""
        now = (document.phase, document.step, document.unavailable_teacher)
        numbers = _numbers(document.metrics)
        if now != self._last:
            self._last = now
            if document.unavailable_teacher:
                self.say(f"teacher {document.unavailable_teacher} does not answer; samples are held")
            elif not self._console.is_terminal or document.step == 0:
                self.say(f"{document.phase} {document.step}/{document.total_steps} {numbers}".rstrip())
        if document.last_checkpoint is not None and document.last_checkpoint.step != self._checkpoint:
            self._checkpoint = document.last_checkpoint.step
            self.say(f"checkpoint of step {self._checkpoint}")
        if document.total_steps and self._console.is_terminal:
            self._bar.start()
            self._bar.update(
                self._task,
                visible=True,
                description=str(document.phase).lower(),
                completed=document.step,
                total=document.total_steps,
                numbers=numbers,
            )

    def end(self, final: FinalDocument, directory: Path) -> int:
        """Last lines; returns the exit code."""
        self.close()
        self.say(f"{final.outcome} at step {final.step}: {final.message}")
        report = directory / "report" / "index.html"
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
            self.say("run the same command again to resume")
            return ExitCode.INFRASTRUCTURE
        return EXIT_CODE_OF_CLASS.get(final.failure_class, ExitCode.INTERNAL)

    def fail(self, failure: Failure) -> None:
        """A run that never got to a final document."""
        self.close()
        self._console.print(f"{failure.failure_class}/{failure.reason}: {failure.message}", markup=False, style="red")

    def close(self) -> None:
        """End the bar."""
        self._bar.stop()


def _numbers(metrics: dict[str, float]) -> str:
    names = {"opd_reverse_kl": "reverse KL", "loss": "loss", "reward": "reward", "response_length": "length"}
    return "  ".join(f"{text} {metrics[name]:.4g}" for name, text in names.items() if name in metrics)
