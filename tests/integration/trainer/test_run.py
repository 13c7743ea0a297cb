"""The process around the controller: signals, exit codes, documents, ports. Real processes, in-memory parts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from controller_fakes import trainer_config

from opd_api.progress import FinalDocument, ProgressDocument
from opd_api.vocabulary import ExitCode, FailureClass, Outcome, TrainerPhase
from opd_trainer.drain import drain

SUPPORT = Path(__file__).parents[2] / "support"
SECONDS = 180.0


class Run:
    """One run directory and the processes that worked in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "run"
        self.processes: list[subprocess.Popen[str]] = []
        rows = [{"prompt": f"prompt {row}"} for row in range(400)]
        (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(self, *options: str, attempt: int = 1, rollout: float = 0.0, train: float = 0.0, **sections: Any) -> None:
        data = {"source": str(self.root / "prompts.jsonl"), **sections.pop("data", {})}
        config = trainer_config(self.directory, attempt=attempt, data=data, **sections)
        path = self.root / f"job.a{attempt}.json"
        path.write_text(config.to_json())
        environment = {
            **os.environ,
            "PYTHONPATH": str(SUPPORT),
            "FAKE_ROLLOUT_SECONDS": str(rollout),
            "FAKE_TRAIN_SECONDS": str(train),
        }
        command = [sys.executable, str(SUPPORT / "run_with_fakes.py"), str(path), *options]
        self.processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )

    @property
    def process(self) -> subprocess.Popen[str]:
        return self.processes[-1]

    def end(self) -> tuple[int, FinalDocument | None]:
        self.process.communicate(timeout=SECONDS)
        path = self.directory / "final.json"
        return self.process.returncode, FinalDocument.model_validate_json(path.read_text()) if path.exists() else None

    def progress(self) -> ProgressDocument | None:
        path = self.directory / "progress.json"
        return ProgressDocument.model_validate_json(path.read_text()) if path.exists() else None

    def wait_for(self, condition: Callable[[ProgressDocument], bool], *, seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while True:
            document = self.progress()
            if document is not None and condition(document):
                return
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, f"the condition did not come true: {document}"
            time.sleep(0.05)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    value = Run(tmp_path)
    yield value
    for process in value.processes:
        process.kill()
        process.communicate()


LONG = {"steps": 100, "promptsPerStep": 4, "checkpoint": {"everySteps": 50}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_success_is_exit_code_0_and_a_final_document(run: Run) -> None:
    run.start()
    code, final = run.end()
    assert code == ExitCode.OK
    assert final is not None
    assert final.outcome is Outcome.SUCCEEDED
    progress = run.progress()
    assert progress is not None
    assert progress.phase is TrainerPhase.FINISHED
    assert (progress.step, progress.total_steps) == (4, 4)
    log = (run.directory / "logs" / "attempt-1" / "trainer.log").read_text()
    assert "Succeeded at step 4" in log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_preempted(run: Run, number: signal.Signals) -> None:
    run.start(train=0.3, training=LONG)
    run.wait_for(lambda document: document.step >= 2)
    run.process.send_signal(number)
    code, final = run.end()
    assert code == ExitCode.INFRASTRUCTURE
    assert final is not None
    assert final.outcome is Outcome.PREEMPTED
    assert final.checkpoint is not None
    assert final.checkpoint.step == final.step >= 2
    assert Path(final.checkpoint.path).is_dir()


@pytest.mark.timeout(900)
def test_ray_does_not_abort_a_save_that_takes_its_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WITH_RAY", "1")
    monkeypatch.delenv("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", raising=False)
    run.start(train=6.0, training=LONG)
    run.wait_for(lambda document: document.phase is TrainerPhase.TRAINING, seconds=600)
    run.process.send_signal(signal.SIGTERM)
    code, final = run.end()
    assert code == ExitCode.INFRASTRUCTURE
    assert final is not None
    assert (final.outcome, final.step) == (Outcome.PREEMPTED, 1)


def test_drain_ends_a_run_from_outside_and_hears_that_it_is_saved(run: Run) -> None:
    port = free_port()
    run.start("--drain-port", str(port), train=0.3, training=LONG)
    run.wait_for(lambda document: document.step >= 1)
    assert drain(host="127.0.0.1", port=port) in ("saved", "the controller is gone")
    assert list((run.directory / "checkpoints").glob("step-*.a1")), "saved means that a checkpoint stands"
    code, final = run.end()
    assert code == ExitCode.INFRASTRUCTURE
    assert final is not None
    assert final.outcome is Outcome.PREEMPTED


def test_metrics_are_served_while_the_run_lives(run: Run) -> None:
    port = free_port()
    run.start("--metrics-port", str(port), train=0.3, training=LONG)
    run.wait_for(lambda document: document.step >= 1)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        assert b"opd_step" in response.read()


def test_a_taken_port_is_no_reason_to_stop(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        run.start("--metrics-port", port, "--drain-port", port)
        assert run.end()[0] == ExitCode.OK


def test_kill_9_costs_the_steps_since_the_checkpoint_and_no_sample_is_counted_twice(run: Run) -> None:
    training = {"steps": 12, "promptsPerStep": 4, "checkpoint": {"everySteps": 3}}
    run.start(train=0.1, training=training)
    run.wait_for(lambda document: document.last_checkpoint is not None)
    run.process.kill()
    code, final = run.end()
    assert code == -signal.SIGKILL
    assert final is None, "nobody said how it ended"
    run.start(attempt=2, training=training)
    code, final = run.end()
    assert code == ExitCode.OK
    assert final is not None
    assert (final.attempt, final.step) == (2, 12)
    assert final.checkpoint is not None
    state = json.loads((Path(final.checkpoint.path) / "controller.json").read_text())
    assert state["buffer"]["exits"] == {"consumed": 48}
    assert state["stream"]["cursor"] == 48
    assert state["stream"]["reissue"] == []


def test_missing_data_is_exit_code_65_with_a_document(run: Run) -> None:
    run.start(data={"source": str(run.root / "absent.jsonl")})
    code, final = run.end()
    assert code == ExitCode.DATA
    assert final is not None
    assert (final.failure_class, final.reason) == (FailureClass.DATA, "DataNotFound")
    assert "absent.jsonl" in final.message


def test_a_configuration_that_does_not_fit_is_exit_code_64(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"run": {}}')
    command = [sys.executable, "-m", "opd_trainer.cli", "run", "--config", str(tmp_path / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == ExitCode.CONFIG
    assert "run.namespace" in done.stderr
