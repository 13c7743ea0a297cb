"""One OPDJob, applied to a real cluster, ends as a distilled student; teachers come first and go early."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opd_jobs import ROOT, START_DEADLINE, TRAINER_PYTHON, Watcher, moment, tiny_job

Submit = Callable[[dict[str, Any]], Watcher]
ORDER = [
    "Pending",
    "Checking",
    "StartingTeachers",
    "ProbingTeachers",
    "StartingStudent",
    "Training",
    "Finishing",
    "Succeeded",
]


def outside_kl(student: Path, teacher: Path, prompts: Path) -> float:
    """Full-vocabulary reverse KL measured by a plain program that knows nothing of the product."""
    command = [TRAINER_PYTHON, ROOT / "tests/support/outside_kl.py", student, teacher, prompts]
    return float(subprocess.run(command, check=True, text=True, capture_output=True, timeout=300).stdout)


def last_teacher_ready(watcher: Watcher, seen: dict[str, str]) -> None:
    """Remember when each teacher pod became Ready; pods are gone at the end."""
    for pod in watcher.pods("teacher"):
        for condition in pod["status"].get("conditions", []):
            if condition["type"] == "Ready" and condition["status"] == "True":
                seen.setdefault(pod["metadata"]["name"], condition["lastTransitionTime"])


@pytest.mark.smoke
@pytest.mark.timeout(1200)
def test_a_job_ends_as_a_student_that_is_closer_to_its_teacher(submit: Submit, tiny_files: Path) -> None:
    watcher = submit(tiny_job(training={"steps": 12}))
    phases: list[str] = []
    ready: dict[str, str] = {}
    created: set[str] = set()
    deadline = time.monotonic() + 2 * START_DEADLINE

    def ended() -> bool:
        last_teacher_ready(watcher, ready)
        created.update(ray_job["metadata"]["creationTimestamp"] for ray_job in watcher.ray_jobs())
        phase = watcher.status().get("phase", "Pending")
        if phases[-1:] != [phase]:
            phases.append(phase)
        return phase in ("Succeeded", "Failed")

    watcher.cluster.wait("the job to end", ended, deadline - time.monotonic(), watcher.namespace)
    assert phases[-1] == "Succeeded", watcher.status()
    assert phases == [phase for phase in ORDER if phase in phases], f"phases out of order: {phases}"
    assert {"StartingTeachers", "Training"} <= set(phases)

    assert ready, "no teacher pod was ever seen ready"
    assert len(created) == 1, "one attempt makes one RayJob"
    assert moment(created.pop()) >= max(map(moment, ready.values()))

    status = watcher.status()
    assert status["stepProgress"] == "12/12"
    assert status["teachersReady"]
    for kind in ("Accepted", "InputsChecked", "TeachersProbed", "CheckpointAvailable", "Succeeded"):
        assert watcher.condition(kind)["status"] == "True", kind
    watcher.wait_free()
    watcher.cluster.kubectl(
        "wait", "--for=condition=ResourcesReleased", f"opdjob/{watcher.name}", "-n", watcher.namespace, "--timeout=60s"
    )

    metrics = watcher.metrics()
    assert [row["step"] for row in metrics] == list(range(1, 13))
    run = watcher.run_directory()
    exported = run / Path(status["result"]["exportedModel"]).relative_to(
        Path("/data/opd") / watcher.namespace / run.name
    )
    report = run / "report"
    assert any(report.glob("*.html")), "no report was written"
    prompts = tiny_files / "prompts.jsonl"
    before = outside_kl(tiny_files / "student", tiny_files / "teacher", prompts)
    after = outside_kl(exported, tiny_files / "teacher", prompts)
    assert after < 0.95 * before, f"reverse KL from outside: {before:.3f} before, {after:.3f} after"


@pytest.mark.smoke
@pytest.mark.timeout(900)
def test_no_ray_job_exists_while_a_teacher_never_gets_ready(submit: Submit) -> None:
    broken = {
        "name": "main",
        "backend": "transformers",
        "model": {"source": "/data/tiny/teacher", "dtype": "fp32"},
        "template": {
            "spec": {
                "containers": [{"name": "teacher", "command": ["sh", "-c", "echo the weights are cursed; exit 3"]}]
            }
        },
    }
    watcher = submit(tiny_job(teachers=[broken], lifecycle={"teacherReadyDeadlineSeconds": 60}))

    def failed() -> bool:
        assert not watcher.ray_jobs(), "a RayJob exists though no teacher was ever ready"
        return watcher.status().get("phase") == "Failed"

    watcher.cluster.wait("the job to fail", failed, START_DEADLINE, watcher.namespace)
    assert not watcher.ray_jobs()
    message = watcher.condition("Failed")
    assert "the weights are cursed" in message["message"], message
    watcher.wait_free()


@pytest.mark.smoke
@pytest.mark.timeout(1200)
def test_two_teachers_score_the_samples_of_their_data_source(submit: Submit) -> None:
    teachers = [
        {"name": name, "backend": "transformers", "model": {"source": f"/data/tiny/{folder}", "dtype": "fp32"}}
        for name, folder in (("first", "teacher"), ("second", "teacher2"))
    ]
    watcher = submit(
        tiny_job(
            teachers=teachers,
            routing={"map": {"even": "first", "odd": "second"}},
            distillation={"signal": "advantage", "tokenSelection": None, "topK": None},
            training={"steps": 3, "promptsPerStep": 8},
        )
    )
    watcher.wait_phase("Succeeded", seconds=2 * START_DEADLINE)
    row = watcher.metrics()[-1]
    assert {name for name in row if name.startswith("opd_reverse_kl/teacher/")} == {
        "opd_reverse_kl/teacher/first",
        "opd_reverse_kl/teacher/second",
    }

    lines = (watcher.run_directory() / "logs" / "samples.jsonl").read_text().splitlines()
    routed = {(record["data_source"], record["teacher"]) for record in map(json.loads, lines)}
    assert routed == {("even", "first"), ("odd", "second")}
