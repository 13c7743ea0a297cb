"""What every case stands on: the control plane, the administrator's access, sizes, and how jobs are made."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from operator_api import Api
from operator_jobs import document

from opd_cluster import cluster as clusters
from opd_cluster.layout import Layout

Manifest = dict[str, Any]
#: Jobs that are in the making at the same time, and workers of the operator.
TOGETHER = 8
#: Kubernetes lets each of its controllers make 20 calls a second, which would be what is measured.
CONTROLLER_QPS = 1000


@dataclass(frozen=True)
class Sizes:
    """How much of each case is run."""

    #: Jobs at two a second whose children are applied, and again as many at once.
    applied: int = 100
    #: Ended jobs of the cold start.
    ended: int = 5000
    #: Jobs that live from beginning to end, at two a second.
    lives: int = 100
    #: How long they are left alone while they train.
    idle_seconds: float = 120.0
    #: Training of the job whose writes are counted.
    training_seconds: float = 95.0
    #: Jobs that are created and deleted, and how long that may take: a busy machine does not get to the end.
    cycles: int = 10_000
    cycle_seconds: float = 3600.0
    #: RayJobs for KubeRay, OPDJobs for us.
    ray_jobs: int = 100
    #: Jobs whose passes are profiled.
    profiled: int = 30
    #: Jobs on kwok's nodes.
    kwok: int = 200


SMALL = Sizes(10, 200, 10, 15.0, 35.0, 300, 100.0, 10, 5, 10)


@dataclass(frozen=True)
class Stage:
    """A running control plane."""

    layout: Layout
    api: Api
    sizes: Sizes
    #: Where processes write.
    logs: Path

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.layout.kubeconfig

    def namespace(self, name: str) -> str:
        """A new namespace."""
        clusters.kubectl(self.layout, "create", "namespace", name)
        return name


def job(namespace: str, name: str, **sections: Any) -> Manifest:
    """A job with two teachers, input check and probe, as people write them."""
    names = ("code", "math")
    teachers = [{"name": one, "backend": "transformers", "model": {"source": f"/data/{one}"}} for one in names]
    routing = {"map": {"a": "code", "b": "math"}}
    lifecycle = {"heartbeatTimeoutSeconds": 3600, "stallTimeoutSeconds": 3600}
    sections = {"teachers": teachers, "routing": routing, "lifecycle": lifecycle, **sections}
    return document(namespace, name, **sections)


def unchecked(namespace: str, name: str) -> Manifest:
    """Two teachers and no input check: everything up to the teachers is made without a node."""
    return job(namespace, name, preflight={"enabled": False})


def short_lived(namespace: str, name: str) -> Manifest:
    """Somebody else's teacher and no check: its RayJob is made in the first passes."""
    teacher = {"name": "far", "endpoints": ["http://teacher.example:30000"], "maxContextTokens": 8192}
    return document(namespace, name, teachers=[teacher], preflight={"enabled": False})


async def paced(names: Iterable[str], each: Callable[[str], Awaitable[Any]], a_second: float = 2.0) -> dict[str, float]:
    """Does it for one name after the other at that pace; when each began."""
    began: dict[str, float] = {}
    first = time.perf_counter()
    for number, name in enumerate(names):
        await asyncio.sleep(max(0.0, first + number / a_second - time.perf_counter()))
        began[name] = time.perf_counter()
        await each(name)
    return began


async def together(names: Iterable[str], each: Callable[[str], Awaitable[Any]], limit: int = TOGETHER) -> None:
    """Does it for all names, `limit` of them at a time."""
    waiting = iter(names)

    async def work() -> None:
        for name in waiting:
            await each(name)

    await asyncio.gather(*(work() for _ in range(limit)))


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that at least this share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
