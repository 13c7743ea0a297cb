"""Every rule refuses what it is there for, accepts the remedy, and says where and what to write instead."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from opd_testing.jobs import ABSENT, job_document
from opd_testing.rule_examples import EXAMPLES as EARLIER
from opd_testing.rule_examples import NOT_YET_EXAMPLES, TOPK, UNREAD_EXAMPLES, Example
from opd_testing.rule_examples_pods import POD_EXAMPLES

from opd_api.rules import OVERRIDABLE, RULES, UNKNOWN_ACKNOWLEDGEMENT, Finding, Level, check, check_document, refused
from opd_api.rules.effect import UNREAD
from opd_api.rules.not_yet import NOT_YET
from opd_api.v1alpha1 import FindingStatus, OPDJob
from opd_api.vocabulary import Severity

EXAMPLES = (*EARLIER, *POD_EXAMPLES)
LEVELS = {rule.code: rule.level for rule in RULES}


def findings(changes: dict[str, Any], **options: Any) -> list[Finding]:
    job, found = check_document(job_document(changes), **options)
    assert job is not None, found
    return found


def of_code(found: list[Finding], code: str) -> list[Finding]:
    return [finding for finding in found if finding.code == code]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.code}-{example.path}")
def test_a_broken_rule_blames_the_field_with_its_severity_and_a_remedy(example: Example) -> None:
    hits = [finding for finding in of_code(findings(example.refused), example.code) if finding.path == example.path]
    assert len(hits) == 1, findings(example.refused)
    expected = Severity.WARNING if LEVELS[example.code] is Level.WARNING else Severity.ERROR
    assert hits[0].severity is expected
    assert re.search("(?i)write|remove|keep|give|add|at most|the teachers are|is lost", hits[0].message)


@pytest.mark.parametrize(
    "example", [item for item in EXAMPLES if item.accepted], ids=lambda example: f"{example.code}-{example.path}"
)
def test_the_remedy_is_accepted(example: Example) -> None:
    assert of_code(findings(example.accepted), example.code) == []


def test_every_rule_has_an_example() -> None:
    assert {rule.code for rule in RULES} - {"NotYet"} == {example.code for example in EXAMPLES}


def test_codes_are_unique_and_camel_case() -> None:
    codes = [rule.code for rule in RULES]
    assert len(codes) == len(set(codes))
    assert all(code[0].isupper() and code.isalnum() for code in codes)


def test_the_smallest_job_is_accepted() -> None:
    job, found = check_document(job_document())
    assert job is not None
    assert [finding.code for finding in found] == ["HalfIdle"]
    assert not refused(found)


@pytest.mark.parametrize("code", sorted(OVERRIDABLE))
def test_an_acknowledged_rule_warns_instead_of_refusing(code: str) -> None:
    broken = next(example.refused for example in EXAMPLES if example.code == code)
    assert of_code(findings(broken), code)[0].severity is Severity.ERROR
    assert code in of_code(findings(broken), code)[0].message, "the message must say how to acknowledge"
    (hit,) = of_code(findings(broken | {"spec.acknowledge": [code]}), code)
    assert hit.severity is Severity.WARNING


def test_exactly_the_overridable_rules_can_be_acknowledged() -> None:
    assert {"K3AdvantageBiased", "SetAdvantageIsZero", "TruncReverseKl"} == OVERRIDABLE
    for rule in RULES:
        found = findings({"spec.acknowledge": [rule.code]})
        assert bool(of_code(found, UNKNOWN_ACKNOWLEDGEMENT)) is (rule.code not in OVERRIDABLE)


def test_an_acknowledged_error_that_cannot_be_overridden_stays_an_error() -> None:
    found = findings({"spec.distillation.signal": "loss", "spec.acknowledge": ["SampledK1AsLoss"]})
    assert of_code(found, "SampledK1AsLoss")[0].severity is Severity.ERROR


def test_an_unknown_acknowledgement_is_an_error_with_a_guess() -> None:
    (hit,) = of_code(findings({"spec.acknowledge": ["setAdvantageIsZro"]}), UNKNOWN_ACKNOWLEDGEMENT)
    assert (hit.severity, hit.path) == (Severity.ERROR, "spec.acknowledge[0]")
    assert "SetAdvantageIsZero" in hit.message


def test_errors_come_before_warnings() -> None:
    found = findings(TOPK | {"spec.suspend": True, "spec.rollout.sampling.topP": 0.5})
    severities = [finding.severity for finding in found]
    assert severities == sorted(severities, key=list(Severity).index)
    assert len(set(severities)) == 2


def test_a_local_run_needs_no_claim() -> None:
    assert of_code(findings({"spec.storage": {}}, local=True), "ClaimMissing") == []
    assert of_code(findings({"spec.storage": {}}), "ClaimMissing") != []


def test_every_option_that_does_not_train_yet_is_refused() -> None:
    for entry in NOT_YET:
        hits = of_code(findings(NOT_YET_EXAMPLES[entry.path]), "NotYet")
        assert [(hit.path, hit.severity) for hit in hits] == [(entry.path, Severity.ERROR)]
        assert "Write" in hits[0].message


def test_every_value_that_nothing_reads_is_named() -> None:
    assert set(UNREAD_EXAMPLES) == {entry.path for entry in UNREAD}
    for path, changes in UNREAD_EXAMPLES.items():
        hits = of_code(findings(changes), "HasNoEffect")
        assert [hit.path for hit in hits] == [path]
        assert hits[0].severity is Severity.WARNING


def test_the_findings_of_a_job_do_not_depend_on_how_it_was_read() -> None:
    document = job_document(TOPK)
    assert check(OPDJob.parse(document)) == check_document(document)[1]


def test_a_finding_is_frozen_and_fits_into_the_status() -> None:
    finding = Finding("Code", Severity.ERROR, "spec.x" * 400, "m" * 5000)
    with pytest.raises(dataclasses.FrozenInstanceError):
        finding.code = "Other"  # type: ignore[misc]
    status = finding.to_status()
    assert isinstance(status, FindingStatus)
    assert (len(status.path), len(status.message), status.severity) == (1024, 1024, "Error")


def test_absent_takes_a_field_away() -> None:
    assert "data" not in job_document({"spec.data": ABSENT})["spec"]
