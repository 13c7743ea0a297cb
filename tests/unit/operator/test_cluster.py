"""Calls to the API server: deadlines, retries, budgets, fences. The server here is a real one that misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from opd_operator.cluster import Cluster
from opd_operator.errors import ApiError, NotLeader, Unreachable
from opd_operator.model import ObjectRef, WriteProblemKind
from opd_operator.planned import Deletion
from opd_operator.resources import CHILDREN, OPDJOB, Kind
from opd_operator.retrying import RetryBudget, RetryPolicy

Manifest = dict[str, Any]
Answer = Callable[[web.Request], Any]
FAST = RetryPolicy(attempts=4, base_seconds=0.001, limit_seconds=0.01)
CONFIG_MAP: Manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "n"}}


class Calls:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []

    def api_call(self, verb: str, kind: str, code: str) -> None:
        self.seen.append((verb, kind, code))


class Server:
    """Answers with what tests queue up, then with 200 and an empty object."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any, dict[str, str]]] = []
        self.answers: list[Any] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        body = json.loads(text) if text else None
        self.requests.append((request.method, request.path_qs, body, dict(request.headers)))
        answer = self.answers.pop(0) if self.answers else {}
        if answer == "reset":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if answer == "hang":
            await asyncio.sleep(30)
        if isinstance(answer, tuple):
            code, content = answer
            if isinstance(content, str):
                return web.Response(status=code, text=content, content_type="text/html")
            return web.json_response(content, status=code)
        return web.json_response(answer)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
async def cluster(server: Server, calls: Calls) -> AsyncIterator[Cluster]:
    configuration = Configuration(host=server.url)
    configuration.api_key["BearerToken"] = "bearer token-1"
    made = Cluster(configuration, observer=calls, timeout_seconds=0.5, retry=FAST)
    yield made
    await made.close()


def status(code: int, reason: str, message: str = "", **details: Any) -> tuple[int, Manifest]:
    return code, {"kind": "Status", "code": code, "reason": reason, "message": message, "details": details}


@pytest.mark.parametrize(
    "fault",
    [status(429, "TooManyRequests"), status(500, "InternalError"), (503, "<html>proxy</html>"), "reset", "hang"],
)
async def test_a_passing_fault_is_not_noticed(server: Server, cluster: Cluster, calls: Calls, fault: Any) -> None:
    server.answers = [fault, {"metadata": {"name": "c"}}]
    assert await cluster.create(CONFIG_MAP) == {"metadata": {"name": "c"}}
    assert len(server.requests) == 2
    assert calls.seen[-1] == ("create", "configmaps", "200")


async def test_a_lasting_fault_is_given_up_after_a_few_attempts(server: Server, cluster: Cluster) -> None:
    server.answers = [status(500, "InternalError", "etcd") for _ in range(10)]
    with pytest.raises(ApiError, match="etcd"):
        await cluster.get(OPDJOB, "n", "j")
    assert len(server.requests) == 4


async def test_an_object_that_does_not_fit_its_schema_is_a_refusal_for_all_its_code_500(
    server: Server, cluster: Cluster
) -> None:
    words = "failed to create typed patch object (n/t; apps/v1, Kind=Deployment): .spec.nonsense: field not declared"
    server.answers = [status(500, "", words)]
    with pytest.raises(ApiError, match="nonsense") as raised:
        await cluster.apply(CONFIG_MAP)
    assert raised.value.problem is WriteProblemKind.INVALID
    assert len(server.requests) == 1


async def test_no_answer_at_all_is_unreachable(server: Server, cluster: Cluster, calls: Calls) -> None:
    server.answers = ["reset"] * 20  # aiohttp itself repeats a GET once on a connection that it had kept
    with pytest.raises(Unreachable):
        await cluster.get(OPDJOB, "n", "j")
    assert calls.seen == [("get", "opdjobs", "error")] * 4


async def test_the_server_is_given_the_time_it_asks_for(server: Server, cluster: Cluster) -> None:
    server.answers = [status(429, "TooManyRequests", retryAfterSeconds=1)]
    loop = asyncio.get_running_loop()
    before = loop.time()
    await cluster.get(OPDJOB, "n", "j")
    assert loop.time() - before >= 1


@pytest.mark.parametrize(
    ("code", "reason"), [(400, "BadRequest"), (403, "Forbidden"), (409, "Conflict"), (422, "Invalid")]
)
async def test_a_refusal_is_not_repeated(server: Server, cluster: Cluster, code: int, reason: str) -> None:
    server.answers = [status(code, reason, "no")]
    with pytest.raises(ApiError) as caught:
        await cluster.create(CONFIG_MAP)
    assert (caught.value.code, caught.value.reason) == (code, reason)
    assert len(server.requests) == 1


async def test_all_calls_together_have_a_budget_of_retries(server: Server, calls: Calls) -> None:
    budget = RetryBudget(capacity=5, earned_per_call=0.1)
    cluster = Cluster(Configuration(host=server.url), observer=calls, retry=FAST, budget=budget)
    server.answers = [status(500, "InternalError")] * 100
    for _ in range(10):
        with pytest.raises(ApiError):
            await cluster.get(OPDJOB, "n", "j")
    await cluster.close()
    assert len(server.requests) <= 10 + 5 + 1


