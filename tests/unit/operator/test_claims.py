"""Rule 21: a claim that not every pod can mount is seen before anything starts, and read no more afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from opd_testing.jobs import job_document

from opd_api.rules.facts import CLAIM_ACCESS_MODE
from opd_operator.claims import KEEP_SECONDS, ClaimReader
from opd_operator.job_view import job_view
from opd_operator.model import Manifest, Snapshot
from opd_operator.resources import Resource


class OneClaim:
    """A cluster with one claim, or none."""

    def __init__(self, *modes: str, exists: bool = True) -> None:
        self.claim: Manifest | None = {"spec": {"accessModes": list(modes)}} if exists else None
        self.reads: list[tuple[str, str, str]] = []

    async def get(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        self.reads.append((resource.plural, namespace, name))
        return self.claim


def raw(**status: Any) -> Manifest:
    document = job_document()
    document["metadata"] |= {"namespace": "team", "uid": "0a1b2c3d"}
    return document | ({"status": status} if status else {})


@pytest.mark.parametrize(
    ("modes", "severities"),
    [
        (("ReadWriteMany",), []),
        (("ReadWriteOnce",), ["Warning"]),
        (("ReadWriteOncePod",), ["Error"]),
        (("ReadOnlyMany",), ["Error"]),
    ],
)
async def test_access_modes_become_findings(modes: tuple[str, ...], severities: list[str]) -> None:
    reader = ClaimReader(OneClaim(*modes))  # type: ignore[arg-type]
    snapshot = await reader.complete(Snapshot(job=raw()))
    view = job_view(snapshot.job, snapshot.claim_modes)
    assert [item.severity for item in view.findings if item.code == CLAIM_ACCESS_MODE] == severities
    assert view.refused is ("Error" in severities)


async def test_a_claim_that_does_not_exist_yet_is_no_finding_and_is_looked_for_again() -> None:
    cluster = OneClaim(exists=False)
    reader = ClaimReader(cluster)  # type: ignore[arg-type]
    for _ in range(2):
        assert (await reader.complete(Snapshot(job=raw()))).claim_modes == ()
    assert cluster.reads == [("persistentvolumeclaims", "team", "opd-math")] * 2


async def test_an_answer_is_kept_for_a_while() -> None:
    clock = [0.0]
    cluster = OneClaim("ReadWriteOnce")
    reader = ClaimReader(cluster, clock=lambda: clock[0])  # type: ignore[arg-type]
    for clock[0] in (0.0, KEEP_SECONDS / 2, KEEP_SECONDS + 1):
        assert (await reader.complete(Snapshot(job=raw()))).claim_modes == ("ReadWriteOnce",)
    assert len(cluster.reads) == 2


async def test_a_started_job_is_not_read_again_and_keeps_its_finding() -> None:
    cluster = OneClaim("ReadWriteOnce")
    finding = {
        "code": CLAIM_ACCESS_MODE,
        "severity": "Warning",
        "path": "spec.storage.claimName",
        "message": "one node",
    }
    started = raw(startTime="2026-01-01T00:00:00Z", findings=[finding])
    snapshot = await ClaimReader(cluster).complete(Snapshot(job=started))  # type: ignore[arg-type]
    assert cluster.reads == []
    assert [item.message for item in job_view(snapshot.job).findings if item.code == CLAIM_ACCESS_MODE] == ["one node"]


async def test_a_job_without_a_claim_asks_for_nothing() -> None:
    cluster = OneClaim("ReadWriteMany")
    job = raw()
    job["spec"]["storage"] = {}
    assert (await ClaimReader(cluster).complete(Snapshot(job=job))).claim_modes == ()  # type: ignore[arg-type]
    assert cluster.reads == []
