"""One round: the lives of one schedule on a real API server, and what was broken in them."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from operator_api import Api

from opd_chaos.invariants import check
from opd_chaos.observer import Observer, until
from opd_chaos.operators import OLD_PODS_EXTRA_SECONDS, WORKERS, Replica, scratch
from opd_chaos.proxy import CALL_SECONDS
from opd_chaos.record import Story, Violation
from opd_chaos.schedule import LIVES, Life, Round
from opd_chaos.world import World
from opd_operator.errors import ApiError
from opd_operator.resources import Resource

Manifest = dict[str, Any]
#: A life that has not come to rest by then never will: far beyond every deadline of a schedule.
LIFE_SECONDS = 120.0
#: A life's calls, for what hangs: see `life_seconds`.
CALLS_A_LIFE = 60
CLEAN_SECONDS = 60.0
#: The API server serves every Event here, by whichever API it was written.
EVENTS = Resource("", "v1", "events", "Event")


@dataclass
class Result:
    """What became of a round."""

    seed: int
    lives: int
    seconds: float
    violations: list[Violation]
    phases: Counter[str]
    operators: int
    kills: int
    calls: int
    faults: Counter[str]
    stories: dict[str, Story] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def replay(self) -> str:
        """How to play the same schedule again."""
        return f"make chaos SEED={self.seed}" + (f" LIVES={self.lives}" if self.lives != LIVES else "")

    def write(self, folder: Path, plan: Round) -> Path:
        """The schedule, what was broken, and the record of the broken lives."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"round-{self.seed}.json"
        broken = {violation.job.partition("/")[0] for violation in self.violations}
        content = {
            "replay": self.replay,
            "violations": [asdict(violation) for violation in self.violations],
            "operators": self.notes,
            "schedule": asdict(plan),
            "records": {
                name: [asdict(entry) for entry in story.entries]
                for name, story in self.stories.items()
                if name in broken
            },
            "uptime": next((story.uptime for story in self.stories.values()), ()),
        }
        path.write_text(json.dumps(content, indent=1, default=str))
        return path


class Stage:
    """What rounds share: the API server, its observer, the places for lives."""

    def __init__(self, api: Api, observer: Observer, session: aiohttp.ClientSession, together: int) -> None:
        self.api, self.observer, self.session = api, observer, session
        self.places = asyncio.Semaphore(together)

    @classmethod
    @asynccontextmanager
    async def set_up(cls, kubeconfig: Path, together: int) -> AsyncIterator[Stage]:
        """Connects, and watches everything."""
        async with Api.connect(kubeconfig) as api, Observer(api).watching() as observer:
            connector = aiohttp.TCPConnector(ssl=api.cluster.ssl_context, limit=0)
            async with aiohttp.ClientSession(connector=connector, read_bufsize=2**20) as session:
                yield cls(api, observer, session, together)


async def play(stage: Stage, plan: Round) -> Result:
    """Plays a round to its end, and cleans up."""
    started = time.monotonic()
    namespace = f"chaos-{plan.seed}-{uuid.uuid4().hex[:5]}"
    await _namespace(stage.api, namespace, "POST")
    with scratch() as folder:
        replicas = [
            Replica(stage.api, stage.session, stage.observer.clock, namespace, plan, number, Path(folder))
            for number in range(len(plan.deaths))
        ]
        running = [asyncio.create_task(replica.run()) for replica in replicas]
        worlds = [World(stage.api, stage.observer, namespace, life) for life in plan.lives]
        violations: list[Violation] = []
        try:
            for found in await asyncio.gather(*(_live(stage, world, life_seconds(plan)) for world in worlds)):
                violations += found
        finally:
            broken = [repr(task) for task in running if task.done()]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await asyncio.gather(*(replica.end() for replica in replicas))
    violations += await _left(stage, namespace)
    violations += [Violation("operator", "", why) for replica in replicas for why in (*replica.broken, *broken)]
    stories = await _stories(stage, namespace, worlds, replicas)
    for story in stories.values():
        violations += check(story)
    await _namespace(stage.api, namespace, "DELETE")
    stage.observer.forget(namespace)
    faults: Counter[str] = Counter()
    for replica in replicas:
        faults += replica.faults
    return Result(
        seed=plan.seed,
        lives=len(plan.lives),
        seconds=time.monotonic() - started,
        violations=violations,
        phases=Counter(world.last_phase for world in worlds),
        operators=sum(len(replica.lives) for replica in replicas),
        kills=sum(replica.kills for replica in replicas),
        calls=sum(replica.calls for replica in replicas),
        faults=faults,
        stories=stories,
        notes=[note for replica in replicas for note in replica.notes],
    )


