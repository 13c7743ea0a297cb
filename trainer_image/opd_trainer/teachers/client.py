"""One teacher: its replicas, limits, retries and the wait for a lost one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from opd_api.trainer_config import TeacherAddress, TrainerTeacher
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import Failure, SampleError, TrainerError
from opd_trainer.teachers.adapters import ADAPTERS
from opd_trainer.teachers.faults import Fault, FaultKind, fault_of_exception, fault_of_status
from opd_trainer.teachers.replicas import Replica, ReplicaGoneError, choose
from opd_trainer.teachers.resolver import Endpoint, resolve
from opd_trainer.teachers.wire import AnswerError, Call, ScoreAnswer, ScoreQuery, TopKShortfallError

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
#: SGLang's /health generates a token and takes a second or more.
HEALTH_SECONDS = 25.0
RESOLVE_SECONDS = 10.0
#: Broken connections of one sample before it is taken for the one that kills servers.
MAX_CUTS = 5
#: Bound of the first pause before a retry; it doubles up to the second number. Seconds.
BACKOFF_SECONDS = (0.5, 20.0)

Listener = Callable[[str, str, float, int], None]
"""(teacher, outcome `ok` or a FaultKind, seconds, tokens) after each request."""


@dataclass(slots=True)
class _Tries:
    """What one sample has used up."""

    retries: int = 0
    cuts: int = 0
    avoid: set[str] = field(default_factory=set)


@dataclass(slots=True)
class TeacherFacts:
    """What the servers say about themselves."""

    vocabulary: int | None = None
    context: int | None = None
    model: str | None = None


class TeacherClient:
    """Scores queries at one teacher."""

    def __init__(
        self,
        teacher: TrainerTeacher,
        address: TeacherAddress,
        *,
        api_key: str | None,
        ready_deadline: float,
        vocabulary: int | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.teacher = teacher
        self.address = address
        self.facts = TeacherFacts(vocabulary, teacher.max_context_tokens, address.served_model)
        self._adapter = ADAPTERS[teacher.backend]
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._ready_deadline = ready_deadline
        self._listener = listener
        self._session: aiohttp.ClientSession | None = None
        self._replicas: dict[str, Replica] = {}
        self._resolved: dict[str, list[Endpoint]] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._look_again = asyncio.Event()
        self._changed = asyncio.Event()
        self._held = 0
        self._lost_since: float | None = None

    @property
    def name(self) -> str:
        """Name of the teacher."""
        return self.teacher.name

    @property
    def unavailable(self) -> bool:
        """True while samples are held because no replica can be reached."""
        return self._held > 0

    @property
    def replicas(self) -> list[Replica]:
        """The replicas that are known now."""
        return list(self._replicas.values())

    async def start(self) -> None:
        """Open the session, resolve the names, start watching them."""
        timeout = aiohttp.ClientTimeout(
            total=float(self.teacher.request_timeout_seconds), connect=None, sock_connect=CONNECT_SECONDS
        )
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        await self._resolve()
        self._keeper = asyncio.create_task(self._keep(), name=f"teacher-{self.name}")

    async def stop(self) -> None:
        """Close everything; idempotent."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def score(self, query: ScoreQuery, group: int) -> ScoreAnswer:
        """The answer to a query. Raises SampleError, or TrainerError when the teacher cannot be used at all."""
        self.check(query)
        tries = _Tries()
        while True:
            replica = choose(self._replicas.values(), self.name, group, time.monotonic(), avoid=frozenset(tries.avoid))
            if replica is None:
                await self._hold()
                continue
            try:
                return await self.score_at(replica, query)
            except ReplicaGoneError:
                continue
            except Fault as fault:
                await self._after(fault, replica, tries)

    def check(self, query: ScoreQuery) -> None:
        """Refuse what would hurt the server: one id outside its vocabulary kills a SGLang. Raises SampleError."""
        if not len(query.prompt_ids) or not len(query.response_ids):
            raise self._data_error("the prompt or the response is empty")
        ids = query.input_ids
        low, high = int(ids.min()), int(ids.max())
        if query.at_ids is not None:
            low, high = min(low, int(query.at_ids.min())), max(high, int(query.at_ids.max()))
        if low < 0 or (self.facts.vocabulary is not None and high >= self.facts.vocabulary):
            raise self._data_error(
                f"token id {low if low < 0 else high} is outside the teacher's vocabulary of {self.facts.vocabulary}"
            )
        if self.facts.context is not None and query.tokens > self.facts.context:
            raise self._data_error(f"{query.tokens} tokens do not fit into the teacher's {self.facts.context}")

    def _data_error(self, message: str) -> SampleError:
        return SampleError(Failure(FailureClass.DATA, Reason.DATA_ERROR, message, self.name))

    async def score_at(self, replica: Replica, query: ScoreQuery) -> ScoreAnswer:
        """One try at one replica. Raises Fault or ReplicaGoneError."""
        calls = self._adapter.calls(query, model=self.facts.model)
        await replica.acquire(query.tokens)
        started, outcome = time.monotonic(), "ok"
        try:
            documents = [await self.post(replica.endpoint, call) for call in calls]
            answer = self._adapter.parse(query, documents)
        except TopKShortfallError as error:
            outcome = FaultKind.TEACHER
            raise Fault(FaultKind.TEACHER, f"topK is not honoured: {error}", Reason.TEACHER_TOPK_TOO_SMALL) from None
        except AnswerError as error:
            outcome = FaultKind.INFRA
            raise Fault(FaultKind.INFRA, f"unusable answer: {error}") from None
        except Fault as fault:
            outcome = fault.kind
            raise
        else:
            self._answered(replica)
            return answer
        finally:
            replica.release(query.tokens)
            if self._listener is not None:
                self._listener(self.name, str(outcome), time.monotonic() - started, query.tokens)

    async def post(self, endpoint: Endpoint, call: Call) -> dict[str, Any]:
        """One POST. Raises Fault."""
        body = orjson.dumps(call.body, option=orjson.OPT_SERIALIZE_NUMPY)
        status, data = await self.request("POST", endpoint, call.path, body=body)
        if status != 200:
            raise fault_of_status(status, data.decode("utf-8", "replace"))
        try:
            document = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise Fault(FaultKind.INFRA, "the answer is not JSON") from None
        if not isinstance(document, dict):
            raise Fault(FaultKind.INFRA, "the answer is not a JSON object")
        return document

    async def request(
        self, method: str, endpoint: Endpoint, path: str, *, body: bytes | None = None, seconds: float | None = None
    ) -> tuple[int, bytes]:
        """One HTTP request; returns status and body. Raises Fault."""
        if self._session is None:
            raise RuntimeError("the client is not started")
        options: dict[str, Any] = {
            "headers": self._headers | {"Host": endpoint.host},
            "data": body,
            "allow_redirects": False,
        }
        if endpoint.tls:
            options["server_hostname"] = endpoint.name
        if seconds is not None:
            options["timeout"] = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self._session.request(method, endpoint.url + path, **options) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise fault_of_exception(error) from None

    async def _after(self, fault: Fault, replica: Replica, tries: _Tries) -> None:
        """Decide what a fault means; returns when the query may be tried again, otherwise raises."""
        if fault.kind is FaultKind.DATA:
            raise self._data_error(f"the teacher refuses the sample: {fault}")
        if fault.kind is FaultKind.TEACHER:
            raise TrainerError(
                FailureClass.TEACHER,
                fault.reason,
                f"teacher {self.name} at {replica.endpoint.url} cannot score: {fault}."
                " Check its model, arguments, endpoint path and API key",
                teacher=self.name,
            )
        tries.avoid.add(replica.endpoint.url)
        if fault.kind is FaultKind.TIMEOUT and not await self._answers(replica.endpoint):
            fault = Fault(FaultKind.UNREACHABLE, "neither an answer in time nor a connection")
        if fault.kind in (FaultKind.UNREACHABLE, FaultKind.CUT):
            self._lost(replica, fault)
            tries.cuts += fault.kind is FaultKind.CUT
            if tries.cuts >= MAX_CUTS:
                raise self._data_error(f"the connection broke {tries.cuts} times under this sample: {fault}")
            return
        replica.failed(time.monotonic())
        tries.retries += 1
        if tries.retries > self.teacher.max_retries:
            raise SampleError(
                Failure(
                    FailureClass.TEACHER,
                    Reason.TEACHER_ERROR,
                    f"teacher {self.name} failed {tries.retries} times, last: {fault}",
                    self.name,
                )
            )
        first, longest = BACKOFF_SECONDS
        await asyncio.sleep(random.uniform(0.0, min(longest, first * 2.0**tries.retries)))  # noqa: S311 - jitter

    def _lost(self, replica: Replica, fault: Fault) -> None:
        if replica.reachable:
            log.warning("teacher %s: %s is unreachable: %s", self.name, replica.endpoint.url, fault)
        replica.lost()
        self._look_again.set()

    async def _hold(self) -> None:
        """Wait until a replica is reachable. Raises TrainerError after lifecycle.teacherReadyDeadlineSeconds."""
        now = time.monotonic()
        if self._lost_since is None:
            self._lost_since = now
        remaining = self._lost_since + self._ready_deadline - now
        self._look_again.set()
        self._held += 1
        try:
            await asyncio.wait_for(self._changed.wait(), max(0.0, remaining))
        except TimeoutError:
            raise TrainerError(
                FailureClass.TEACHER,
                Reason.TEACHER_UNREACHABLE,
                f"no replica of teacher {self.name} could be reached for {self._ready_deadline:.0f} s"
                f" ({', '.join(self.address.urls)})",
                teacher=self.name,
            ) from None
        finally:
            self._held -= 1

    async def _keep(self) -> None:
        """Resolve the names every 10 s and on connection errors; ask lost replicas whether they are back."""
        quiet = 1.0
        while True:
            lost = any(not replica.reachable for replica in self._replicas.values()) or not self._replicas
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look_again.wait(), quiet if lost else RESOLVE_SECONDS)
            self._look_again.clear()
            await self._resolve()
            await asyncio.gather(*(self._look(r) for r in self.replicas if not r.reachable))
            still = not any(replica.reachable for replica in self._replicas.values())
            quiet = min(quiet * 1.5, 5.0) if still else 1.0
            if still:
                await asyncio.sleep(random.uniform(0.1, 0.3))  # noqa: S311 - jitter; also bounds a storm of wake-ups

    async def _look(self, replica: Replica) -> None:
        if await self._answers(replica.endpoint, healthy=True):
            self._answered(replica)

    def _answered(self, replica: Replica) -> None:
        """The one way back from unreachable, by a probe or by a request that was on its way: who is held must hear of it."""
        back = not replica.reachable
        replica.succeeded()
        if back:
            log.info("teacher %s: %s answers", self.name, replica.endpoint.url)
            self._announce()

    async def _answers(self, endpoint: Endpoint, *, healthy: bool = False) -> bool:
        """Whether anything answers on /health; with `healthy` a server that still loads (5xx) does not count."""
        try:
            status, _ = await self.request("GET", endpoint, "/health", seconds=HEALTH_SECONDS)
        except Fault as fault:
            return fault.kind is FaultKind.TIMEOUT and not healthy
        return status < 500 or not healthy

    def _announce(self) -> None:
        self._lost_since = None
        self._changed.set()
        self._changed = asyncio.Event()

    async def _resolve(self) -> None:
        """Bring the replicas in line with DNS; a name that does not resolve keeps what is known of it."""
        for url in self.address.urls:
            try:
                self._resolved[url] = await resolve(url)
            except OSError as error:
                log.warning("teacher %s: %s does not resolve: %s", self.name, url, error)
        found = {endpoint.url: endpoint for endpoints in self._resolved.values() for endpoint in endpoints}
        for gone in set(self._replicas) - set(found):
            self._replicas.pop(gone).lost()
        fresh = [url for url in found if url not in self._replicas]
        for url in fresh:
            self._replicas[url] = Replica(found[url], self.teacher.max_concurrency, self.teacher.max_tokens_in_flight)
        if fresh:
            self._announce()
