"""`opd run` for real: a random student, a teacher server, Ray, FSDP2, checkpoints, an export; stopped and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from opd_testing.tiny_models import write_model

from opd_api.progress import FinalDocument, ProgressDocument
from opd_api.vocabulary import ExitCode, Outcome
from opd_trainer.report.records import MetricsRecord, SampleRecord

#: Generous: the machine may be shared, and torch is imported by five processes.
START_SECONDS = 900.0
PROMPTS = 40


def manifest(name: str, *, steps: int) -> dict[str, Any]:
    model = {"dtype": "fp32"}
    return {
        "apiVersion": "opd.dev/v1alpha1",
        "kind": "OPDJob",
        "metadata": {"name": name},
        "spec": {
            "runtime": {"device": "cpu"},
            "student": {"model": {**model, "source": "/data/student"}},
            "teachers": [{"name": "teacher", "backend": "transformers", "model": {**model, "source": "/data/teacher"}}],
            "data": {"source": "/data/prompts.jsonl", "maxPromptTokens": 64},
            "rollout": {"engine": "transformers", "maxResponseTokens": 8},
            "training": {
                "steps": steps,
                "promptsPerStep": 4,
                "learningRate": 1e-3,
                "dtype": "fp32",
                "activationCheckpointing": False,
                "checkpoint": {"everySteps": 2},
            },
            "diagnostics": {"logResponses": True, "tokenStats": True, "tokenPeriod": 1},
            "lifecycle": {"preemptionGraceSeconds": 120},
        },
    }


@dataclass
class Workspace:
    """A folder with models, prompts and manifests; `run` starts the command line."""

    root: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def data(self) -> Path:
        return self.root / "data"

    def write(self, name: str, **options: Any) -> Path:
        file = self.root / f"{name}.yaml"
        file.write_text(yaml.safe_dump(manifest(name, **options)))
        return file

    def start(self, file: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "opd_trainer.cli", "local", str(file), "--data", str(self.data)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.started.append(process)
        return process

    def run_directory(self, name: str) -> Path:
        (directory,) = (self.data / "opd" / "local").glob(f"{name}-????????")
        return directory

    def progress(self, name: str) -> ProgressDocument | None:
        try:
            return ProgressDocument.model_validate_json((self.run_directory(name) / "progress.json").read_text())
        except (OSError, ValueError):
            return None

    def final(self, name: str) -> FinalDocument:
        return FinalDocument.model_validate_json((self.run_directory(name) / "final.json").read_text())

    def lines(self, name: str, file: str) -> list[dict[str, Any]]:
        path = self.run_directory(name) / "logs" / file
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    work = Workspace(tmp_path_factory.mktemp("local"))
    for seed, name in enumerate(("teacher", "student"), start=1):
        write_model(work.data / name, seed=seed, family="qwen2", hidden=64, tied=False, scale=2.0)
    rows = [{"prompt": f"prompt {row}: ", "data_source": "ab"[row % 2], "answer": "x"} for row in range(PROMPTS)]
    (work.data / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return work


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            pytest.fail(f"opd run ended early: {process.communicate()[0]}")
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.1)


def marked_processes(marker: str) -> list[str]:
    """Command lines of living processes whose environment or arguments carry the marker."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if marker.encode() in (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch, workspace: Workspace) -> Iterator[str]:
    """An environment variable that every descendant of a run inherits."""
    value = f"opd-test-{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("OPD_TEST_MARKER", value)
    yield value
    for process in workspace.started:
        process.kill()  # its children die with it; after a passed test it has ended long ago
        process.wait()
    assert marked_processes(value) == []