async def test_nothing_is_written_without_the_lease(server: Server, cluster: Cluster) -> None:
    cluster.may_write = lambda: False
    deletion = Deletion(ObjectRef.of(CONFIG_MAP), "uid")
    for write in (
        cluster.create(CONFIG_MAP),
        cluster.apply(CONFIG_MAP),
        cluster.merge_patch(ObjectRef.of(CONFIG_MAP), {}),
        cluster.delete(deletion),
    ):
        with pytest.raises(NotLeader):
            await write
    assert server.requests == []
    await cluster.get(OPDJOB, "n", "j")
    await cluster.create(CONFIG_MAP, fenced=False)
    assert len(server.requests) == 2, "reading, and the Lease itself, need none"


async def test_a_lease_lost_during_the_retries_ends_them(server: Server, cluster: Cluster) -> None:
    answers = iter([True, False])
    cluster.may_write = lambda: next(answers)
    server.answers = [status(500, "InternalError")] * 4
    with pytest.raises(NotLeader):
        await cluster.create(CONFIG_MAP)
    assert len(server.requests) == 1


async def test_a_delete_names_uid_and_propagation_and_takes_absence_for_done(server: Server, cluster: Cluster) -> None:
    deletion = Deletion(ObjectRef.of(CONFIG_MAP), "uid-7", grace_seconds=5)
    server.answers = [status(404, "NotFound"), status(409, "Conflict")]
    assert await cluster.delete(deletion) is None
    assert await cluster.delete(deletion) is None
    method, path, body, _ = server.requests[0]
    assert (method, path) == ("DELETE", "/api/v1/namespaces/n/configmaps/c")
    assert body["preconditions"] == {"uid": "uid-7"}
    assert body["propagationPolicy"] == "Background"
    assert body["gracePeriodSeconds"] == 5


async def test_server_side_apply_is_forced_under_one_manager(server: Server, cluster: Cluster) -> None:
    await cluster.apply(CONFIG_MAP)
    method, path, body, headers = server.requests[0]
    assert method == "PATCH"
    assert path == "/api/v1/namespaces/n/configmaps/c?fieldManager=opd-operator&force=true"
    assert headers["Content-Type"] == "application/apply-patch+yaml"
    assert body == CONFIG_MAP


async def test_a_status_patch_goes_to_the_subresource(server: Server, cluster: Cluster, calls: Calls) -> None:
    ref = ObjectRef("opd.dev/v1alpha1", "OPDJob", "n", "j")
    await cluster.merge_patch(ref, {"status": {}}, subresource="status")
    _, path, _, headers = server.requests[0]
    assert path.startswith("/apis/opd.dev/v1alpha1/namespaces/n/opdjobs/j/status?")
    assert headers["Content-Type"] == "application/merge-patch+json"
    assert calls.seen == [("patch", "opdjobs/status", "200")]


async def test_lists_are_read_page_by_page(server: Server, cluster: Cluster) -> None:
    server.answers = [
        {"metadata": {"resourceVersion": "7", "continue": "more"}, "items": [{"metadata": {"name": "a"}}]},
        {"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"name": "b"}}]},
    ]
    pods = CHILDREN[Kind.POD]
    pages = [page async for page in cluster.list_pages(pods, None, label_selector="opd.dev/job")]
    assert [[item["metadata"]["name"] for item in items] for items, _ in pages] == [["a"], ["b"]]
    assert {version for _, version in pages} == {"7"}
    assert pages[0][0][0]["kind"] == "Pod"
    assert "labelSelector=opd.dev/job" in server.requests[0][1]
    assert "continue=more" in server.requests[1][1]


async def test_a_rotated_token_is_used_at_once(server: Server, cluster: Cluster) -> None:
    await cluster.get(OPDJOB, "n", "j")
    cluster._configuration.api_key["BearerToken"] = "bearer token-2"
    await cluster.get(OPDJOB, "n", "j")
    headers = [{key.lower(): value for key, value in request[3].items()} for request in server.requests]
    assert [found["authorization"] for found in headers] == ["bearer token-1", "bearer token-2"]


async def test_a_missing_object_is_none_and_other_errors_are_errors(server: Server, cluster: Cluster) -> None:
    server.answers = [status(404, "NotFound"), status(403, "Forbidden", "no")]
    assert await cluster.get(OPDJOB, "n", "j") is None
    with pytest.raises(ApiError):
        await cluster.get(OPDJOB, "n", "j")


def test_a_terminating_namespace_is_recognised_by_its_cause_not_by_words() -> None:
    body = {"details": {"causes": [{"reason": "NamespaceTerminating", "message": "..."}]}}
    assert ApiError(403, "Forbidden", "anything", body).namespace_terminating
    assert ApiError(
        404, "NotFound", 'namespaces "n" not found', {"details": {"kind": "namespaces"}}
    ).namespace_terminating
    assert not ApiError(403, "Forbidden", "being terminated").namespace_terminating
