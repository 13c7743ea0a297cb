"""Teacher and student rollouts served by the real SGLang 0.5.23 in one OPDJob (CPU, with the stand-in for its kernels)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from opd_jobs import END_DEADLINE, START_DEADLINE, Watcher, tiny_job

Submit = Callable[[dict[str, Any]], Watcher]
#: Two SGLang servers import and start at the same time on two cores.
SERVER_SECONDS = 900


def container(name: str, image: str, standin: str) -> dict[str, Any]:
    """A pod template that changes nothing but the image and where Python looks first."""
    entry = {"name": name, "image": image, "env": [{"name": "PYTHONPATH", "value": standin}]}
    return {"spec": {"containers": [entry]}}


@pytest.mark.sglang
@pytest.mark.timeout(2400)
def test_sglang_serves_teacher_and_rollouts_of_a_job(
    submit: Submit, sglang_image: str, sgl_kernel_standin: str
) -> None:
    teacher = {
        "name": "main",
        "backend": "sglang",
        "image": sglang_image,
        "model": {"source": "/data/tiny/teacher", "dtype": "fp32"},
        "template": container("teacher", sglang_image, sgl_kernel_standin),
    }
    watcher = submit(
        tiny_job(
            teachers=[teacher],
            rollout={"engine": "sglang"},
            # The correction makes the learner compare its log-probabilities with the engine's.
            training={"rolloutCorrection": {"type": "tis"}},
            ray={"workers": {"template": container("ray-worker", sglang_image, sgl_kernel_standin)}},
            lifecycle={"teacherReadyDeadlineSeconds": SERVER_SECONDS, "preRunningDeadlineSeconds": SERVER_SECONDS},
        )
    )
    watcher.wait_phase("Training", seconds=SERVER_SECONDS)
    log = watcher.cluster.kubectl("logs", "-n", watcher.namespace, watcher.pods("teacher")[0]["metadata"]["name"])
    assert "sglang" in log.lower(), "the teacher pod is not SGLang"
    status = watcher.wait_phase("Succeeded", seconds=START_DEADLINE + END_DEADLINE)
    assert status["stepProgress"] == "4/4"
    engines = sorted(path.name for path in watcher.run_directory().rglob("engine-*.log"))
    assert engines, "the student's SGLang left no log"
    rows = watcher.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # Every publish reached the engine: its log-probabilities are the learner's.
    assert [row["mismatch_abs"] for row in rows] == pytest.approx([0.0] * 4, abs=1e-3)
    watcher.wait_free()