@pytest.mark.timeout(1200)
def test_a_run_ends_with_a_student_metrics_and_no_process_left(workspace: Workspace, marker: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    process = workspace.start(workspace.write("whole", steps=2))
    output, _ = process.communicate(timeout=START_SECONDS + 120)
    assert process.returncode == ExitCode.OK, output
    assert marked_processes(marker) == []
    final = workspace.final("whole")
    assert (final.outcome, final.step) == (Outcome.SUCCEEDED, 2)
    assert final.result is not None
    assert final.result.exported_model is not None
    student = AutoModelForCausalLM.from_pretrained(final.result.exported_model)
    original = AutoModelForCausalLM.from_pretrained(workspace.data / "student")
    changed = [
        not after.equal(before) for after, before in zip(student.parameters(), original.parameters(), strict=True)
    ]
    assert all(changed), "training did not reach every parameter"
    AutoTokenizer.from_pretrained(final.result.exported_model)
    metrics = [MetricsRecord.from_document(line) for line in workspace.lines("whole", "metrics.jsonl")]
    assert [record.step for record in metrics] == [1, 2]
    assert all(record.metrics["opd_reverse_kl"] > 0 for record in metrics)
    samples = [SampleRecord.from_document(line) for line in workspace.lines("whole", "samples.jsonl")]
    assert len(samples) == 8
    assert all(sample.tokens is not None and sample.response is not None for sample in samples)
    log = (workspace.run_directory("whole") / "logs" / "attempt-1" / "trainer.log").read_text()
    assert "step 2:" in log
    assert "checking inputs" in output
    assert "probing teachers" in output
    assert output.index("teacher-0 answers") < output.index("starting the student")


@pytest.mark.timeout(2400)
def test_ctrl_c_saves_leaves_no_process_and_a_second_run_resumes(workspace: Workspace, marker: str) -> None:
    file = workspace.write("stopped", steps=10)
    process = workspace.start(file)

    def trained() -> bool:
        progress = workspace.progress("stopped") if (workspace.data / "opd" / "local").exists() else None
        return progress is not None and progress.step >= 1

    def exists() -> bool:
        return bool(list((workspace.data / "opd" / "local").glob("stopped-????????")))

    wait_for(exists, process)
    wait_for(trained, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == ExitCode.INFRASTRUCTURE, output
    assert marked_processes(marker) == []
    first = workspace.final("stopped")
    assert first.outcome is Outcome.PREEMPTED
    assert first.checkpoint is not None
    assert first.checkpoint.step == first.step

    again = workspace.start(file)
    output, _ = again.communicate(timeout=START_SECONDS + 200)
    assert again.returncode == ExitCode.OK, output
    final = workspace.final("stopped")
    assert (final.outcome, final.attempt, final.step) == (Outcome.SUCCEEDED, 2, 10)
    metrics = [MetricsRecord.from_document(line) for line in workspace.lines("stopped", "metrics.jsonl")]
    assert [record.step for record in metrics] == list(range(1, 11))
    assert [record.attempt for record in metrics] == [1] * first.step + [2] * (10 - first.step)
    samples = [SampleRecord.from_document(line) for line in workspace.lines("stopped", "samples.jsonl")]
    assert max(Counter(sample.sample_id for sample in samples).values()) == 1
    assert Counter(sample.prompt for sample in samples) == Counter(f"prompt {row}: " for row in range(PROMPTS))

    third = workspace.start(file)
    output, _ = third.communicate(timeout=60)
    assert third.returncode == ExitCode.OK
    assert "succeeded already" in output


@pytest.mark.timeout(900)
def test_a_wrong_field_is_found_before_a_teacher_starts(workspace: Workspace, marker: str) -> None:
    document = manifest("wrong", steps=2)
    document["spec"]["data"]["promptField"] = "question"
    file = workspace.root / "wrong.yaml"
    file.write_text(yaml.safe_dump(document))
    process = workspace.start(file)
    output, _ = process.communicate(timeout=800)
    assert process.returncode == ExitCode.DATA, output
    assert "question" in output
    assert "data_source" in output, "the fields that exist are named"
    assert "starting 1 teacher" not in output


@pytest.mark.timeout(900)
def test_a_teacher_that_cannot_load_ends_the_run_with_its_own_words(workspace: Workspace, marker: str) -> None:
    document = manifest("lost", steps=2)
    document["spec"]["teachers"][0]["model"]["source"] = "/data/nowhere"
    document["spec"]["preflight"] = {"enabled": False}
    file = workspace.root / "lost.yaml"
    file.write_text(yaml.safe_dump(document))
    process = workspace.start(file)
    output, _ = process.communicate(timeout=800)
    assert process.returncode == ExitCode.TEACHER, output
    assert "TeacherNotReady" in output
    assert "nowhere" in output
    assert "starting the student" not in output
