"""Rules about files and objects that the spec only names: usual response lengths, claims."""

from __future__ import annotations

from opd_testing.jobs import job_document

from opd_api.rules.facts import CLAIM_ACCESS_MODE, RESPONSE_CAP_SHORT, claim_findings, response_cap_findings
from opd_api.v1alpha1 import OPDJob, OPDJobSpec
from opd_api.vocabulary import Severity


def spec(changes: dict[str, object] | None = None) -> OPDJobSpec:
    return OPDJob.parse(job_document(changes)).spec


def test_a_response_cap_below_the_usual_length_warns() -> None:
    (finding,) = response_cap_findings(spec({"spec.rollout.maxResponseTokens": 512}), {"teacher": 2000})
    assert (finding.code, finding.severity) == (RESPONSE_CAP_SHORT, Severity.WARNING)
    assert response_cap_findings(spec(), {"teacher": 2000}) == response_cap_findings(spec(), {}) == []


def test_claims_need_many_writers() -> None:
    def seen(*modes: str) -> list[tuple[str, Severity]]:
        return [(item.code, item.severity) for item in claim_findings(spec(), modes)]

    assert seen("ReadWriteMany") == seen("ReadWriteOnce", "ReadWriteMany") == seen() == []
    assert seen("ReadWriteOnce") == [(CLAIM_ACCESS_MODE, Severity.WARNING)]
    assert seen("ReadWriteOncePod") == [(CLAIM_ACCESS_MODE, Severity.ERROR)]
    assert seen("ReadOnlyMany") == [(CLAIM_ACCESS_MODE, Severity.ERROR)]
