"""Rule 21: what the access modes of a claim allow."""

from __future__ import annotations

from opd_testing.jobs import job_document

from opd_api.rules.facts import CLAIM_ACCESS_MODE, claim_findings
from opd_api.v1alpha1 import OPDJob, OPDJobSpec
from opd_api.vocabulary import Severity


def spec(changes: dict[str, object] | None = None) -> OPDJobSpec:
    return OPDJob.parse(job_document(changes)).spec


def test_claims_need_many_writers() -> None:
    def seen(*modes: str) -> list[tuple[str, Severity]]:
        return [(item.code, item.severity) for item in claim_findings(spec(), modes)]

    assert seen("ReadWriteMany") == seen("ReadWriteOnce", "ReadWriteMany") == seen() == []
    assert seen("ReadWriteOnce") == [(CLAIM_ACCESS_MODE, Severity.WARNING)]
    assert seen("ReadWriteOncePod") == [(CLAIM_ACCESS_MODE, Severity.ERROR)]
    assert seen("ReadOnlyMany") == [(CLAIM_ACCESS_MODE, Severity.ERROR)]
