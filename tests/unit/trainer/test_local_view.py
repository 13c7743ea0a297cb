"""What a person sees of a local run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from opd_api.progress import FinalDocument, ProgressDocument
from opd_api.v1alpha1.status import CheckpointStatus, HeldOutReverseKl, ResultStatus
from opd_api.vocabulary import ExitCode, Outcome, TrainerPhase, TrainerTask
from opd_trainer.local.view import View


class Screen:
    def __init__(self) -> None:
        self._text = io.StringIO()
        self.view = View(Console(file=self._text, force_terminal=False, width=200))
        self._sequence = 0

    def heartbeat(self, task: TrainerTask | None = None, **more: Any) -> None:
        self._sequence += 1
        values = {"phase": TrainerPhase.TRAINING, "total_steps": 16, **more}
        self.view.progress(ProgressDocument(attempt=1, sequence=self._sequence, task=task, **values))

    @property
    def lines(self) -> list[str]:
        return [line.strip() for line in self._text.getvalue().splitlines()]


@pytest.fixture
def screen() -> Screen:
    return Screen()


def test_the_first_step_is_told_task_by_task(screen: Screen) -> None:
    screen.heartbeat(phase=TrainerPhase.STARTING, total_steps=0)
    for task in (TrainerTask.EVALUATE, TrainerTask.EVALUATE, TrainerTask.ROLLOUT, TrainerTask.TRAIN):
        screen.heartbeat(task)
    assert screen.lines == [
        "• the student starts: models load",
        "• evaluating held-out prompts",
        "• rollout: the student answers, the teachers score",
        "• training",
    ]


def test_a_step_is_one_line_with_kl_and_seconds(screen: Screen) -> None:
    numbers = {"opd_reverse_kl": 0.51234, "seconds_rollout": 8.0, "seconds_train": 4.5, "seconds_evaluate": 60.0}
    for task in (TrainerTask.ROLLOUT, TrainerTask.TRAIN, TrainerTask.ROLLOUT):
        screen.heartbeat(task, step=3, metrics=numbers)
    assert [line for line in screen.lines if line.startswith("step")] == ["step 3/16  reverse KL 0.5123  12.5 s a step"]
    assert len(screen.lines) == 1, "the tasks of later steps are not told"


def test_an_evaluation_and_its_number_are_told(screen: Screen) -> None:
    screen.heartbeat(TrainerTask.ROLLOUT, step=8, metrics={"opd_reverse_kl": 0.5})
    screen.heartbeat(TrainerTask.EVALUATE, step=8, metrics={"opd_reverse_kl": 0.5})
    screen.heartbeat(TrainerTask.ROLLOUT, step=8, metrics={"opd_reverse_kl": 0.5, "eval_opd_reverse_kl": 0.4151})
    assert screen.lines[-2:] == ["• evaluating held-out prompts", "held-out reverse KL 0.4151 after 8 steps"]


def test_a_number_comes_before_what_follows_it(screen: Screen) -> None:
    screen.heartbeat(TrainerTask.EVALUATE)
    screen.heartbeat(TrainerTask.ROLLOUT, metrics={"eval_opd_reverse_kl": 0.61})
    assert screen.lines[1] == "held-out reverse KL 0.61 after 0 steps"
    assert screen.lines[2].startswith("• rollout")


def test_a_teacher_that_went_away_is_told_at_any_step(screen: Screen) -> None:
    screen.heartbeat(TrainerTask.ROLLOUT, step=2, metrics={"opd_reverse_kl": 0.5})
    screen.heartbeat(TrainerTask.ROLLOUT, step=2, phase=TrainerPhase.TEACHER_UNAVAILABLE, unavailable_teacher="math")
    assert screen.lines[-1] == "• teacher math does not answer: samples are held"


def test_a_resumed_run_says_from_where_and_a_fresh_one_does_not(screen: Screen) -> None:
    saved = CheckpointStatus(step=4, path="/run/checkpoints/step-4.a1")
    screen.view.may_resume()
    screen.heartbeat(phase=TrainerPhase.STARTING, total_steps=0)
    screen.heartbeat(TrainerTask.ROLLOUT, step=4, last_checkpoint=saved)
    screen.heartbeat(TrainerTask.TRAIN, step=4, last_checkpoint=saved)
    assert screen.lines.count("resumes from step 4") == 1
    assert "checkpoint of step 4" not in screen.lines
    fresh = Screen()
    fresh.heartbeat(TrainerTask.ROLLOUT, step=4, last_checkpoint=saved)
    assert "checkpoint of step 4" in fresh.lines
    assert not any("resumes" in line for line in fresh.lines)


def test_a_stop_says_that_the_same_command_goes_on(screen: Screen, tmp_path: Path) -> None:
    screen.heartbeat(TrainerTask.ROLLOUT, step=1)
    screen.heartbeat(phase=TrainerPhase.FINISHED, step=1)
    final = FinalDocument(attempt=1, outcome=Outcome.PREEMPTED, step=1, message="stopped at step 1/16 (signal)")
    assert screen.view.end(final, tmp_path) == ExitCode.INFRASTRUCTURE
    assert "stopped at step 1; the same command goes on" in screen.lines
    assert not any("Finished" in line for line in screen.lines)


def test_the_end_tells_the_held_out_numbers(screen: Screen, tmp_path: Path) -> None:
    result = ResultStatus(held_out_reverse_kl=HeldOutReverseKl(before="0.61", after="0.415"))
    final = FinalDocument(attempt=1, outcome=Outcome.SUCCEEDED, step=16, message="16 steps", result=result)
    assert screen.view.end(final, tmp_path) == ExitCode.OK
    assert "held-out reverse KL: 0.61 before, 0.415 after, in nats" in screen.lines