def life_seconds(plan: Round) -> float:
    """How long a life may take: where calls hang, each holds a worker that the other lives wait for."""
    hanging = plan.mood.share if "timeout" in plan.mood.kinds else 0.0
    return LIFE_SECONDS + len(plan.lives) * CALLS_A_LIFE * hanging * CALL_SECONDS / WORKERS


async def _live(stage: Stage, world: World, seconds: float) -> list[Violation]:
    """One life, until it rests; then its OPDJob is deleted and everything of it must go."""
    async with stage.places:
        await asyncio.sleep(world.life.begins_after)
        await world.create()
        playing = asyncio.create_task(world.run())
        name, clock = world.life.name, stage.observer.clock
        try:
            late = await until("rest", lambda: at_rest(world), seconds, clock)
            world.last_phase = world.status.get("phase", "") if world.job else "deleted"
            found = [Violation("rest", name, f"{late}; {_brief(world)}")] if late else []
            if world.job is not None:
                await stage.api.delete(world.job)
            key = (world.namespace, name)
            late = await until("nothing is left", lambda: not stage.observer.present[key], CLEAN_SECONDS, clock)
            if late:
                found.append(Violation("leftovers", name, f"{late}: {sorted(stage.observer.present[key])}"))
            if playing.done():
                found.append(Violation("world", name, f"its world ended: {playing}"))
            return found
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)


def at_rest(world: World) -> bool:
    """Nobody will do anything any more: it ended and everything is free, or it is gone."""
    if world.busy_actions and not _actions_are_over(world):
        return False
    if world.seen < world.made:
        return False
    if world.job is None:
        return not world.observer.present[world.namespace, world.life.name]
    status = world.status
    if status.get("phase") not in ("Succeeded", "Failed") or "ttlSecondsAfterFinished" in world.life.lifecycle:
        return False
    conditions = {item["type"]: item for item in status.get("conditions") or ()}
    released = conditions.get("ResourcesReleased", {}).get("status") == "True"
    generation = world.job["metadata"]["generation"]
    return released and status.get("observedGeneration") == generation


def _actions_are_over(world: World) -> bool:
    """Those that wait for a phase that will not come any more are over when the job has ended."""
    return world.idle_actions == world.busy_actions and (
        world.job is None or world.status.get("phase") in ("Succeeded", "Failed")
    )


def _brief(world: World) -> str:
    status = world.status
    waits = next((item for item in status.get("conditions") or () if item["type"] == "Progressing"), {})
    spec = {key: value for key, value in asdict(world.life).items() if value}
    return (
        f"{status.get('phase')} attempt {status.get('attempt')}: {waits.get('reason')} {waits.get('message')}; {spec}"
    )


async def _left(stage: Stage, namespace: str) -> list[Violation]:
    """After the end: nothing of ours in the namespace, whatever its labels say."""
    late = await until(
        "an empty namespace", lambda: not stage.observer.left(namespace), CLEAN_SECONDS, stage.observer.clock
    )
    return [Violation("leftovers", "", f"{late}: {stage.observer.left(namespace)}")] if late else []


async def _stories(stage: Stage, namespace: str, worlds: list[World], replicas: list[Replica]) -> dict[str, Story]:
    events: dict[str, list[tuple[str, str, str]]] = {}
    async for page, _ in stage.api.cluster.list_pages(EVENTS, namespace):
        for event in page:
            about = event.get("involvedObject") or {}
            said = (about.get("uid", ""), event.get("reason", ""), event.get("message", ""))
            events.setdefault(about.get("name", ""), []).append(said)
    uptime = tuple(life for replica in replicas for life in replica.lives)
    return {
        world.life.name: Story(
            name=world.life.name,
            entries=tuple(sorted(stage.observer.record[namespace, world.life.name], key=lambda entry: entry.version)),
            touched=frozenset(world.touched),
            uptime=uptime,
            extra_seconds=OLD_PODS_EXTRA_SECONDS,
            calm=world.life.calm,
            events=tuple(events.get(world.life.name, ())),
        )
        for world in worlds
    }


async def _namespace(api: Api, name: str, method: str) -> None:
    path = "/api/v1/namespaces" + ("" if method == "POST" else f"/{name}")
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} if method == "POST" else None
    headers = {"Content-Type": "application/json"} | await api.cluster.authorization()
    answer = await api.cluster._client.call_api(method, api.cluster.server + path, headers, body)
    text = await answer.read()
    if answer.status >= 300:
        raise ApiError(answer.status, "", text.decode()[:300])


def only(plan: Round, name: str) -> Round:
    """The same round with one of its lives."""
    lives: tuple[Life, ...] = tuple(life for life in plan.lives if life.name == name)
    return Round(plan.seed, lives, plan.processes, plan.deaths, plan.mood)
