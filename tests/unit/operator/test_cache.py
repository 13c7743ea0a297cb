"""The cache: what watches, lists and own writes say of the same objects, in any order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from opd_api.progress import FINAL_KEY, PROGRESS_KEY
from opd_operator.cache import TOMBSTONE_SECONDS, Cache, Change, JobKey, Urgency, trim
from opd_operator.children.names import job_label, progress_config_map
from opd_operator.model import Kind, ObjectRef
from opd_operator.resources import CHILDREN, OPDJOB

Manifest = dict[str, Any]
MATH = JobKey("team", "math")
PODS = CHILDREN[Kind.POD]
CONFIG_MAPS = CHILDREN[Kind.CONFIG_MAP]


def job(version: int, *, name: str = "math", uid: str = "job-uid", **status: Any) -> Manifest:
    metadata = {"name": name, "namespace": "team", "uid": uid, "resourceVersion": str(version)}
    return trim(OPDJOB, {"metadata": metadata, "spec": {}, "status": status})


def pod(version: int, *, name: str = "p", uid: str = "pod-uid", of: str = "math") -> Manifest:
    metadata = {
        "name": name,
        "namespace": "team",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": {"opd.dev/job": job_label(of)},
    }
    return trim(PODS, {"metadata": metadata, "spec": {"containers": []}, "status": {"phase": "Pending"}})


def progress(version: int, document: Manifest | None = None, final: str | None = None) -> Manifest:
    metadata = {
        "name": progress_config_map("math"),
        "namespace": "team",
        "uid": "cm-uid",
        "resourceVersion": str(version),
        "labels": {"opd.dev/job": "math", "app.kubernetes.io/instance": "math"},
    }
    data = {PROGRESS_KEY: json.dumps(document or {})}
    if final is not None:
        data[FINAL_KEY] = final
    return trim(CONFIG_MAPS, {"metadata": metadata, "data": data})


@pytest.fixture
def cache() -> Cache:
    made = Cache()
    made.put(OPDJOB, job(10))
    return made


def test_a_child_queues_its_job_and_is_in_its_snapshot(cache: Cache) -> None:
    assert cache.put(PODS, pod(11)) == Change(MATH, Urgency.NOW)
    snapshot = cache.snapshot(MATH)
    assert snapshot is not None
    assert [found["metadata"]["name"] for found in snapshot.pods] == ["p"]


def test_a_child_that_was_seen_before_its_job_is_found_later() -> None:
    cache = Cache()
    assert cache.put(PODS, pod(5)) is None
    cache.put(OPDJOB, job(6))
    snapshot = cache.snapshot(MATH)
    assert snapshot is not None
    assert len(snapshot.pods) == 1


def test_an_older_version_never_replaces_a_newer_one(cache: Cache) -> None:
    assert cache.put(OPDJOB, job(12, phase="Training")) is not None
    assert cache.put(OPDJOB, job(11, phase="Pending")) is None
    assert cache.job(MATH)["status"]["phase"] == "Training"  # type: ignore[index]


def test_the_echo_of_our_own_write_makes_no_work(cache: Cache) -> None:
    cache.put(OPDJOB, job(12))
    assert cache.put(OPDJOB, job(12)) is None


def test_versions_are_compared_as_numbers(cache: Cache) -> None:
    cache.put(PODS, pod(99))
    assert cache.put(PODS, pod(100)) is not None


def test_a_list_drops_what_vanished_and_keeps_what_is_newer_than_the_list(cache: Cache) -> None:
    cache.put(PODS, pod(20, name="kept", uid="kept"))
    cache.put(PODS, pod(21, name="vanished", uid="vanished"))
    cache.put(PODS, pod(31, name="newer", uid="newer"))
    changes = cache.drop_absent(PODS, None, {("team", "kept")}, "30")
    assert changes == [Change(MATH, Urgency.NOW)]
    assert {found["metadata"]["name"] for found in cache.children(MATH, Kind.POD)} == {"kept", "newer"}


def test_a_list_of_one_namespace_drops_nothing_elsewhere(cache: Cache) -> None:
    assert cache.drop_absent(OPDJOB, "other", set(), "99") == []
    assert cache.job(MATH) is not None
    assert cache.drop_absent(OPDJOB, "team", set(), "99") == [Change(MATH, Urgency.NOW)]
    assert cache.snapshot(MATH) is None


def test_a_late_page_of_a_list_cannot_bring_a_deleted_object_back(cache: Cache) -> None:
    cache.put(PODS, pod(20))
    cache.remove(PODS, pod(22))
    assert cache.put(PODS, pod(21)) is None
    assert list(cache.children(MATH, Kind.POD)) == []


def test_the_deletion_of_a_former_object_leaves_its_successor_alone(cache: Cache) -> None:
    cache.put(PODS, pod(30, uid="second"))
    assert cache.remove(PODS, pod(25, uid="first")) is None
    assert len(list(cache.children(MATH, Kind.POD))) == 1


def test_a_job_made_again_under_its_name_replaces_the_old_one(cache: Cache) -> None:
    cache.remove(OPDJOB, job(11))
    cache.put(OPDJOB, job(12, uid="second"))
    assert cache.job(MATH)["metadata"]["uid"] == "second"  # type: ignore[index]


def test_heartbeats_without_news_can_wait(cache: Cache) -> None:
    first = {"attempt": 1, "sequence": 1, "phase": "Training", "step": 1}
    assert cache.put(CONFIG_MAPS, progress(20, first)) == Change(MATH, Urgency.NOW)
    assert cache.put(CONFIG_MAPS, progress(21, first | {"sequence": 2, "step": 9})) == Change(MATH, Urgency.SOON)


@pytest.mark.parametrize("news", [{"attempt": 2}, {"phase": "TeacherUnavailable"}, {"phase": "Exporting"}])
def test_news_in_a_heartbeat_cannot_wait(cache: Cache, news: Manifest) -> None:
    first = {"attempt": 1, "sequence": 1, "phase": "Training"}
    cache.put(CONFIG_MAPS, progress(20, first))
    assert cache.put(CONFIG_MAPS, progress(21, first | news)) == Change(MATH, Urgency.NOW)


def test_the_final_document_cannot_wait(cache: Cache) -> None:
    first = {"attempt": 1, "sequence": 1, "phase": "Training"}
    cache.put(CONFIG_MAPS, progress(20, first))
    assert cache.put(CONFIG_MAPS, progress(21, first, final="{}")) == Change(MATH, Urgency.NOW)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_a_progress_document_that_is_no_json_is_passed_on_as_it_is(cache: Cache, text: str) -> None:
    for version in (20, 21):
        broken = progress(version)
        broken["data"][PROGRESS_KEY] = text
        assert cache.put(CONFIG_MAPS, broken) is not None


def test_an_accepted_delete_is_known_before_the_watch_tells(cache: Cache) -> None:
    cache.put(PODS, pod(20))
    cache.mark_deleting(MATH, ObjectRef("v1", "Pod", "team", "p"), "pod-uid", "2026-01-01T00:00:00Z")
    (found,) = cache.children(MATH, Kind.POD)
    assert found["metadata"]["deletionTimestamp"] == "2026-01-01T00:00:00Z"
    assert cache.put(PODS, pod(21)) is not None, "the watch's word replaces ours"


def test_an_object_that_a_delete_did_not_find_is_dropped(cache: Cache) -> None:
    cache.put(PODS, pod(20))
    cache.forget(MATH, ObjectRef("v1", "Pod", "team", "p"), "pod-uid")
    assert list(cache.children(MATH, Kind.POD)) == []


def test_jobs_of_long_and_similar_names_do_not_mix() -> None:
    cache = Cache()
    long = "a" * 70
    for name, uid in ((long, "1"), (long + "b", "2")):
        cache.put(OPDJOB, job(1, name=name, uid=uid))
        cache.put(PODS, pod(2, name=f"p{uid}", uid=f"p{uid}", of=name))
    snapshot = cache.snapshot(JobKey("team", long + "b"))
    assert snapshot is not None
    assert [found["metadata"]["name"] for found in snapshot.pods] == ["p2"]


def test_ten_thousand_jobs_that_come_and_go_leave_the_uids_of_the_last_minutes() -> None:
    now = 0.0
    cache = Cache(clock=lambda: now)
    for number in range(10_000):
        now += 1.0
        uid = f"j{number}"
        cache.put(OPDJOB, job(number * 4 + 1, name=uid, uid=uid))
        cache.put(PODS, pod(number * 4 + 2, name=uid, uid=f"p{number}", of=uid))
        cache.remove(PODS, pod(number * 4 + 3, name=uid, uid=f"p{number}", of=uid))
        cache.remove(OPDJOB, job(number * 4 + 4, name=uid, uid=uid))
    assert cache.size == 0
    assert not cache._children
    assert not cache._job_of_label
    assert len(cache._gone) <= 2 * (TOMBSTONE_SECONDS + 1)


def test_a_list_cannot_bring_back_what_was_deleted_while_it_was_read() -> None:
    now = 0.0
    cache = Cache(clock=lambda: now)
    cache.put(OPDJOB, job(1))
    cache.remove(PODS, pod(20))
    now = TOMBSTONE_SECONDS
    cache.remove(PODS, pod(21, name="other", uid="other"))
    assert cache.put(PODS, pod(19)) is None
    assert list(cache.children(MATH, Kind.POD)) == []


def test_trimming_keeps_what_decisions_read_and_drops_the_bulk() -> None:
    managed = {
        "name": "p",
        "namespace": "team",
        "uid": "u",
        "labels": {"opd.dev/job": "math"},
        "managedFields": [{"big": "x"}],
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "opd.dev/restart": "1"},
    }
    spec = {
        "nodeName": "n",
        "volumes": [1],
        "containers": [
            {"name": "c", "image": "i", "env": [{"name": "K", "value": "secret"}], "resources": {"limits": {}}}
        ],
    }
    found = trim(PODS, {"metadata": managed, "spec": spec, "status": {"phase": "Running"}})
    assert found["spec"] == {"nodeName": "n", "containers": [{"name": "c", "resources": {"limits": {}}}]}
    assert found["metadata"]["annotations"] == {"opd.dev/restart": "1"}
    assert "managedFields" not in found["metadata"]
    assert found["status"] == {"phase": "Running"}
    ray = trim(CHILDREN[Kind.RAY_JOB], {"metadata": managed, "spec": {"rayClusterSpec": {}}, "status": {}})
    assert "spec" not in ray
    config = trim(CONFIG_MAPS, {"metadata": managed, "data": {"job.json": "x" * 10_000}})
    assert "data" not in config, "only the progress ConfigMap is read"
