"""What interrupts a run costs at most the steps since the last checkpoint, and no sample is counted twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opd_jobs import END_DEADLINE, FREE_DEADLINE, LONG_TRAINING, START_DEADLINE, Watcher, tiny_job

Submit = Callable[[dict[str, Any]], Watcher]
pytestmark = pytest.mark.timeout(1800)
SLOW_ROLLOUT = {"maxResponseTokens": 48}


def interrupted_job(name: str = "long") -> dict[str, Any]:
    return tiny_job(name, training=LONG_TRAINING, rollout=SLOW_ROLLOUT)


def assert_continued(watcher: Watcher, steps: int = LONG_TRAINING["steps"]) -> None:  # type: ignore[assignment]
    """The run reached its end with every step once and no sample twice."""
    assert [row["step"] for row in watcher.metrics()] == list(range(1, steps + 1))
    consumed = watcher.consumed()
    assert len(consumed) == len(set(consumed)) == steps * LONG_TRAINING["promptsPerStep"]  # type: ignore[operator]


@pytest.mark.parametrize(
    "delete_options",
    [
        pytest.param((), marks=pytest.mark.long, id="delete"),
        pytest.param(("--force", "--grace-period=0"), marks=pytest.mark.smoke, id="force"),
    ],
)
def test_a_lost_head_is_replaced_by_an_attempt_from_the_checkpoint(
    submit: Submit, delete_options: tuple[str, ...]
) -> None:
    watcher = submit(interrupted_job())
    saved = watcher.wait_checkpoint()
    (head,) = watcher.pods("head")
    watcher.cluster.kubectl(
        "delete", "pod", head["metadata"]["name"], "-n", watcher.namespace, "--wait=false", *delete_options
    )
    watcher.cluster.wait("attempt 2", lambda: watcher.status().get("attempt") == 2, START_DEADLINE, watcher.namespace)
    status = watcher.wait_phase("Succeeded", seconds=START_DEADLINE + END_DEADLINE)
    assert [attempt["number"] for attempt in status["attempts"]] == [1, 2]
    second = [row for row in watcher.metrics() if row["attempt"] == 2]
    assert second, "attempt 2 made no step"
    assert second[0]["step"] > saved, "attempt 2 did not start from a checkpoint"
    assert_continued(watcher)
    watcher.wait_free()


@pytest.mark.smoke
def test_suspend_saves_and_frees_and_resume_goes_on(submit: Submit) -> None:
    watcher = submit(interrupted_job())
    watcher.wait_step(4)
    watcher.patch({"suspend": True})
    watcher.wait_phase("Suspended")
    watcher.wait_free()
    assert not watcher.cluster.get(watcher.namespace, "deployments"), "a teacher outlived the suspension"
    saved = watcher.wait_checkpoint(4)
    watcher.patch({"suspend": False})
    status = watcher.wait_phase("Succeeded", seconds=START_DEADLINE + END_DEADLINE)
    assert status.get("retries", 0) == 0, "a requested stop was counted as a failure"
    first_of_second = next(row["step"] for row in watcher.metrics() if row["attempt"] == status["attempt"])
    assert first_of_second == saved + 1, "the suspension lost a finished step"
    assert_continued(watcher)


@pytest.fixture
def gpu_node(operator: Any) -> Iterator[str]:
    """The GPU node; schedulable again afterwards."""
    name = operator.get("default", "nodes", selector="opd.dev/pool=gpu")[0]["metadata"]["name"]
    yield name
    operator.kubectl("uncordon", name)


@pytest.mark.long
def test_a_drain_of_the_gpu_node_loses_at_most_one_step(submit: Submit, gpu_node: str) -> None:
    watcher = submit(interrupted_job())
    watcher.wait_step(5)
    watcher.cluster.kubectl(
        "drain", gpu_node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=180s", timeout=200
    )
    at_drain = watcher.metrics()[-1]["step"]
    watcher.cluster.kubectl("uncordon", gpu_node)
    status = watcher.wait_phase("Succeeded", seconds=START_DEADLINE + END_DEADLINE)
    first_of_last = next(row["step"] for row in watcher.metrics() if row["attempt"] == status["attempt"])
    assert first_of_last >= at_drain, (
        f"step {at_drain} was finished before the drain, the next attempt began at {first_of_last}"
    )
    assert_continued(watcher)


@pytest.fixture
def operator_absent(operator: Any) -> Iterator[Callable[[], None]]:
    """Scale the operator to nothing; it is back after the test."""
    deployment = ["-n", "opd-system", "deployment", "-l", "app.kubernetes.io/name=opd-operator"]

    def remove() -> None:
        operator.kubectl("scale", "--replicas=0", *deployment)
        operator.wait(
            "the operator to be gone",
            lambda: not operator.get("opd-system", "pods", selector="app.kubernetes.io/name=opd-operator"),
            FREE_DEADLINE,
        )

    yield remove
    operator.kubectl("scale", "--replicas=1", *deployment)
    operator.kubectl("rollout", "status", *deployment, "--timeout=120s", timeout=130)


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("Checking", marks=pytest.mark.long),
        pytest.param("StartingTeachers", marks=pytest.mark.long),
        pytest.param("ProbingTeachers", marks=pytest.mark.long),
        pytest.param("StartingStudent", marks=pytest.mark.long),
        pytest.param("Training", marks=pytest.mark.smoke),
    ],
)
def test_deletion_frees_everything_while_the_operator_is_away(
    submit: Submit, operator_absent: Callable[[], None], phase: str
) -> None:
    watcher = submit(interrupted_job())
    watcher.wait_phase(phase, seconds=START_DEADLINE)
    operator_absent()
    grace = max((pod["spec"].get("terminationGracePeriodSeconds", 30) for pod in watcher.pods()), default=30)
    watcher.cluster.kubectl("delete", "opdjob", watcher.name, "-n", watcher.namespace, "--wait=false")
    started = time.monotonic()
    watcher.cluster.wait(
        "every pod of the job to be gone", lambda: not watcher.pods(), grace + FREE_DEADLINE, watcher.namespace
    )
    assert time.monotonic() - started <= grace + 30
