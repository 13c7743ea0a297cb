"""helm upgrade in the middle of a run touches nothing; uninstall and install again lose nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opd_jobs import END_DEADLINE, FREE_DEADLINE, LONG_TRAINING, START_DEADLINE, Watcher, tiny_job

from opd_cluster import addons

Submit = Callable[[dict[str, Any]], Watcher]
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
OPERATOR = "app.kubernetes.io/name=opd-operator"
CHILDREN = "deployments,rayjobs,configmaps,services,secrets,jobs,pods"


@pytest.fixture
def embedded(operator: Any) -> Iterator[Any]:
    """The cluster with our chart, installed by this program; as it was after the test."""
    if operator.layout is None:
        pytest.skip("the chart of a cluster of yours is left alone")
    yield operator
    addons.install_operator(operator.layout)


def operator_pods(cluster: Any) -> set[str]:
    return {pod["metadata"]["uid"] for pod in cluster.get(addons.OPERATOR_NAMESPACE, "pods", selector=OPERATOR)}


def uids(watcher: Watcher) -> dict[str, str]:
    """Every object of the job by kind and name; pods without the checks that end by themselves."""
    found = watcher.cluster.get(watcher.namespace, CHILDREN, selector=f"opd.dev/job={watcher.name}")
    return {f"{o['kind']}/{o['metadata']['name']}": o["metadata"]["uid"] for o in found}


def test_a_running_job_survives_upgrade_uninstall_and_install(embedded: Any, submit: Submit) -> None:
    watcher = submit(tiny_job("long", training=LONG_TRAINING, rollout={"maxResponseTokens": 48}))
    watcher.wait_step(3)
    before, old_operator = uids(watcher), operator_pods(embedded)

    addons.install_operator(embedded.layout, "podAnnotations.opd\\.dev/test=upgraded")
    embedded.wait("the old operator to go", lambda: not old_operator & operator_pods(embedded), FREE_DEADLINE)
    now = watcher.step()
    watcher.wait_step(now + 3)
    assert uids(watcher).items() >= before.items(), "the upgrade replaced an object of a running job"

    addons.helm(embedded.layout, "uninstall", "opd-operator", "--namespace", addons.OPERATOR_NAMESPACE, "--wait")
    embedded.wait("the operator to go", lambda: not operator_pods(embedded), FREE_DEADLINE)
    here = watcher.object()["metadata"]
    assert "deletionTimestamp" not in here
    assert not here.get("finalizers")
    crd = embedded.get("default", "crd", "opdjobs.opd.dev")["metadata"]
    assert "deletionTimestamp" not in crd

    addons.install_operator(embedded.layout)
    status = watcher.wait_phase("Succeeded", seconds=START_DEADLINE + END_DEADLINE)
    assert status["attempt"] == 1, "the run was started anew"
    assert [row["step"] for row in watcher.metrics()] == list(range(1, LONG_TRAINING["steps"] + 1))  # type: ignore[operator]
    watcher.wait_free()
