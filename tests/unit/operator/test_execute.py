"""Carrying out plans, against an API in memory that answers like the real one (tests/integration has the real one)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from executor_api import Api

from opd_operator.cache import Cache, JobKey, trim
from opd_operator.errors import ApiError, Unreachable, from_answer
from opd_operator.execute import STATUS_CONFLICTS, Executor, Outcome, ended_attempts, merge_difference
from opd_operator.metrics import Metrics
from opd_operator.model import Kind, ObjectRef, Unwritten, WriteProblemKind
from opd_operator.planned import Deletion, EventType, Plan, PlannedEvent, Rehearsal, SecretRequest, StopRequest
from opd_operator.recorder import Recorder
from opd_operator.resources import CHILDREN, OPDJOB

Manifest = dict[str, Any]
MATH = JobKey("team", "math")
TOO_LARGE = {"kind": "Status", "reason": "InternalError", "message": "etcdserver: request is too large"}
NOT_READ = (
    'configmaps "math-config" is forbidden: cannot set blockOwnerDeletion in this case because cannot find RESTMapping for '
    'APIVersion opd.dev/v1alpha1 Kind OPDJob: no matches for kind "OPDJob" in version "opd.dev/v1alpha1"'
)


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def executor(api: Api, cache: Cache, metrics: Metrics) -> Executor:
    recorder = Recorder(api, instance="test")
    return Executor(cluster=api, cache=cache, recorder=recorder, metrics=metrics)  # type: ignore[arg-type]


@pytest.fixture
def job(api: Api, cache: Cache) -> Manifest:
    metadata = {"name": "math", "namespace": "team", "uid": "job-uid", "generation": 1}
    held = api.hold({"apiVersion": "opd.dev/v1alpha1", "kind": "OPDJob", "metadata": metadata, "spec": {}})
    trimmed = trim(OPDJOB, held)
    cache.put(OPDJOB, trimmed)
    return trimmed


def child(kind: str = "ConfigMap", name: str = "math-config", *, owner: str | None = "job-uid") -> Manifest:
    owners = [{"kind": "OPDJob", "name": "math", "uid": owner, "controller": True}] if owner else []
    metadata = {"name": name, "namespace": "team", "labels": {"opd.dev/job": "math"}, "ownerReferences": owners}
    versions = {"ConfigMap": "v1", "Deployment": "apps/v1", "RayJob": "ray.io/v1", "Job": "batch/v1", "Secret": "v1"}
    return {"apiVersion": versions[kind], "kind": kind, "metadata": metadata}


CHILD_REF = ObjectRef("v1", "ConfigMap", "team", "math-config")


async def test_a_created_child_is_known_at_once(executor: Executor, job: Manifest, cache: Cache) -> None:
    done = await executor.execute(job, Plan(create=(child(),)))
    assert done.outcome is Outcome.CHANGED
    assert [found["metadata"]["name"] for found in cache.children(MATH, Kind.CONFIG_MAP)] == ["math-config"]


async def test_a_child_that_exists_and_is_ours_counts_as_created(
    executor: Executor, api: Api, job: Manifest, cache: Cache
) -> None:
    api.hold(child())
    done = await executor.execute(job, Plan(create=(child(),)))
    assert done.problems == []
    assert len(list(cache.children(MATH, Kind.CONFIG_MAP))) == 1


async def test_a_foreign_object_is_a_collision_and_is_never_adopted(
    executor: Executor, api: Api, job: Manifest, cache: Cache
) -> None:
    api.hold(child(owner=None))
    before = copy.deepcopy(api.objects)
    done = await executor.execute(job, Plan(create=(child(),), apply=()))
    assert done.outcome is Outcome.REFUSED
    ((problem),) = done.problems
    assert problem.kind is WriteProblemKind.COLLISION
    assert problem.ref == CHILD_REF
    assert "nobody" in problem.message
    assert api.objects == before


async def test_server_side_apply_does_not_touch_a_foreign_object(executor: Executor, api: Api, job: Manifest) -> None:
    api.hold(child("Deployment", "math-teacher", owner=None))
    done = await executor.execute(job, Plan(apply=(child("Deployment", "math-teacher"),)))
    assert [problem.kind for problem in done.problems] == [WriteProblemKind.COLLISION]
    assert "apply Deployment/math-teacher" not in api.calls


async def test_apply_over_our_own_object_names_its_uid(executor: Executor, api: Api, job: Manifest) -> None:
    held = api.hold(child("Deployment", "math-teacher"))
    await executor.execute(job, Plan(apply=(child("Deployment", "math-teacher"),)))
    assert api.objects["Deployment", "math-teacher"]["metadata"]["uid"] == held["metadata"]["uid"]


@pytest.mark.parametrize("case", ["terminating", "earlier job", "ours, terminating"])
async def test_an_object_on_its_way_out_is_waited_for(executor: Executor, api: Api, job: Manifest, case: str) -> None:
    former = child(owner="former-uid" if case != "ours, terminating" else "job-uid")
    if case != "earlier job":
        former["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    api.hold(former)
    done = await executor.execute(job, Plan(create=(child(),)))
    assert [problem.kind for problem in done.problems] == [WriteProblemKind.BEING_DELETED]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ApiError(403, "Forbidden", 'pods "x" is forbidden: exceeded quota: gpus'), WriteProblemKind.QUOTA),
        (ApiError(403, "Forbidden", "violates PodSecurity restricted"), WriteProblemKind.FORBIDDEN),
        (ApiError(403, "Forbidden", NOT_READ), WriteProblemKind.TYPE_NOT_READ),
        (ApiError(422, "Invalid", "spec.template: Required value"), WriteProblemKind.INVALID),
        (ApiError(400, "BadRequest", "cannot unmarshal"), WriteProblemKind.INVALID),
        (ApiError(500, "InternalError", 'failed calling webhook "a.b": refused'), WriteProblemKind.FORBIDDEN),
        (from_answer(500, "", TOO_LARGE), WriteProblemKind.INVALID),
        (ApiError(404, "NotFound", "the server could not find the requested resource"), WriteProblemKind.NOT_SERVED),
        (ApiError(400, "", 'admission webhook "a.b" denied the request: no'), WriteProblemKind.FORBIDDEN),
        (
            ApiError(422, "Invalid", "ValidatingAdmissionPolicy 'a' with binding 'b' denied request: no"),
            WriteProblemKind.FORBIDDEN,
        ),
    ],
)
async def test_a_refusal_is_a_value_and_what_may_need_the_refused_object_waits(
    executor: Executor, api: Api, job: Manifest, error: ApiError, kind: WriteProblemKind
) -> None:
    api.answers["create RayJob"] = error
    teacher = child("Deployment", "math-teacher")
    plan = Plan(
        create=(child(), child("RayJob", "math-1"), child("Job", "j")), apply=(teacher,), status={"phase": "Pending"}
    )
    done = await executor.execute(job, plan)
    assert [problem.kind for problem in done.problems] == [kind]
    assert {name for name, _ in api.objects} == {"OPDJob", "ConfigMap"}
    assert api.objects["OPDJob", "math"]["status"] == {"phase": "Pending"}


async def test_children_are_tried_without_being_made_and_refusals_of_the_moment_do_not_count(
    executor: Executor, api: Api, job: Manifest
) -> None:
    student = ObjectRef("ray.io/v1", "RayJob", "team", "math-1")
    tried = (Rehearsal(child("Job", "math-1-head"), student), Rehearsal(child("RayJob", "math-1"), student))
    done = await executor.execute(job, Plan(rehearse=tried))
    assert (done.rehearsed, done.writes) == (True, 0)
    assert {name for name, _ in api.objects} == {"OPDJob"}
    for passing in (
        ApiError(403, "Forbidden", "exceeded quota: jobs"),
        ApiError(404, "NotFound", "the server could not find the requested resource"),
        ApiError(409, "AlreadyExists", "exists"),
        ApiError(400, "BadRequest", 'admission webhook "a.b" does not support dry run'),
    ):
        api.answers["try Job"] = passing
        assert (await executor.execute(job, Plan(rehearse=tried))).rehearsed, passing
    api.answers["try Job"] = ApiError(422, "Invalid", "spec.template.spec.restartPolicy: Unsupported value")
    done = await executor.execute(job, Plan(rehearse=tried))
    assert not done.rehearsed
    assert [(item.ref, item.kind) for item in done.problems] == [(student, WriteProblemKind.INVALID)]


@pytest.mark.parametrize("refused", ["training", "everything"])
async def test_a_refused_status_is_written_as_far_as_it_is_taken_and_kept_whole(
    executor: Executor, api: Api, job: Manifest, refused: str
) -> None:
    body = {"details": {"causes": [{"field": "status.training.step"}]}}
    error = ApiError(422, "Invalid", "status.training.step: Invalid value", body)
    taken = api.merge_patch

    async def picky(ref: ObjectRef, patch: Manifest, **options: Any) -> Manifest:
        if options.get("subresource") == "status" and (refused == "everything" or "training" in patch["status"]):
            raise error
        return await taken(ref, patch, **options)

    api.merge_patch = picky  # type: ignore[method-assign]
    status = {"phase": "Training", "training": {"step": 2**63}, "conditions": [], "attempt": 1}
    done = await executor.execute(job, Plan(status=status))
    stored = api.objects["OPDJob", "math"].get("status", {})
    assert stored == ({} if refused == "everything" else {key: status[key] for key in status if key != "training"})
    assert done.unwritten == Unwritten(stored, status)
    assert done.problems == [], "no child is to blame"
    assert any("create Event" in call for call in api.calls)


async def test_in_a_dying_namespace_nothing_more_is_created_and_nothing_is_wrong(
    executor: Executor, api: Api, job: Manifest
) -> None:
    body = {"details": {"causes": [{"reason": "NamespaceTerminating"}]}}
    api.answers["create ConfigMap"] = ApiError(403, "Forbidden", "because it is being terminated", body)
    done = await executor.execute(job, Plan(create=(child(), child("Job", "math-check"))))
    assert done.namespace_terminating
    assert done.problems == []
    assert not any("Job/math-check" in call for call in api.calls)


async def test_a_fault_ends_the_pass_before_the_status(executor: Executor, api: Api, job: Manifest) -> None:
    api.answers["create ConfigMap"] = Unreachable("connection reset")
    with pytest.raises(Unreachable):
        await executor.execute(job, Plan(create=(child(),), status={"phase": "Checking"}))
    assert "status" not in api.objects["OPDJob", "math"]


async def test_nothing_is_created_for_a_job_that_changed_meanwhile(
    executor: Executor, api: Api, job: Manifest, cache: Cache
) -> None:
    api.objects["OPDJob", "math"]["metadata"]["resourceVersion"] = "900"
    api.objects["OPDJob", "math"]["spec"] = {"suspend": True}
    done = await executor.execute(job, Plan(create=(child(),)))
    assert done.outcome is Outcome.STALE
    assert ("ConfigMap", "math-config") not in api.objects
    assert cache.job(MATH)["spec"] == {"suspend": True}  # type: ignore[index]


@pytest.mark.parametrize("truth", ["as seen", "newer", "gone"])
async def test_nothing_is_done_about_the_silence_of_an_object_that_has_spoken(
    executor: Executor, api: Api, job: Manifest, cache: Cache, truth: str
) -> None:
    held = api.hold(child())
    cache.put(CHILDREN[Kind.CONFIG_MAP], trim(CHILDREN[Kind.CONFIG_MAP], held))
    if truth == "newer":
        api.objects["ConfigMap", "math-config"]["metadata"]["resourceVersion"] = "900"
    elif truth == "gone":
        del api.objects["ConfigMap", "math-config"]
    done = await executor.execute(job, Plan(doubt=(CHILD_REF,), status={"phase": "Failed"}))
    assert done.outcome is (Outcome.CHANGED if truth == "as seen" else Outcome.STALE)
    assert ("status" in api.objects["OPDJob", "math"]) == (truth == "as seen")
    known = [found["metadata"]["resourceVersion"] for found in cache.children(MATH, Kind.CONFIG_MAP)]
    assert known == {"as seen": [held["metadata"]["resourceVersion"]], "newer": ["900"], "gone": []}[truth]


@pytest.mark.parametrize("successor", [False, True])
async def test_nothing_is_created_for_a_job_that_is_gone(
    executor: Executor, api: Api, job: Manifest, cache: Cache, successor: bool
) -> None:
    del api.objects["OPDJob", "math"]
    if successor:
        api.hold({**job, "metadata": {**job["metadata"], "uid": "another"}})
    done = await executor.execute(job, Plan(create=(child(),)))
    assert done.outcome is Outcome.GONE
    assert ("ConfigMap", "math-config") not in api.objects
    assert cache.job(MATH) is None


async def test_a_secret_gets_values_that_nobody_chose(executor: Executor, api: Api, job: Manifest) -> None:
    request = SecretRequest(child("Secret", "math-keys"), ("api", "admin"))
    done = await executor.execute(job, Plan(secrets=(request,)))
    values = api.objects["Secret", "math-keys"]["stringData"]
    assert set(values) == {"api", "admin"}
    assert len(values["api"]) >= 43
    assert values["api"] != values["admin"]
    assert done.writes == 1
    again = await executor.execute(job, Plan(secrets=(request,)))
    assert again.problems == []
    assert api.objects["Secret", "math-keys"]["stringData"] == values
    assert "get Secret/math-keys" not in api.calls


async def test_the_status_becomes_exactly_the_planned_one(executor: Executor, api: Api, job: Manifest) -> None:
    await executor.execute(job, Plan(status={"phase": "Training", "training": {"step": 1, "percent": 5}}))
    fresh = trim(OPDJOB, api.objects["OPDJob", "math"])
    await executor.execute(fresh, Plan(status={"phase": "Succeeded", "training": {"step": 2}}))
    assert api.objects["OPDJob", "math"]["status"] == {"phase": "Succeeded", "training": {"step": 2}}


async def test_an_equal_status_is_not_written(executor: Executor, api: Api, job: Manifest) -> None:
    same = {**job, "status": {"phase": "Training"}}
    done = await executor.execute(same, Plan(status={"phase": "Training"}))
    assert done.outcome is Outcome.UNCHANGED
    assert api.calls == []


async def test_a_status_conflict_is_read_again_and_events_wait(
    executor: Executor, api: Api, job: Manifest, cache: Cache
) -> None:
    api.objects["OPDJob", "math"]["metadata"]["resourceVersion"] = "900"
    api.objects["OPDJob", "math"]["spec"] = {"suspend": True}
    event = PlannedEvent(EventType.NORMAL, "Accepted", "ok")
    done = await executor.execute(job, Plan(status={"phase": "Checking"}, events=(event,)))
    assert done.outcome is Outcome.STALE
    assert cache.job(MATH)["metadata"]["resourceVersion"] == "900"  # type: ignore[index]
    assert not any("Event" in call for call in api.calls)


async def test_somebody_elses_annotation_delays_neither_children_nor_status(
    executor: Executor, api: Api, job: Manifest
) -> None:
    held = api.objects["OPDJob", "math"]
    held["metadata"] |= {"resourceVersion": "900", "annotations": {"team/owner": "me"}}
    event = PlannedEvent(EventType.NORMAL, "Accepted", "ok")
    done = await executor.execute(job, Plan(create=(child(),), status={"phase": "Checking"}, events=(event,)))
    assert done.outcome is Outcome.CHANGED
    assert ("ConfigMap", "math-config") in api.objects
    assert api.objects["OPDJob", "math"]["status"] == {"phase": "Checking"}
    assert api.objects["OPDJob", "math"]["metadata"]["annotations"] == {"team/owner": "me"}
    assert any("create Event" in call for call in api.calls)


async def test_a_status_that_somebody_else_wrote_is_never_overwritten(
    executor: Executor, api: Api, job: Manifest
) -> None:
    api.objects["OPDJob", "math"]["metadata"]["resourceVersion"] = "900"
    api.objects["OPDJob", "math"]["status"] = {"phase": "Failed"}
    done = await executor.execute(job, Plan(status={"phase": "Checking"}))
    assert done.outcome is Outcome.STALE
    assert api.objects["OPDJob", "math"]["status"] == {"phase": "Failed"}


async def test_endless_conflicts_end_the_pass(executor: Executor, api: Api, job: Manifest) -> None:
    api.answers["patch/status OPDJob"] = ApiError(409, "Conflict", "changed")
    done = await executor.execute(job, Plan(status={"phase": "Checking"}))
    assert done.outcome is Outcome.STALE
    assert api.calls.count("patch/status OPDJob/math") == STATUS_CONFLICTS


async def test_deletes_name_the_uid_and_are_known_at_once(
    executor: Executor, api: Api, job: Manifest, cache: Cache
) -> None:
    await executor.execute(job, Plan(create=(child(),)))
    uid = api.objects["ConfigMap", "math-config"]["metadata"]["uid"]
    await executor.execute(job, Plan(delete=(Deletion(CHILD_REF, uid),)))
    assert ("ConfigMap", "math-config") not in api.objects
    (found,) = cache.children(MATH, Kind.CONFIG_MAP)
    assert found["metadata"]["deletionTimestamp"]
    await executor.execute(job, Plan(delete=(Deletion(CHILD_REF, uid),)))
    assert list(cache.children(MATH, Kind.CONFIG_MAP)) == [], "the second delete found nothing"


async def test_a_successor_survives_the_delete_of_its_predecessor(executor: Executor, api: Api, job: Manifest) -> None:
    api.hold(child())
    done = await executor.execute(job, Plan(delete=(Deletion(CHILD_REF, "former-uid"),)))
    assert ("ConfigMap", "math-config") in api.objects
    assert done.writes == 0


async def test_a_stop_is_an_annotation_and_needs_somebody_to_read_it(
    executor: Executor, api: Api, job: Manifest
) -> None:
    stop = StopRequest(CHILD_REF, 3)
    done = await executor.execute(job, Plan(annotate=(stop,)))
    assert done.problems == []
    api.hold(child())
    await executor.execute(job, Plan(annotate=(stop,)))
    assert api.objects["ConfigMap", "math-config"]["metadata"]["annotations"] == {"opd.dev/stop": "3"}


async def test_each_ended_attempt_is_counted_once_by_class(
    executor: Executor, api: Api, job: Manifest, metrics: Metrics
) -> None:
    attempt = {"number": 1, "endTime": "2026-01-01T00:00:00Z", "failureClass": "Infrastructure"}
    await executor.execute(job, Plan(status={"attempts": [attempt]}))
    fresh = trim(OPDJOB, api.objects["OPDJob", "math"])
    await executor.execute(fresh, Plan(status={"attempts": [attempt], "phase": "Retrying"}))
    text = metrics.render().decode()
    assert 'opd_job_attempts_total{class="Infrastructure"} 1.0' in text


def test_a_merge_patch_holds_only_differences() -> None:
    old = {"a": 1, "b": {"c": 1, "d": 2}, "e": [1]}
    assert merge_difference(old, old) == {}
    assert merge_difference(old, {"a": 1, "b": {"c": 3}, "e": [1, 2]}) == {"b": {"c": 3, "d": None}, "e": [1, 2]}
    assert merge_difference({}, {"x": {}}) == {"x": {}}


def test_only_new_ends_of_attempts_count() -> None:
    running = {"number": 1}
    ended = {"number": 1, "endTime": "t", "failureClass": "Data"}
    assert ended_attempts({"attempts": [running]}, {"attempts": [ended]}) == ["Data"]
    assert ended_attempts({"attempts": [ended]}, {"attempts": [ended, {"number": 2}]}) == []
    assert ended_attempts({}, {"attempts": [{"number": 1, "endTime": "t"}]}) == ["none"]
