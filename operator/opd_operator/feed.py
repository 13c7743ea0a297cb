"""The ONLY file that imports kopf: raw watch events into the cache and the work queue.

kopf gives watch streams that reconnect, authenticate again and survive dead connections. Nothing else of it is used: no
state in annotations, no finalizers, no timers, no indices, no events. Two things it does not give are here:

- Deletions that happen before or while kopf lists a kind are never reported, so a list of ours follows each of its lists once
  its watch is open, and a full list of every kind every few minutes. The first one fills the cache and makes the operator
  ready. So kopf's lists are needed for their version alone: with their items it would hold every object once more, untrimmed
  and with a task for each.
- Its runtime ends with the first unexpected error, and stops every task of the loop it runs in. So it gets a thread and a
  loop of its own, is started again after a pause, and hands events over with call_soon_threadsafe.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import kopf

from opd_api.vocabulary import Label
from opd_operator.cache import Cache, Change, JobKey, Urgency, at_rest, has_ended, trim
from opd_operator.cluster import CallObserver, Cluster
from opd_operator.errors import ApiError, Unreachable
from opd_operator.metrics import Metrics
from opd_operator.model import Kind, Manifest
from opd_operator.resources import CHILDREN, OPDJOB, WATCHED, Resource
from opd_operator.settings import Settings
from opd_operator.watch_ages import Pulse, WatchAges, version_of, watch_name
from opd_operator.workqueue import WorkQueue

log = logging.getLogger(__name__)

#: Heartbeats without news are looked at together, this long after the first of them.
HEARTBEAT_PASS_SECONDS = 30.0
#: How often a kind that the cluster does not serve is asked for again.
MISSING_KIND_SECONDS = 10.0
_RESTART_PAUSE_SECONDS = (1.0, 60.0)
Event = tuple[Resource, str | None, Manifest]


class Feed:
    """Keeps the cache and the queue fed. `run` never returns unless cancelled."""

    def __init__(
        self, *, cluster: Cluster, cache: Cache, queue: WorkQueue[JobKey], metrics: Metrics, settings: Settings
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._queue = queue
        self._metrics = metrics
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._restart = asyncio.Event()
        self._relisted: asyncio.Queue[Resource] = asyncio.Queue()
        self.ages = WatchAges()
        self.missing: set[Resource] = set()
        #: Set when every kind that is served was listed once.
        self.synced = asyncio.Event()

    @property
    def kuberay_missing(self) -> bool:
        """The cluster does not serve RayJobs."""
        return CHILDREN[Kind.RAY_JOB] in self.missing

    async def run(self) -> None:
        """Lists, watches, lists again every `resync_seconds`; starts the watches anew when they end."""
        await self._first_list()
        self.synced.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_for_ever())
            group.create_task(self._list_for_ever())
            group.create_task(self._list_after_kopf())
            group.create_task(self._ask_for_missing_kinds())

    async def list_all(self) -> None:
        """One full list of every kind: repairs the cache and queues the jobs that changed. Raises ApiError, Unreachable."""
        for resource in WATCHED:
            await self._list(resource)

    def enqueue_all(self) -> None:
        """Queues every job."""
        for key, _ in self._cache.jobs():
            self._add(key)

    def _enqueue_unended(self, spread_seconds: float) -> None:
        """Queues every job that has not ended, spread evenly over a while."""
        for key, job in self._cache.jobs():
            if not has_ended(job):
                self._queue.add_after(key, random.uniform(0, spread_seconds))  # noqa: S311 - spreads load

    # --- lists -----------------------------------------------------------------------------------------------------

    async def _first_list(self) -> None:
        while True:
            try:
                await self.list_all()
                return
            except (ApiError, Unreachable) as error:
                log.error("first list failed, will try again", extra={"error": str(error)})
                await asyncio.sleep(_RESTART_PAUSE_SECONDS[0])

    async def _list_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.resync_seconds * random.uniform(0.9, 1.1))  # noqa: S311
            try:
                await self.list_all()
            except (ApiError, Unreachable) as error:
                log.warning("list failed", extra={"error": str(error)})
                continue
            self._enqueue_unended(spread_seconds=60.0)

    async def _list_after_kopf(self) -> None:
        """Drops what was deleted between our last list of a kind and the opening of its watch."""
        while True:
            wanted = {await self._relisted.get()}
            while not self._relisted.empty():
                wanted.add(self._relisted.get_nowait())
            for resource in sorted(wanted, key=str):
                try:
                    await self._list(resource)
                except (ApiError, Unreachable) as error:
                    log.warning("list failed, will try again", extra={"kind": resource.kind, "error": str(error)})
                    self._loop.call_later(_RESTART_PAUSE_SECONDS[0], self._relisted.put_nowait, resource)

    async def _list(self, resource: Resource) -> None:
        for namespace in self._settings.watch_namespaces or (None,):
            present: set[tuple[str, str]] = set()
            version = ""
            try:
                async for items, list_version in self._pages(resource, namespace):
                    version = list_version
                    for item in items:
                        trimmed = trim(resource, item)
                        present.add((trimmed["metadata"]["namespace"], trimmed["metadata"]["uid"]))
                        self._enqueue(self._cache.put(resource, trimmed))
            except ApiError as error:
                if error.code != 404 or resource == OPDJOB:
                    raise
                self._miss(resource)
            for change in self._cache.drop_absent(resource, namespace, present, version):
                log.info(
                    "dropped an object that vanished unseen", extra={"kind": resource.kind, "job": change.key.name}
                )
                self._enqueue(change)

    def _pages(self, resource: Resource, namespace: str | None) -> AsyncIterator[tuple[list[Manifest], str]]:
        selector = "" if resource == OPDJOB else Label.JOB.value
        return self._cluster.list_pages(resource, namespace, label_selector=selector)

    def _miss(self, resource: Resource) -> None:
        if resource not in self.missing:
            self.missing.add(resource)
            log.error(
                "the cluster does not serve this kind: install KubeRay (1.6 or newer); jobs wait until then",
                extra={"kind": resource.kind, "apiVersion": resource.api_version},
            )

    async def _ask_for_missing_kinds(self) -> None:
        """Starts the watches anew when a kind appears that was not served before."""
        while True:
            await asyncio.sleep(MISSING_KIND_SECONDS)
            for resource in sorted(self.missing, key=str):
                try:
                    async for _ in self._pages(resource, (self._settings.watch_namespaces or (None,))[0]):
                        break
                except (ApiError, Unreachable):
                    continue
                log.info("the cluster serves this kind now", extra={"kind": resource.kind})
                self.missing.discard(resource)
                self._restart.set()
                self.enqueue_all()

    # --- watches ---------------------------------------------------------------------------------------------------

    async def _watch_for_ever(self) -> None:
        pause, longest = _RESTART_PAUSE_SECONDS
        while True:
            self._restart.clear()
            started = time.monotonic()
            served = tuple(resource for resource in WATCHED if resource not in self.missing)
            runtime = _KopfThread(
                self._cluster,
                self._settings,
                served,
                ages=self.ages,
                observer=self._metrics,
                receive=self._receive,
                relisted=self._note_relist,
            )
            try:
                await runtime.start()
                await self._until_restart(runtime)
            finally:
                await runtime.stop()
            if not self._restart.is_set():
                log.error("watches ended, will start again", extra={"error": repr(runtime.error), "seconds": pause})
                await asyncio.sleep(pause)
                pause = min(longest, pause * 2) if time.monotonic() - started < longest else _RESTART_PAUSE_SECONDS[0]
            await self._first_list()

    async def _until_restart(self, runtime: _KopfThread) -> None:
        waiters = [asyncio.ensure_future(self._restart.wait()), asyncio.ensure_future(runtime.ended.wait())]
        try:
            await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()

    def _receive(self, event: Event) -> None:
        """Called in kopf's thread."""
        self._loop.call_soon_threadsafe(self._take, event)

    def _note_relist(self, plural: str) -> None:
        """Called in kopf's thread when a watch opens after a list of its own."""
        for resource in WATCHED:
            if resource.plural == plural:
                self._loop.call_soon_threadsafe(self._relisted.put_nowait, resource)

    def _take(self, event: Event) -> None:
        resource, kind_of_event, manifest = event
        self._metrics.events_seen.labels(kind=resource.kind).inc()
        if kind_of_event == "DELETED":
            self._enqueue(self._cache.remove(resource, manifest))
        else:
            self._enqueue(self._cache.put(resource, manifest))

    def _enqueue(self, change: Change | None) -> None:
        if change is None:
            return
        if change.urgency is Urgency.NOW:
            self._add(change.key)
        elif change.urgency is Urgency.SOON:
            self._queue.add_after(change.key, HEARTBEAT_PASS_SECONDS)

    def _add(self, key: JobKey) -> None:
        """Jobs at rest wait for all others, also for their next passes: after a start nobody waits behind thousands of them."""
        job = self._cache.job(key)
        self._queue.add(key, idle=job is not None and at_rest(job))


