"""Two jobs whose teachers keep each other's student from starting: neither waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opd_jobs import END_DEADLINE, START_DEADLINE, Watcher, tiny_job

from opd_cluster import addons

Submit = Callable[[dict[str, Any]], Watcher]
pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]
#: Of eight accelerators: three teachers each leave two, and each student needs three.
TEACHERS, ENGINES = 3, 2


@pytest.fixture
def impatient(operator: Any) -> Iterator[None]:
    """An operator that tries again after seconds instead of minutes."""
    if operator.layout is None:
        pytest.skip("the operator of a cluster of yours keeps its settings")
    addons.install_operator(
        operator.layout, "operator.capacityBackoffMinSeconds=5", "operator.capacityBackoffMaxSeconds=20"
    )
    yield
    addons.install_operator(operator.layout)


def greedy_job(name: str) -> dict[str, Any]:
    teacher = {
        "name": "main",
        "backend": "transformers",
        "replicas": TEACHERS,
        "model": {"source": "/data/tiny/teacher", "dtype": "fp32"},
    }
    return tiny_job(
        name, teachers=[teacher], rollout={"replicas": ENGINES}, lifecycle={"teacherIdleTimeoutSeconds": 20}
    )


def test_of_two_jobs_that_hold_what_the_other_needs_both_end(impatient: None, submit: Submit) -> None:
    watchers = [submit(greedy_job(name)) for name in ("first", "second")]
    cluster, namespace = watchers[0].cluster, watchers[0].namespace

    def both_hold() -> bool:
        return all(watcher.ray_jobs() for watcher in watchers)

    released: set[str] = set()

    def ended() -> bool:
        for watcher in watchers:
            status = watcher.status()
            assert status.get("phase") != "Failed", watcher.condition("Failed")
            if status.get("phase") == "Pending" and status.get("attempts"):
                released.add(watcher.name)
        return all(watcher.status().get("phase") == "Succeeded" for watcher in watchers)

    cluster.wait("both students to be asked for", both_hold, START_DEADLINE, namespace)
    cluster.wait("both jobs to succeed", ended, 2 * (START_DEADLINE + END_DEADLINE), namespace)
    assert released, "nobody gave its teachers back; the two jobs never stood in each other's way"
    for watcher in watchers:
        assert watcher.status().get("retries", 0) == 0, "waiting for capacity was counted as a failure"
        watcher.wait_free()
