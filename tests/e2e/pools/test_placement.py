"""Two GPU pools with labels and taints of their own: teachers on one, the student on the other, and nobody where he does not belong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from opd_jobs import START_DEADLINE, Watcher, tiny_job

from opd_cluster.node import POOL_LABEL

Submit = Callable[[dict[str, Any]], Watcher]
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def placed_in(pool: str, *, tolerated: bool = True) -> dict[str, Any]:
    """Placement of a role that belongs to a pool."""
    toleration = {"key": POOL_LABEL, "operator": "Equal", "value": pool, "effect": "NoSchedule"}
    return {"nodeSelector": {POOL_LABEL: pool}, **({"tolerations": [toleration]} if tolerated else {})}


def teacher(**placement: Any) -> dict[str, Any]:
    model = {"source": "/data/tiny/teacher", "dtype": "fp32"}
    return {"name": "main", "backend": "transformers", "replicas": 2, "model": model, **placement}


def nodes_of(watcher: Watcher, role: str) -> set[str]:
    return {pod["spec"].get("nodeName", "") for pod in watcher.pods(role)}


def test_teachers_run_in_their_pool_and_the_student_in_its_own(submit: Submit) -> None:
    watcher = submit(
        tiny_job(
            teachers=[teacher(**placed_in("teachers"))],
            ray={"workers": placed_in("students")},
        )
    )
    watcher.wait_phase("Training", seconds=2 * START_DEADLINE)
    assert [nodes_of(watcher, role) for role in ("teacher", "worker", "head")] == [{"gpu-0"}, {"gpu-1"}, {"cpu-0"}]
    watcher.wait_phase("Succeeded", seconds=START_DEADLINE)
    watcher.wait_free()


def test_a_role_without_the_pool_s_toleration_waits_and_says_so(submit: Submit) -> None:
    watcher = submit(
        tiny_job(
            "outsider",
            preflight={"enabled": False},
            teachers=[teacher(**placed_in("teachers", tolerated=False))],
            lifecycle={"teacherReadyDeadlineSeconds": 30},
        )
    )
    watcher.cluster.wait(
        "the job to fail", lambda: watcher.status().get("phase") == "Failed", START_DEADLINE, watcher.namespace
    )
    failed = watcher.condition("Failed")
    assert failed["reason"] == "Unschedulable"
    assert POOL_LABEL in failed["message"] or "untolerated taint" in failed["message"]
    assert "Set nodeSelector and tolerations of the role to a pool that has room." in failed["message"]
    watcher.wait_free()