class _KopfThread:
    """kopf's runtime in a thread of its own."""

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        resources: tuple[Resource, ...],
        *,
        ages: WatchAges,
        observer: CallObserver,
        receive: Callable[[Event], None],
        relisted: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._observer = observer
        self._relisted = relisted
        #: Watches whose objects kopf has listed since they were last open.
        self._listed: set[str] = set()
        self._settings = settings
        self._resources = resources
        self._ages = ages
        self._receive = receive
        self._owner = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._main, name="feed", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._begun = threading.Event()
        self.ended = asyncio.Event()
        self.error: BaseException | None = None

    async def start(self) -> None:
        """Starts the thread and waits until it has a loop that can be told to stop."""
        self._ages.expect([name for resource in self._resources for name in self._watch_names(resource)])
        self._thread.start()
        await asyncio.to_thread(self._begun.wait, 10.0)

    async def stop(self) -> None:
        """Asks kopf to end and waits for it, at most ten seconds."""
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
        try:
            async with asyncio.timeout(10.0):
                await self.ended.wait()
        except TimeoutError:
            log.warning("watches did not end in time")

    def _watch_names(self, resource: Resource) -> list[str]:
        spaces = self._settings.watch_namespaces
        return [f"{resource.plural}@{space}" for space in spaces] if spaces else [resource.plural]

    def _main(self) -> None:
        try:
            asyncio.run(self._operate())
        except BaseException as error:  # kopf raises whatever its watchers met; the feed starts it again
            self.error = error
        finally:
            self._begun.set()
            if not self._owner.is_closed():
                self._owner.call_soon_threadsafe(self.ended.set)

    async def _operate(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._begun.set()
        spaces = self._settings.watch_namespaces
        await kopf.operator(
            registry=self._registry(),
            settings=self._kopf_settings(),
            clusterwide=not spaces,
            namespaces=list(spaces),
            standalone=True,
            stop_flag=self._stop,
        )

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(self._login)
        for resource in self._resources:
            handler = self._handler(resource)
            kopf.on.event(resource.group, resource.version, resource.plural, id=resource.plural, registry=registry)(
                handler
            )
        return registry

    def _handler(self, resource: Resource) -> Callable[..., Awaitable[None]]:
        async def handle(event: Any, **_: Any) -> None:
            self._receive((resource, event["type"], trim(resource, event["object"])))

        return handle

    def _kopf_settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.peering.standalone = True
        # Kinds that appear later are noticed by our own lists, which needs no right on CRDs and namespaces.
        settings.scanning.disabled = True
        # Bookmarks come every minute: a connection that is silent for longer is dead, and is given up well before it counts
        # as stale.
        settings.watching.inactivity_timeout = min(90.0, self._settings.watch_stale_seconds / 2)
        # Of its lists kopf gets the version only (see watch_ages.version_of), so the API server need not send more than one item.
        settings.watching.chunk_size = 1
        settings.networking.request_timeout = self._settings.api_timeout_seconds
        settings.networking.error_backoffs = [1, 1, 2, 3, 5, 8]
        settings.queueing.idle_timeout = 1.0
        # No handler of ours makes kopf write one; named in case a future kopf does.
        settings.persistence.finalizer = "opd.dev/feed"
        for resource in self._resources:
            if resource != OPDJOB:
                settings.watching.label_selectors[resource.group, resource.version, resource.plural] = Label.JOB.value
        return settings

    async def _login(self, **_: Any) -> kopf.AiohttpSession:
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._cluster.ssl_context),
            middlewares=(self._middleware,),
            headers={"User-Agent": "opd-operator"},
            read_bufsize=2**20,
        )
        return kopf.AiohttpSession(server=self._cluster.server, aiohttp_session=session)

    async def _middleware(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Authenticates every request with the current token, counts it, takes the pulse of watches, and empties lists."""
        request.headers.update(await self._cluster.authorization())
        watches = request.url.query.get("watch") == "true"
        name = watch_name(request.url.path)
        code = "error"
        try:
            response = await handler(request)
            code = str(response.status)
        finally:
            if name is not None:
                self._observer.api_call("watch" if watches else "list", name.partition("@")[0], code)
        if watches and name is not None and response.status == 200:
            response.content = Pulse(response.content, lambda: self._ages.seen(name))  # type: ignore[assignment]
            self._ages.seen(name)
            if name in self._listed:
                self._listed.discard(name)
                self._relisted(name.partition("@")[0])
        elif name is not None:
            self._listed.add(name)
            if response.status == 200:
                response._body = version_of(await response.read())
        return response
