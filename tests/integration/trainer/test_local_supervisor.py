"""The steps of `opd run` and every way to end them, with stubs in the place of the heavy children."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from opd_api.vocabulary import ExitCode

SCRIPT = Path(__file__).parents[2] / "support" / "local_with_stubs.py"
SECONDS = 120.0


class Local:
    """One manifest and the supervisor that runs it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.journal = root / "journal.jsonl"
        self.journal.touch()
        (root / "data").mkdir()
        self.process: subprocess.Popen[str] | None = None
        self.spec: dict[str, Any] = {
            "runtime": {"device": "cpu"},
            "student": {"model": {"source": "/data/student"}},
            "teachers": [
                {"name": "teacher", "backend": "transformers", "replicas": 2, "model": {"source": "/data/teacher"}}
            ],
            "data": {"source": "/data/prompts.jsonl"},
            "rollout": {"engine": "transformers"},
            "training": {"steps": 2, "promptsPerStep": 4},
            "lifecycle": {"preemptionGraceSeconds": 5},
        }

    def start(self, **environment: str) -> subprocess.Popen[str]:
        file = self.root / "job.yaml"
        document = {"apiVersion": "opd.dev/v1alpha1", "kind": "OPDJob", "metadata": {"name": "job"}, "spec": self.spec}
        file.write_text(yaml.safe_dump(document))
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(file), str(self.root / "data")],
            env={**os.environ, "STUB_JOURNAL": str(self.journal), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self.process

    def end(self) -> tuple[int, str]:
        assert self.process is not None
        output, _ = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, output

    def entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.journal.read_text().splitlines()]

    def texts(self) -> list[str]:
        return [entry["text"] for entry in self.entries()]

    def wait_for(self, text: str, count: int = 1) -> None:
        assert self.process is not None
        deadline = time.monotonic() + SECONDS
        while self.texts().count(text) < count:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, f"{text} did not come: {self.texts()}"
            time.sleep(0.02)

    def alive(self) -> list[int]:
        """Children of all kinds that still run."""
        return [entry["pid"] for entry in self.entries() if Path(f"/proc/{entry['pid']}").exists()]

    def wait_until_all_ended(self) -> None:
        """After a kill -9 the kernel ends the children; that takes a moment."""
        deadline = time.monotonic() + 20
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert self.alive() == []


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    value = Local(tmp_path)
    yield value
    if value.process is not None:
        value.process.kill()
        value.process.communicate()
    value.wait_until_all_ended()


def test_the_steps_come_in_order_and_teachers_go_when_the_export_begins(local: Local) -> None:
    local.start()
    code, output = local.end()
    assert code == ExitCode.OK, output
    texts = local.texts()
    assert texts == ["check", "teacher", "teacher", "probe", "controller", *texts[5:]]
    assert texts.index("teacher ends") < texts.index("controller ends"), "teachers are not needed for the export"
    assert "checking inputs" in output
    assert "report" in output or "checkpoint" in output


def test_no_key_is_in_any_argument(local: Local) -> None:
    local.start()
    assert local.end()[0] == ExitCode.OK
    ports = [entry["argv"][entry["argv"].index("--port") + 1] for entry in local.entries() if "--port" in entry["argv"]]
    assert len(set(ports)) == 2, "two replicas have two ports"
    for entry in local.entries():
        assert not any(len(argument) == 43 for argument in entry["argv"]), "a token of 32 bytes in argv"


def test_a_failed_check_names_its_findings_and_starts_nothing(local: Local) -> None:
    local.start(STUB_CHECK_CODE=str(ExitCode.DATA))
    code, output = local.end()
    assert code == ExitCode.DATA
    assert "data.promptField: no such field" in output
    assert local.texts() == ["check"]


def test_a_teacher_that_dies_ends_the_run_with_its_last_words(local: Local) -> None:
    local.start(STUB_TEACHER="dead")
    code, output = local.end()
    assert code == ExitCode.TEACHER
    assert "ended with exit code 3" in output
    assert "CUDA out of memory" in output
    assert "controller" not in local.texts()


def test_a_port_that_was_taken_in_the_last_moment_is_exchanged(local: Local) -> None:
    local.spec["teachers"][0]["replicas"] = 1
    local.start(STUB_TEACHER="taken")
    code, output = local.end()
    assert code == ExitCode.OK, output
    assert local.texts()[:4] == ["check", "teacher", "teacher", "probe"]


def test_a_teacher_that_never_answers_meets_its_deadline(local: Local) -> None:
    local.spec["lifecycle"]["teacherReadyDeadlineSeconds"] = 2
    local.start(STUB_TEACHER="deaf")
    code, output = local.end()
    assert code == ExitCode.TEACHER
    assert "does not answer in time" in output
    assert "controller" not in local.texts()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_teachers_load_ends_everything(local: Local, number: signal.Signals) -> None:
    process = local.start(STUB_TEACHER="deaf")
    local.wait_for("teacher", 2)
    process.send_signal(number)
    code, output = local.end()
    assert code == ExitCode.INFRASTRUCTURE
    assert "stopped before training" in output
    assert local.alive() == []


def test_ctrl_c_while_training_waits_for_the_checkpoint_and_the_next_run_is_attempt_2(local: Local) -> None:
    process = local.start(STUB_RUN_SECONDS="300")
    local.wait_for("controller")
    process.send_signal(signal.SIGINT)
    code, output = local.end()
    assert code == ExitCode.INFRASTRUCTURE
    assert "stopped at step 1; the same command goes on" in output
    assert local.alive() == []
    local.start()
    assert local.end()[0] == ExitCode.OK
    configs = sorted(path.name for path in local.root.rglob("job.a*.json"))
    assert configs == ["job.a1.json", "job.a2.json"]


def test_a_second_ctrl_c_does_not_wait(local: Local) -> None:
    process = local.start(STUB_RUN_SECONDS="300", STUB_IGNORE_SIGTERM="1")
    local.wait_for("controller")
    process.send_signal(signal.SIGINT)
    local.wait_for("stop heard")
    process.send_signal(signal.SIGINT)
    code, output = local.end()
    assert code == ExitCode.INTERNAL
    assert "without saying how" in output
    assert local.alive() == []


def test_a_controller_that_ignores_the_stop_is_ended_after_its_grace(local: Local) -> None:
    local.spec["lifecycle"]["preemptionGraceSeconds"] = 1
    process = local.start(STUB_RUN_SECONDS="300", STUB_IGNORE_SIGTERM="1")
    local.wait_for("controller")
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert local.end()[0] == ExitCode.INTERNAL
    assert time.monotonic() - started < 60


def test_two_runs_of_one_manifest_at_a_time_are_refused(local: Local) -> None:
    first = local.start(STUB_RUN_SECONDS="300")
    local.wait_for("controller")
    local.start()
    code, output = local.end()
    assert code == ExitCode.CONFIG
    assert "another opd run works in" in output
    first.kill()
    first.communicate()


def test_kill_9_of_the_supervisor_leaves_no_process(local: Local) -> None:
    process = local.start(STUB_RUN_SECONDS="300")
    local.wait_for("controller")
    process.kill()
    process.communicate(timeout=SECONDS)
    local.wait_until_all_ended()
