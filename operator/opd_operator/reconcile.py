"""One pass over one job: read, observe, plan, apply. Level-triggered: any pass may be lost, repeated or cut short."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

from opd_operator.cache import Cache, JobKey
from opd_operator.claims import ClaimReader
from opd_operator.errors import ApiError, NotLeader, Unreachable
from opd_operator.events import EventReader
from opd_operator.execute import Execution, Executor, Outcome
from opd_operator.logs import log_context
from opd_operator.metrics import Metrics
from opd_operator.model import Memory
from opd_operator.observe import event_subjects, observe
from opd_operator.plan import plan
from opd_operator.recorder import Recorder
from opd_operator.settings import Settings
from opd_operator.workqueue import QueueClosed, WorkQueue

log = logging.getLogger(__name__)

#: After a refusal that is news, and after a pass that wrote: look again, so that a job always comes to rest.
NEWS_SECONDS = 0.5
#: Events are not watched: while one may come that tells what is waited for, and nothing else does, they are read so often.
EVENTS_SECONDS = 30.0
#: How long an answer "the namespace is being terminated" is believed.
TERMINATING_SECONDS = 60.0


class Election(Protocol):
    """What the workers need of the leader election."""

    elected: asyncio.Event

    @property
    def leading(self) -> bool:
        """True while writes are allowed."""
        ...


class Reconciler:
    """Holds what one process remembers of each job between two passes."""

    def __init__(
        self,
        *,
        cache: Cache,
        queue: WorkQueue[JobKey],
        executor: Executor,
        events: EventReader,
        claims: ClaimReader,
        recorder: Recorder,
        metrics: Metrics,
        settings: Settings,
        kuberay_missing: Callable[[], bool] = lambda: False,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._cache = cache
        self._queue = queue
        self._executor = executor
        self._events = events
        self._claims = claims
        self._recorder = recorder
        self._metrics = metrics
        self._settings = settings
        self._kuberay_missing = kuberay_missing
        self._now = now
        self._memories: dict[JobKey, tuple[str, Memory]] = {}
        self._terminating: dict[str, float] = {}

    async def work(self, election: Election) -> None:
        """A worker: takes keys while this process leads, until the queue closes."""
        while True:
            await election.elected.wait()
            try:
                key = await self._queue.get()
            except QueueClosed:
                return
            try:
                if election.leading:
                    await self._guarded(key)
                else:
                    self._queue.add_after(key, NEWS_SECONDS)
            finally:
                self._queue.done(key)
            # A pass that finds nothing to do waits for nothing: after a start thousands of them come in a row, and calls of
            # other passes, health checks and the Lease must not wait until the last.
            await asyncio.sleep(0)

    async def reconcile(self, key: JobKey) -> Execution:
        """One pass. Raises: ApiError, Unreachable, NotLeader when it must be made again later."""
        snapshot = self._cache.snapshot(key)
        if snapshot is None:
            self._forget(key)
            return Execution(Outcome.GONE)
        uid = snapshot.job["metadata"]["uid"]
        snapshot = await self._claims.complete(snapshot)
        snapshot = await self._events.complete(snapshot, terminating=self._is_terminating(key.namespace))
        observation = observe(snapshot, self._now(), self._memory(key, uid))
        observation = replace(observation, kuberay_missing=self._kuberay_missing())
        memory = observation.memory
        self._memories[key] = (uid, memory)
        decided = plan(observation, self._now(), self._settings)
        done = await self._executor.execute(snapshot.job, decided)
        if done.writes and decided.events and (fault := decided.diagnosis) is not None:
            words = {"class": fault.failure_class.value, "reason": fault.reason.value, "why": str(fault)}
            log.warning("diagnosis", extra=words)
        if done.namespace_terminating:
            self._terminating[key.namespace] = time.monotonic()
        after = memory.with_problems(tuple(done.problems), observation.job.generation)
        if done.rehearsed:
            after = replace(after, rehearsed=observation.job.generation)
        if done.outcome not in (Outcome.STALE, Outcome.GONE):
            after = replace(after, unwritten=done.unwritten)
        self._memories[key] = (uid, after)
        requeue_after = decided.requeue_after
        if decided.diagnosis is None and event_subjects(snapshot):
            requeue_after = min(requeue_after or EVENTS_SECONDS, EVENTS_SECONDS)
        self._again(key, done, self._memories[key][1].problems != memory.problems, requeue_after)
        return done

    def _again(self, key: JobKey, done: Execution, news: bool, requeue_after: float | None) -> None:
        if done.outcome is Outcome.GONE:
            self._forget(key)
        elif done.outcome is Outcome.STALE:
            self._queue.add(key)
        elif done.writes or done.rehearsed or news:
            calm = (done.writes or done.rehearsed) and not done.problems
            self._queue.add_after(key, 0.0 if calm else NEWS_SECONDS)
        elif requeue_after is not None:
            self._queue.add_after(key, max(requeue_after, 0.05))

    async def _guarded(self, key: JobKey) -> None:
        """One pass with its log context and metrics; a failed one is queued again after its back-off."""
        started = time.perf_counter()
        outcome = Outcome.ERROR
        job = self._cache.job(key)
        uid = job["metadata"]["uid"] if job else None
        attempt = (job.get("status") or {}).get("attempt") if job else None
        with log_context(namespace=key.namespace, job=key.name, uid=uid, attempt=attempt):
            try:
                done = await self.reconcile(key)
                outcome = done.outcome
                self._queue.forget(key)
                self._tell(key, done)
            except NotLeader as error:
                log.warning("pass given up", extra={"error": str(error)})
                self._queue.add_after(key, NEWS_SECONDS)
            except (ApiError, Unreachable) as error:
                delay = self._queue.retry(key)
                log.warning("pass failed", extra={"error": str(error), "retrySeconds": round(delay, 1)})
            except Exception:
                delay = self._queue.retry(key)
                log.exception("pass failed by a fault of ours", extra={"retrySeconds": round(delay, 1)})
        self._metrics.reconcile_seconds.labels(outcome=outcome.value).observe(time.perf_counter() - started)

    def _tell(self, key: JobKey, done: Execution) -> None:
        if done.writes:
            job = self._cache.job(key) or {}
            phase = (job.get("status") or {}).get("phase")
            log.info("pass", extra={"outcome": done.outcome.value, "writes": done.writes, "phase": phase})
        for problem in done.problems:
            found = {"problem": problem.kind.value, "kind": problem.ref.kind, "object": problem.ref.name}
            log.warning("write refused", extra=found | {"why": problem.message})

    def _memory(self, key: JobKey, uid: str) -> Memory:
        remembered = self._memories.get(key)
        return remembered[1] if remembered is not None and remembered[0] == uid else Memory()

    def _is_terminating(self, namespace: str) -> bool:
        since = self._terminating.get(namespace)
        if since is not None and time.monotonic() - since > TERMINATING_SECONDS:
            del self._terminating[namespace]
            return False
        return since is not None

    def _forget(self, key: JobKey) -> None:
        remembered = self._memories.pop(key, None)
        if remembered is not None:
            self._recorder.forget(remembered[0])
        self._queue.drop(key)
