"""Events about OPDJobs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from opd_operator.errors import ApiError, Unreachable
from opd_operator.model import ObjectRef
from opd_operator.planned import EventType, PlannedEvent
from opd_operator.recorder import Recorder

Manifest = dict[str, Any]
JOB: Manifest = {"metadata": {"name": "math", "namespace": "team", "uid": "uid-1"}}
STARTED = PlannedEvent(EventType.NORMAL, "AttemptStarted", "attempt 1 starts")


class Sink:
    def __init__(self) -> None:
        self.created: list[Manifest] = []
        self.patched: list[tuple[ObjectRef, Manifest]] = []
        self.error: Exception | None = None

    async def create(self, manifest: Manifest, *, fenced: bool = True) -> Manifest:
        if self.error:
            raise self.error
        self.created.append(manifest)
        return manifest

    async def merge_patch(
        self, ref: ObjectRef, patch: Manifest, *, subresource: str | None = None, fenced: bool = True
    ) -> Manifest:
        self.patched.append((ref, patch))
        return patch


class Hand:
    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def recorder(sink: Sink, hand: Hand) -> Recorder:
    return Recorder(sink, instance="opd-operator-0", now=hand)


async def test_an_event_names_job_reason_and_reporter(recorder: Recorder, sink: Sink) -> None:
    await recorder.record(JOB, STARTED)
    (event,) = sink.created
    assert event["involvedObject"]["name"] == "math"
    assert event["involvedObject"]["uid"] == "uid-1"
    assert event["reason"] == "AttemptStarted"
    assert event["message"] == "attempt 1 starts"
    assert event["reportingInstance"] == "opd-operator-0"
    assert event["metadata"]["namespace"] == "team"


async def test_a_repeated_event_is_one_object_with_a_count(recorder: Recorder, sink: Sink, hand: Hand) -> None:
    for _ in range(5):
        await recorder.record(JOB, STARTED)
    hand.advance(61)
    await recorder.record(JOB, STARTED)
    assert len(sink.created) == 1
    assert {ref.name for ref, _ in sink.patched} == {sink.created[0]["metadata"]["name"]}
    assert [patch["count"] for _, patch in sink.patched] == [2, 6]
    assert (sink.created[0]["firstTimestamp"], sink.patched[-1][1]["lastTimestamp"]) == (
        "2026-01-01T00:00:00Z",
        "2026-01-01T00:01:01Z",
    )


async def test_events_are_listed_in_the_order_in_which_they_happened(
    recorder: Recorder, sink: Sink, hand: Hand
) -> None:
    """As kubectl describe lists them: by lastTimestamp, and by name within a second."""
    messages = [f"event {number}" for number in (3, 1, 2, 9, 5)]
    for message in messages:
        await recorder.record(JOB, PlannedEvent(EventType.NORMAL, "AttemptStarted", message))
        hand.advance(0.4)
    listed = sorted(sink.created, key=lambda event: (event["lastTimestamp"], event["metadata"]["name"]))
    assert [event["message"] for event in listed] == messages


async def test_the_same_event_after_the_window_is_a_new_one(recorder: Recorder, sink: Sink, hand: Hand) -> None:
    await recorder.record(JOB, STARTED)
    hand.advance(601)
    await recorder.record(JOB, STARTED)
    names = {event["metadata"]["name"] for event in sink.created}
    assert len(names) == 2


async def test_events_that_differ_in_anything_are_told_apart(recorder: Recorder, sink: Sink) -> None:
    await recorder.record(JOB, STARTED)
    await recorder.record(JOB, PlannedEvent(EventType.NORMAL, "AttemptStarted", "attempt 2 starts"))
    await recorder.record(JOB, PlannedEvent(EventType.WARNING, "AttemptStarted", "attempt 1 starts"))
    await recorder.record({"metadata": {**JOB["metadata"], "uid": "uid-2"}}, STARTED)
    assert len(sink.created) == 4


@pytest.mark.parametrize(
    "error", [Unreachable("cut"), ApiError(403, "Forbidden", "quota"), ApiError(409, "AlreadyExists", "")]
)
async def test_an_event_that_cannot_be_written_fails_nothing(recorder: Recorder, sink: Sink, error: Exception) -> None:
    sink.error = error
    await recorder.record(JOB, STARTED)
    assert sink.created == []


async def test_a_long_message_is_cut_to_what_the_api_takes(recorder: Recorder, sink: Sink) -> None:
    await recorder.record(JOB, PlannedEvent(EventType.WARNING, "Warning", "ü" * 2000))
    assert len(sink.created[0]["message"].encode()) <= 1024


async def test_what_is_remembered_is_bounded_and_ends_with_the_job(recorder: Recorder) -> None:
    for number in range(5000):
        await recorder.record(JOB, PlannedEvent(EventType.NORMAL, "AttemptStarted", str(number)))
    assert len(recorder._series) == 4096
    recorder.forget("uid-1")
    assert not recorder._series
