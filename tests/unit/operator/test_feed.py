"""Lists, watches that end, kinds that are missing. The API is one in memory here; kopf's watches run in tests/integration."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from opd_operator import feed as feed_module
from opd_operator.cache import Cache, JobKey
from opd_operator.errors import ApiError, Unreachable
from opd_operator.feed import Feed
from opd_operator.metrics import Metrics
from opd_operator.model import Kind
from opd_operator.resources import CHILDREN, OPDJOB, Resource
from opd_operator.settings import Settings
from opd_operator.watch_ages import Pulse, WatchAges, version_of, watch_name
from opd_operator.workqueue import WorkQueue

Manifest = dict[str, Any]
MATH = JobKey("team", "math")
PODS = CHILDREN[Kind.POD]
RAY_JOBS = CHILDREN[Kind.RAY_JOB]


class Lists:
    """What the API server would list."""

    def __init__(self) -> None:
        self.objects: dict[Resource, list[Manifest]] = {}
        self.version = 100
        self.missing: set[Resource] = set()
        self.errors: list[Exception] = []
        self.asked: list[tuple[str, str | None, str]] = []

    async def list_pages(
        self, resource: Resource, namespace: str | None, *, label_selector: str = "", field_selector: str = ""
    ) -> AsyncIterator[tuple[list[Manifest], str]]:
        self.asked.append((resource.plural, namespace, label_selector))
        if self.errors:
            raise self.errors.pop(0)
        if resource in self.missing:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        found = [item for item in self.objects.get(resource, []) if namespace in (None, item["metadata"]["namespace"])]
        yield found[:1], str(self.version)
        yield found[1:], str(self.version)


def thing(name: str, uid: str, version: int, *, namespace: str = "team", **more: Any) -> Manifest:
    metadata = {
        "name": name,
        "namespace": namespace,
        "uid": uid,
        "resourceVersion": str(version),
        "labels": {"opd.dev/job": "math"},
    }
    return {"metadata": metadata, "spec": {}, **more}


@pytest.fixture
def lists() -> Lists:
    made = Lists()
    made.objects[OPDJOB] = [thing("math", "job", 10)]
    made.objects[PODS] = [thing("a", "a", 11), thing("b", "b", 12)]
    return made


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
async def queue() -> WorkQueue[JobKey]:
    return WorkQueue(observer=Metrics())


@pytest.fixture
async def feed(lists: Lists, cache: Cache, queue: WorkQueue[JobKey]) -> Feed:
    return Feed(cluster=lists, cache=cache, queue=queue, metrics=Metrics(), settings=Settings())  # type: ignore[arg-type]


def pods(cache: Cache) -> set[str]:
    return {pod["metadata"]["name"] for pod in cache.children(MATH, Kind.POD)}


async def test_a_list_fills_the_cache_and_queues_each_job_once(
    feed: Feed, cache: Cache, queue: WorkQueue[JobKey]
) -> None:
    await feed.list_all()
    assert pods(cache) == {"a", "b"}
    assert await queue.get() == MATH
    assert queue.size == 1, "only the one in hand"


async def test_a_list_drops_what_vanished_without_an_event(
    feed: Feed, lists: Lists, cache: Cache, queue: WorkQueue[JobKey]
) -> None:
    await feed.list_all()
    queue.done(await queue.get())
    lists.objects[PODS] = lists.objects[PODS][:1]
    lists.version = 200
    await feed.list_all()
    assert pods(cache) == {"a"}
    assert await asyncio.wait_for(queue.get(), 1) == MATH


async def test_after_a_start_a_job_that_lives_does_not_wait_behind_those_that_have_ended(
    feed: Feed, lists: Lists, queue: WorkQueue[JobKey]
) -> None:
    rest = {"phase": "Succeeded", "conditions": [{"type": "ResourcesReleased", "status": "True"}]}
    ended = [thing(f"ended{number}", f"ended{number}", 20, status=rest) for number in range(3)]
    holding = thing("holding", "holding", 25, status={"phase": "Failed", "conditions": []})
    lists.objects[OPDJOB] = [*ended, holding, thing("math", "job", 30, status={"phase": "Training"})]
    await feed.list_all()
    feed.enqueue_all()
    assert {(await queue.get()).name, (await queue.get()).name} == {"holding", "math"}
    queue.done(MATH)
    queue.add(MATH)  # its next pass
    assert await queue.get() == MATH
    assert {(await queue.get()).name for _ in ended} == {"ended0", "ended1", "ended2"}


async def test_a_list_that_finds_nothing_new_makes_no_work(feed: Feed, queue: WorkQueue[JobKey]) -> None:
    await feed.list_all()
    queue.done(await queue.get())
    await feed.list_all()
    assert queue.size == 0


async def test_a_list_that_breaks_in_the_middle_drops_nothing(feed: Feed, lists: Lists, cache: Cache) -> None:
    await feed.list_all()
    lists.objects.clear()
    lists.errors = [Unreachable("cut")]
    with pytest.raises(Unreachable):
        await feed.list_all()
    assert cache.job(MATH) is not None
    assert pods(cache) == {"a", "b"}


async def test_children_are_listed_by_label_and_jobs_are_not(feed: Feed, lists: Lists) -> None:
    await feed.list_all()
    asked = {plural: selector for plural, _, selector in lists.asked}
    assert asked.pop("opdjobs") == ""
    assert set(asked.values()) == {"opd.dev/job"}


async def test_only_the_watched_namespaces_are_listed(lists: Lists, cache: Cache, queue: WorkQueue[JobKey]) -> None:
    lists.objects[OPDJOB].append(thing("math", "other", 13, namespace="other"))
    settings = Settings(watch_namespaces=("team", "empty"))
    feed = Feed(cluster=lists, cache=cache, queue=queue, metrics=Metrics(), settings=settings)  # type: ignore[arg-type]
    await feed.list_all()
    assert {namespace for _, namespace, _ in lists.asked} == {"team", "empty"}
    assert [key for key, _ in cache.jobs()] == [MATH]


async def test_a_missing_kuberay_is_noted_and_everything_else_works(feed: Feed, lists: Lists, cache: Cache) -> None:
    lists.missing = {RAY_JOBS}
    await feed.list_all()
    assert feed.kuberay_missing
    assert pods(cache) == {"a", "b"}


async def test_a_missing_opdjob_kind_is_an_error(feed: Feed, lists: Lists) -> None:
    lists.missing = {OPDJOB}
    with pytest.raises(ApiError):
        await feed.list_all()


class Watches:
    """Stands in for kopf's thread: ends when told."""

    made: list[Watches]

    def __init__(self, cluster: Any, settings: Any, resources: tuple[Resource, ...], **_: Any) -> None:
        self.resources = resources
        self.ended = asyncio.Event()
        self.error: BaseException | None = RuntimeError("WatchingError")
        self.stopped = False
        Watches.made.append(self)

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def without_ray(lists: Lists) -> None:
    lists.missing = {RAY_JOBS}


