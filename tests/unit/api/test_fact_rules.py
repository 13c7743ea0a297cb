"""Rules about files and objects that the spec only names: tokenizers, usual response lengths, claims."""

from __future__ import annotations

from dataclasses import replace

from opd_testing.jobs import job_document
from opd_testing.rule_examples import EXTERNAL, TWO

from opd_api.rules.facts import (
    CLAIM_ACCESS_MODE,
    ENSEMBLE_TOKENIZERS,
    PADDING_DIFFERS,
    RESPONSE_CAP_SHORT,
    TOKENIZER_MISMATCH,
    TOKENIZER_NOT_CHECKED,
    TokenizerFacts,
    claim_findings,
    response_cap_findings,
    tokenizer_findings,
)
from opd_api.v1alpha1 import OPDJob, OPDJobSpec
from opd_api.vocabulary import Severity

QWEN = TokenizerFacts({"a": 0, "b": 1, "<eos>": 2}, {"eos_token": 2, "pad_token": 2}, frozenset({2}))


def spec(changes: dict[str, object] | None = None) -> OPDJobSpec:
    return OPDJob.parse(job_document(changes)).spec


def codes(student: TokenizerFacts | None, teacher: TokenizerFacts | None) -> list[tuple[str, Severity]]:
    return [(item.code, item.severity) for item in tokenizer_findings(spec(), student, {"teacher": teacher})]


def test_equal_tokenizers_give_no_finding() -> None:
    assert codes(QWEN, replace(QWEN, vocabulary=dict(QWEN.vocabulary))) == []


def test_another_map_is_an_error_with_examples() -> None:
    (finding,) = tokenizer_findings(spec(), QWEN, {"teacher": replace(QWEN, vocabulary={"a": 1, "b": 0, "<eos>": 2})})
    assert (finding.code, finding.severity, finding.path) == (TOKENIZER_MISMATCH, Severity.ERROR, "spec.teachers[0]")
    assert "'a', 'b'" in finding.message


def test_a_token_that_only_one_side_has_is_an_error() -> None:
    assert codes(QWEN, replace(QWEN, vocabulary={**QWEN.vocabulary, "<tool>": 3})) == [
        (TOKENIZER_MISMATCH, Severity.ERROR)
    ]


def test_other_special_ids_are_an_error_and_other_padding_a_warning() -> None:
    assert codes(QWEN, replace(QWEN, special_ids={"eos_token": 1, "pad_token": 2})) == [
        (TOKENIZER_MISMATCH, Severity.ERROR)
    ]
    assert codes(QWEN, replace(QWEN, special_ids={"eos_token": 2, "pad_token": 0})) == [
        (PADDING_DIFFERS, Severity.WARNING)
    ]


def test_another_eos_set_is_an_error() -> None:
    assert codes(QWEN, replace(QWEN, eos_ids=frozenset({1, 2}))) == [(TOKENIZER_MISMATCH, Severity.ERROR)]


def test_a_side_that_cannot_be_read_is_not_checked() -> None:
    assert codes(None, QWEN) == codes(QWEN, None) == [(TOKENIZER_NOT_CHECKED, Severity.NOT_CHECKED)]
    (finding,) = tokenizer_findings(spec(EXTERNAL), QWEN, {})
    assert "tokenizer: " in finding.message, "an external teacher may name its tokenizer"


def test_an_ensemble_needs_one_tokenizer() -> None:
    ensemble = spec(TWO | {"spec.routing.mode": "ensemble"})
    other = replace(QWEN, vocabulary={"a": 1, "b": 0, "<eos>": 2})
    found = tokenizer_findings(ensemble, None, {"math": QWEN, "code": other})
    assert [(item.code, item.path) for item in found if item.severity is Severity.ERROR] == [
        (ENSEMBLE_TOKENIZERS, "spec.teachers[1]")
    ]
    routed = spec(TWO | {"spec.routing.default": "math"})
    assert all(
        item.severity is Severity.NOT_CHECKED
        for item in tokenizer_findings(routed, None, {"math": QWEN, "code": other})
    )


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
