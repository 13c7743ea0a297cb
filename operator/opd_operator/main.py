"""The operator's process: settings, cluster, feed, workers, election, endpoints, and a clean end on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from opd_api.v1alpha1.enums import Device
from opd_api.v1alpha1.placement import accelerator_resource_of
from opd_operator.cache import Cache, JobKey
from opd_operator.claims import ClaimReader
from opd_operator.cluster import Cluster
from opd_operator.events import EventReader
from opd_operator.execute import Executor
from opd_operator.feed import Feed
from opd_operator.health import HealthServer, Vital
from opd_operator.leader import AlwaysLeading, LeaderElection, LeaseSettings
from opd_operator.logs import configure
from opd_operator.metrics import JobSample, Metrics, PhaseClock, teachers_ready
from opd_operator.model import Kind, Manifest
from opd_operator.observe_children import accelerator_units, is_active
from opd_operator.reconcile import Reconciler
from opd_operator.recorder import Recorder
from opd_operator.settings import Settings, SettingsError
from opd_operator.workqueue import WorkQueue

log = logging.getLogger(__name__)

#: How long running passes may take to finish after SIGTERM; they are short, and any of them may be cut.
DRAIN_SECONDS = 5.0
#: The API server stores templates of 10,000 levels, and one that cannot be decoded spoils the list of every job: with Python's
#: limit of 1,000 it would end this process, and the next one.
RECURSION_LIMIT = 25_000
REVERSE_KL = "opd_reverse_kl"


class Operator:
    """Everything of one process, so that tests can run several in one loop."""

    def __init__(self, settings: Settings, cluster: Cluster, metrics: Metrics) -> None:
        self.settings = settings
        self.cluster = cluster
        self.metrics = metrics
        self.cache = Cache()
        self.queue: WorkQueue[JobKey] = WorkQueue(observer=metrics)
        self.recorder = Recorder(cluster, instance=settings.identity)
        self.feed = Feed(cluster=cluster, cache=self.cache, queue=self.queue, metrics=metrics, settings=settings)
        self.election = self._election()
        self.reconciler = Reconciler(
            cache=self.cache,
            queue=self.queue,
            executor=Executor(cluster=cluster, cache=self.cache, recorder=self.recorder, metrics=metrics),
            events=EventReader(cluster),
            claims=ClaimReader(cluster),
            recorder=self.recorder,
            metrics=metrics,
            settings=settings,
            kuberay_missing=lambda: self.feed.kuberay_missing,
        )
        self.health = HealthServer(
            metrics=metrics,
            vital=self._vital,
            watch_ages=self.feed.ages.by_name,
            watch_stale_seconds=settings.watch_stale_seconds,
            port=settings.http_port,
        )
        self.port = 0
        self._phase_clock = PhaseClock()
        metrics.export_jobs(self._samples)
        cluster.may_write = lambda: self.election.leading

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop` is set or a task ends that must not end (its error is raised)."""
        self.port = await self.health.start()
        feed = asyncio.create_task(self.feed.run(), name="feed")
        election = asyncio.create_task(self._lead(), name="election")
        workers = [
            asyncio.create_task(self.reconciler.work(self.election), name=f"worker-{number}")
            for number in range(self.settings.workers)
        ]
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            done, _ = await asyncio.wait({feed, election, stopping, *workers}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                log.error("a task ended that must not end", extra={"task": task.get_name()})
                task.result()
        finally:
            await self._shut_down(feed, election, workers, stopping)

    async def _lead(self) -> None:
        await self.feed.synced.wait()
        await self.election.run()

    async def _shut_down(
        self,
        feed: asyncio.Task[None],
        election: asyncio.Task[None],
        workers: list[asyncio.Task[None]],
        stopping: asyncio.Task[Any],
    ) -> None:
        """Finish the passes that run, then hand over the Lease, then let go of the watches."""
        log.info("stopping")
        self.queue.close()
        waiting = not self.election.elected.is_set()
        busy = {worker for worker in workers if not worker.done()} if not waiting else set()
        if busy:
            await asyncio.wait(busy, timeout=DRAIN_SECONDS)
        for task in (election, stopping, *workers):
            task.cancel()
        await asyncio.gather(election, stopping, *workers, return_exceptions=True)
        await self.election.release()
        feed.cancel()
        await asyncio.gather(feed, return_exceptions=True)
        await self.health.stop()
        log.info("stopped")

    def _election(self) -> LeaderElection | AlwaysLeading:
        settings = self.settings
        if not settings.leader_election:
            return AlwaysLeading(self._on_leading)
        lease = LeaseSettings(
            namespace=settings.lease_namespace,
            name=settings.lease_name,
            identity=settings.identity,
            duration_seconds=settings.lease_duration_seconds,
            renew_seconds=settings.lease_renew_seconds,
            retry_seconds=settings.lease_retry_seconds,
        )
        return LeaderElection(self.cluster, lease, on_change=self._on_leading)

    def _on_leading(self, leading: bool) -> None:
        self.metrics.leader.set(int(leading))
        if leading:
            self.feed.enqueue_all()

    def _vital(self) -> Vital:
        return Vital(
            synced=self.feed.synced.is_set(),
            oldest_watch_seconds=self.feed.ages.oldest,
            longest_pass_seconds=self.queue.longest_processing_seconds,
        )

    def _samples(self) -> Iterator[JobSample]:
        """Of the leader alone: every replica knows all jobs, and a sum over replicas would count them again."""
        jobs = list(self.cache.jobs()) if self.election.leading else []
        self._phase_clock.keep({job["metadata"]["uid"] for _, job in jobs})
        for key, job in jobs:
            yield self._sample(key, job)

    def _sample(self, key: JobKey, job: Manifest) -> JobSample:
        status: Manifest = job.get("status") or {}
        training: Manifest = status.get("training") or {}
        phase = status.get("phase") or "Pending"
        moments = [condition["lastTransitionTime"] for condition in status.get("conditions") or ()]
        changed = max((datetime.fromisoformat(moment).timestamp() for moment in moments), default=None)
        return JobSample(
            namespace=key.namespace,
            name=key.name,
            phase=phase,
            seconds_in_phase=self._phase_clock.seconds(job["metadata"]["uid"], phase, changed),
            step=training.get("step"),
            reverse_kl=(training.get("metrics") or {}).get(REVERSE_KL),
            teachers_ready=teachers_ready(status.get("teachersReady")),
            accelerators=self._accelerators(key, job),
        )

    def _accelerators(self, key: JobKey, job: Manifest) -> int:
        runtime: Manifest = (job.get("spec") or {}).get("runtime") or {}
        resource = accelerator_resource_of(runtime.get("acceleratorResource"), runtime.get("device", Device.CUDA))
        pods = [pod for pod in self.cache.children(key, Kind.POD) if is_active(pod)]
        return sum(accelerator_units(pod, resource) for pod in pods) if resource else 0


async def operate(settings: Settings) -> None:
    """Runs one operator until SIGTERM or SIGINT."""
    metrics = Metrics()
    cluster = await Cluster.connect(observer=metrics, timeout_seconds=settings.api_timeout_seconds)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await Operator(settings, cluster, metrics).run(stop)
    finally:
        await cluster.close()


def main() -> None:
    """Entry point `opd-operator`. Exit code 2 for settings that cannot be used."""
    try:
        settings = Settings.from_environment(os.environ)
    except SettingsError as error:
        sys.exit(f"opd-operator: {error}")
    configure(settings.log_level)
    log.info("starting", extra={"namespaces": settings.watch_namespaces or "all", "identity": settings.identity})
    sys.setrecursionlimit(RECURSION_LIMIT)
    asyncio.run(operate(settings))