@pytest.fixture
async def running(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Feed]:
    Watches.made = []
    monkeypatch.setattr(feed_module, "_KopfThread", Watches)
    monkeypatch.setattr(feed_module, "_RESTART_PAUSE_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(feed_module, "MISSING_KIND_SECONDS", 0.01)
    task = asyncio.create_task(feed.run())
    yield feed
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(look: Any) -> None:
    async with asyncio.timeout(5):
        while not look():
            await asyncio.sleep(0.005)


async def test_ready_means_that_the_first_list_is_complete(running: Feed, lists: Lists, cache: Cache) -> None:
    await asyncio.wait_for(running.synced.wait(), 5)
    assert pods(cache) == {"a", "b"}


async def test_the_first_list_is_tried_until_it_succeeds(running: Feed, lists: Lists) -> None:
    lists.errors = [Unreachable("cut"), ApiError(500, "InternalError", "etcd")]
    await asyncio.wait_for(running.synced.wait(), 5)


async def test_watches_that_end_start_again_after_a_list(running: Feed, lists: Lists, cache: Cache) -> None:
    await until(lambda: len(Watches.made) == 1)
    lists.objects[PODS] = []
    lists.version = 300
    Watches.made[0].ended.set()
    await until(lambda: len(Watches.made) == 2)
    assert Watches.made[0].stopped
    assert pods(cache) == set(), "what was missed in between came from the list"


async def test_what_was_deleted_before_a_watch_opened_is_dropped_when_it_opens(
    running: Feed, lists: Lists, cache: Cache
) -> None:
    """kopf's own list does not hold it, so kopf never tells of its end."""
    await until(lambda: len(Watches.made) == 1)
    assert pods(cache) == {"a", "b"}
    lists.objects[PODS] = lists.objects[PODS][:1]
    lists.version = 200
    lists.errors = [Unreachable("cut")]
    running._note_relist("pods")
    await until(lambda: pods(cache) == {"a"})


async def test_a_kind_that_appears_is_watched_without_a_restart_of_the_process(
    without_ray: None, running: Feed, lists: Lists, queue: WorkQueue[JobKey]
) -> None:
    await until(lambda: len(Watches.made) == 1)
    assert RAY_JOBS not in Watches.made[0].resources
    queue.done(await queue.get())
    lists.missing = set()
    await until(lambda: len(Watches.made) == 2)
    assert RAY_JOBS in Watches.made[1].resources
    assert not running.kuberay_missing
    assert await asyncio.wait_for(queue.get(), 1) == MATH, "jobs that waited for it are looked at"


def test_the_age_of_a_watch_starts_anew_with_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("opd_operator.watch_ages.time.monotonic", lambda: now[0])
    ages = WatchAges()
    assert ages.oldest == 0
    ages.expect(["pods", "jobs"])
    now[0] += 50
    ages.seen("pods")
    ages.seen("strangers")
    now[0] += 10
    assert ages.by_name() == {"pods": 10, "jobs": 60}
    assert ages.oldest == 60


async def test_bytes_are_counted_where_they_arrive_and_passed_on() -> None:
    class Content:
        async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
            for chunk in (b"bookmark", b"event"):
                yield chunk

        def exception(self) -> str:
            return "own"

    beats: list[int] = []
    content: Any = Content()
    pulse: Any = Pulse(content, lambda: beats.append(1))
    assert [chunk async for chunk in pulse.iter_chunked(10)] == [b"bookmark", b"event"]
    assert len(beats) == 2
    assert pulse.exception() == "own"
    assert hasattr(aiohttp.StreamReader, "iter_chunked"), "kopf reads watches through it"


def test_kopf_gets_the_version_of_a_list_and_neither_its_items_nor_the_way_to_more() -> None:
    metadata = {"resourceVersion": "17", "continue": "token", "remainingItemCount": 4999}
    listed = {"apiVersion": "v1", "kind": "PodList", "metadata": metadata, "items": [{"metadata": {"name": "a"}}]}
    emptied = json.loads(version_of(json.dumps(listed).encode()))
    assert emptied == {"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "17"}, "items": []}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/api/v1/pods", "pods"),
        ("/api/v1/namespaces/team/pods", "pods@team"),
        ("/apis/ray.io/v1/rayjobs", "rayjobs"),
        ("/apis/ray.io/v1/namespaces/team/rayjobs", "rayjobs@team"),
        ("/api", None),
        ("/api/v1", None),
        ("/apis/ray.io/v1", None),
    ],
)
def test_a_watch_is_named_by_its_path(path: str, name: str | None) -> None:
    assert watch_name(path) == name
