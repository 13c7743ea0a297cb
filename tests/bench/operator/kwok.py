"""Whole lives with pods that are scheduled to nodes: the real scheduler, kwok's nodes, KubeRay and trainer played.

A closed loop: as many jobs live at once as the pool is meant for, and the next one is created when one has ended.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from operator_api import Api
from operator_jobs import eventually, free_port
from played import Player
from processes import HERE, cpu_seconds, our_operator, process, resident_mib
from stage import Stage, job, percentile, together
from watching import POD, watching

from opd_api.vocabulary import Label, Role
from opd_cluster import cluster as clusters
from opd_cluster import parts

Manifest = dict[str, Any]
NODES = 20
GPUS = 8
#: Jobs that live at the same time: each holds two teachers and a worker, so that they fit into the pool with room to spare.
ALIVE = 32
LATE_SECONDS = 180.0
ON_ACCELERATORS = (Role.TEACHER, Role.WORKER)


async def measure_kwok(stage: Stage) -> dict[str, Any]:
    """Lives a minute, latencies, and what is left on the nodes at the end."""
    namespace, count = stage.namespace("kwok"), stage.sizes.kwok
    names = [f"kwok{number:03d}" for number in range(count)]
    _make_claim(stage, namespace)
    await _make_nodes(stage)
    pods = Pods()
    options = (
        "--manage-all-nodes=true",
        "--node-ip",
        stage.layout.api_address,
        "--config",
        str(HERE / "kwok-stages.yaml"),
    )
    command = (str(parts.binary(parts.KWOK)), "--kubeconfig", str(stage.kubeconfig), *options)
    command += ("--server-address", f"127.0.0.1:{free_port()}")
    with (
        process(command, {}, stage.logs / "kwok.log"),
        our_operator(stage.kubeconfig, namespace, stage.logs / "kwok-operator.log") as ours,
    ):
        await eventually("ready", ours.ready, seconds=60)
        async with (
            watching(stage.api, namespace, (POD,), pods.tell),
            Player(stage.api, namespace, kubelet=False).playing() as player,
        ):
            began, spent = time.perf_counter(), cpu_seconds(ours.pid)
            await together(names, lambda name: _live(stage.api, namespace, name, player), ALIVE)
            took, spent = time.perf_counter() - began, cpu_seconds(ours.pid) - spent
            await eventually("no accelerator is held", pods.released, seconds=60, state=pods.held)
            await ours.rest(5.0)
        calls, mib = await ours.calls(), resident_mib(ours.pid)
    lives = [player.lives[name] for name in names]
    next_step, release = [life.to_next_step for life in lives], [life.to_release for life in lives]
    return {
        "jobs": count,
        "pods": len(pods.seen),
        "bound_to_nodes": len(pods.bound),
        "seconds": took,
        "jobs_a_minute": 60 * count / took,
        "not_succeeded": sum(not life.succeeded.is_set() for life in lives),
        "accelerator_pods_left": len(await pods.held()),
        "next_step_p99_seconds": percentile(next_step, 0.99),
        "next_step_p50_seconds": statistics.median(next_step),
        "release_p99_seconds": percentile(release, 0.99),
        "release_p50_seconds": statistics.median(release),
        "operator_cpu_seconds_a_job": spent / count,
        "operator_mib": mib,
        "writes_a_job": calls.writes / count,
        "reads_a_job": calls.reads / count,
    }


class Pods:
    """Pods of the jobs, from the watch."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.bound: set[str] = set()
        self._held: set[str] = set()

    def tell(self, at: float, change: str, found: Manifest) -> None:
        """From the watch."""
        uid = found["metadata"]["uid"]
        self.seen.add(uid)
        if found["spec"].get("nodeName"):
            self.bound.add(uid)
        if change == "DELETED":
            self._held.discard(uid)
        elif found["metadata"]["labels"].get(Label.ROLE.value) in ON_ACCELERATORS:
            self._held.add(uid)

    async def held(self) -> list[str]:
        """Pods that hold accelerators."""
        return sorted(self._held)

    async def released(self) -> bool:
        """Whether there is none."""
        return not self._held


async def _live(api: Api, namespace: str, name: str, player: Player) -> None:
    life = player.lives[name]
    life.may_end.set()
    await api.create(job(namespace, name))
    async with asyncio.timeout(LATE_SECONDS):
        await life.succeeded.wait()


async def _make_nodes(stage: Stage) -> None:
    room = {"cpu": "512", "memory": "4Ti", "pods": "500", "nvidia.com/gpu": str(GPUS), "ephemeral-storage": "4Ti"}
    for number in range(NODES):
        name = f"kwok-{number}"
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name}}
        status = {"allocatable": room, "capacity": room}
        await stage.api.post(
            "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}
        )


def _make_claim(stage: Stage, namespace: str) -> None:
    """A bound claim `data`, without which the scheduler places no pod of a job."""
    clusters.kubectl(stage.layout, "apply", "-f", "-", input_text=_CLAIM.format(namespace=namespace))


_CLAIM = """
apiVersion: v1
kind: PersistentVolume
metadata: {{name: {namespace}-data}}
spec:
  accessModes: [ReadWriteMany]
  capacity: {{storage: 1Ti}}
  storageClassName: none
  hostPath: {{path: /data}}
  claimRef: {{namespace: {namespace}, name: data}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: data, namespace: {namespace}}}
spec:
  accessModes: [ReadWriteMany]
  storageClassName: none
  volumeName: {namespace}-data
  resources: {{requests: {{storage: 1Ti}}}}
"""
