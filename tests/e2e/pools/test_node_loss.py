"""A node is lost while the student runs on it, its kubelet dead or its cable pulled: the containers run on, and no kubelet ends them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from opd_jobs import START_DEADLINE, Watcher, tiny_job

from opd_cluster import full, network, node
from opd_cluster.node import POOL_LABEL

Submit = Callable[[dict[str, Any]], Watcher]
pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]
STUDENTS = "students"
#: More than anybody makes here: the job is suspended when enough was seen.
STEPS = 5000
PROMPTS = 8
#: The node controller waits its 50 s, the pods 5 s more, the operator for last words and then for the old pods.
NOTICED_SECONDS = 300.0


@dataclass(frozen=True)
class Loss:
    """How a node is lost, and what its trainer is known by when it has ended."""

    lose: Callable[[node.Node], None]
    find: Callable[[node.Node], None]
    #: Words of the old trainer's log.
    ends_with: str


LOSSES = {
    # Ray still answers: KubeRay asks it to stop, and the trainer saves its last step.
    "kubelet dead": Loss(node.kill_kubelet, node.run_kubelet, "stop requested by signal"),
    # Nobody reaches the trainer, and nothing keeps it from its storage: only the mark of the younger attempt stops it.
    "cable pulled": Loss(
        lambda lost: network.cut(lost.layout, lost.position),
        lambda lost: network.mend(lost.layout, lost.position),
        "stops without writing",
    ),
}


@pytest.fixture(params=LOSSES.values(), ids=LOSSES.keys())
def loss(request: pytest.FixtureRequest) -> Loss:
    found: Loss = request.param
    return found


@pytest.fixture
def dying_node(operator: Any, loss: Loss) -> Iterator[node.Node]:
    """The node of the students; it is back afterwards and its kubelet has cleaned up."""
    shape = full.cluster.recorded_shape(operator.layout)
    assert shape is not None
    found = next(member for member in full.nodes(operator.layout, shape) if member.gpu_pool == STUDENTS)

    def ready() -> bool:
        conditions = operator.get("default", "node", found.name)["status"]["conditions"]
        return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)

    yield found
    if not ready():
        loss.find(found)
    operator.wait(f"{found.name} is back", ready, 120)


def placement(*, prefers: str = "") -> dict[str, Any]:
    """Any GPU node, one pool rather than the other; a node that is silent is left after seconds instead of minutes."""
    # By name: whoever tolerates every taint is sent back to the dead node.
    tolerations: list[dict[str, Any]] = [
        {"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in (POOL_LABEL, "nvidia.com/gpu")
    ]
    for key in ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"):
        tolerations.append({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5})
    term = {"matchExpressions": [{"key": POOL_LABEL, "operator": "In", "values": [prefers]}]}
    preferred = [{"weight": 100, "preference": term}]
    return {
        "nodeSelector": {"opd.dev/pool": "gpu"},
        "tolerations": tolerations,
        **({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}} if prefers else {}),
    }  # fmt: skip


def test_a_lost_node_is_one_failure_of_the_cluster_and_its_trainer_writes_no_more(
    submit: Submit, dying_node: node.Node, loss: Loss
) -> None:
    # In the trainer's own processes: a server on the other node would be missed before the fence is seen.
    teacher = {"name": "main", "backend": "inprocess", "model": {"source": "/data/tiny/teacher", "dtype": "fp32"}}
    watcher = submit(
        tiny_job(
            "lost",
            teachers=[teacher],
            training={"steps": STEPS, "promptsPerStep": PROMPTS, "checkpoint": {"everySteps": 3}},
            rollout={"maxResponseTokens": 48},
            ray={"head": placement(prefers=STUDENTS), "workers": placement(prefers=STUDENTS)},
            lifecycle={"preemptionGraceSeconds": 15},
        )
    )
    saved = watcher.wait_checkpoint()
    lost = {pod["metadata"]["name"] for role in ("head", "worker") for pod in watcher.pods(role)}
    assert {pod["spec"]["nodeName"] for role in ("head", "worker") for pod in watcher.pods(role)} == {dying_node.name}
    loss.lose(dying_node)
    made: set[str] = set()

    def second_attempt() -> bool:
        jobs = watcher.ray_jobs()
        made.update(item["metadata"]["name"] for item in jobs)
        assert len(jobs) <= 1, "two RayJobs at the same time"
        return watcher.status().get("attempt") == 2

    watcher.cluster.wait("attempt 2", second_attempt, NOTICED_SECONDS, watcher.namespace)
    first = watcher.status()["attempts"][0]
    assert (first["failureClass"], first["reason"]) == ("Infrastructure", "NodeLost"), first
    assert "goes on from the last checkpoint on another node" in first["message"]
    still = {pod["metadata"]["name"] for pod in watcher.pods() if pod["spec"].get("nodeName") == dying_node.name}
    assert still & lost, "the dead node's pods were ended by somebody: nothing had to be fenced off"

    def second_steps() -> int:
        return sum(row["attempt"] == 2 for row in watcher.metrics())

    watcher.cluster.wait("attempt 2 to train", lambda: second_steps() >= 3, START_DEADLINE, watcher.namespace)

    def old_trainer_ended() -> bool:
        files = [file for file in (watcher.run_directory() / "logs" / "attempt-1").glob("*") if file.is_file()]
        return any(loss.ends_with in file.read_text(errors="replace") for file in files)

    watcher.cluster.wait("the old trainer to end", old_trainer_ended, START_DEADLINE, watcher.namespace)
    watcher.patch({"suspend": True})

    def named() -> bool:
        return f"{dying_node.name} did not end them in time" in watcher.condition("Progressing")["message"]

    watcher.cluster.wait("the lost node to be named", named, START_DEADLINE, watcher.namespace)
    loss.find(dying_node)
    status = watcher.wait_phase("Suspended")
    assert status["retries"] == 1
    assert [entry["number"] for entry in status["attempts"]] == [1, 2]
    assert made <= {"lost-1", "lost-2"}
    rows = watcher.metrics()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert next(row["step"] for row in rows if row["attempt"] == 2) > saved, "attempt 2 did not start from a checkpoint"
    consumed = watcher.consumed()
    assert len(consumed) == len(set(consumed)), "a sample was counted twice"
