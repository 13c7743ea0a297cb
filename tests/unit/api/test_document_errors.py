"""A document that does not fit the models: the path as in the YAML, and what was probably meant."""

from __future__ import annotations

from typing import Any

import pytest
from opd_testing.jobs import ABSENT, job_document

from opd_api.rules import Finding, check_document
from opd_api.vocabulary import Severity


def only(changes: dict[str, Any]) -> Finding:
    job, found = check_document(job_document(changes))
    assert job is None
    assert len(found) == 1, found
    return found[0]


CASES: tuple[tuple[dict[str, Any], str, str, str], ...] = (
    ({"spec.distillation.topk": 8}, "UnknownField", "spec.distillation.topk", "'topK'"),
    ({"spec.distillation.top_k": 8}, "UnknownField", "spec.distillation.top_k", "'topK'"),
    ({"spec.teachers.0.modle": {}}, "UnknownField", "spec.teachers[0].modle", "'model'"),
    ({"spec.student.model.sorce": "x"}, "UnknownField", "spec.student.model.sorce", "'source'"),
    ({"spec.topK": 8}, "UnknownField", "spec.topK", "spec.distillation.topK"),
    ({"spec.zzz": 8}, "UnknownField", "spec.zzz", "acknowledge, data"),
    ({"spec.distillation.signal": "los"}, "UnknownValue", "spec.distillation.signal", "'loss'"),
    ({"spec.teachers.0.backend": "SGLang"}, "UnknownValue", "spec.teachers[0].backend", "'sglang'"),
    (
        {"spec.task.reward": "mathverify"},
        "UnknownValue",
        "spec.task.reward",
        "module:function. Did you mean 'math_verify'",
    ),
    ({"spec.student.model.dtype": "float32"}, "UnknownValue", "spec.student.model.dtype", "Did you mean 'fp32'"),
    ({"spec.student.model.dtype": "torch.bfloat16"}, "UnknownValue", "spec.student.model.dtype", "Did you mean 'bf16'"),
    ({"spec.training.dtype": "float16"}, "UnknownValue", "spec.training.dtype", "Did you mean 'fp16'"),
    ({"spec.training.dtype": "half"}, "UnknownValue", "spec.training.dtype", "Did you mean 'fp16'"),
    ({"kind": "OPDjob"}, "UnknownValue", "kind", "'OPDJob'"),
    ({"spec.training.steps": "200"}, "WrongType", "spec.training.steps", "'200'"),
    ({"spec.suspend": "yes"}, "WrongType", "spec.suspend", "'yes'"),
    ({"spec.teachers": {}}, "WrongType", "spec.teachers", "valid array"),
    ({"spec.runtime.resources.requests": {"cpu": [1]}}, "WrongType", "spec.runtime.resources.requests.cpu", "[1]"),
    ({"spec.training.steps": 0}, "OutOfRange", "spec.training.steps", "greater than or equal to 1"),
    ({"spec.teachers": []}, "OutOfRange", "spec.teachers", "at least 1"),
    ({"spec.distillation.coefficient": float("nan")}, "OutOfRange", "spec.distillation.coefficient", "finite"),
    ({"spec.training.learningRate": float("inf")}, "OutOfRange", "spec.training.learningRate", "finite"),
    ({"spec.teachers.0.name": "Big_One"}, "BadText", "spec.teachers[0].name", "form"),
    ({"spec.routing.map": {"math": "Bad Name"}}, "BadText", "spec.routing.map.math", "form"),
    (
        {"spec.teachers.0": {"name": "t", "endpoints": ["ftp://x"]}},
        "BadText",
        "spec.teachers[0].endpoints[0]",
        "https?",
    ),
    ({"spec.student.model": {}}, "MissingField", "spec.student.model.source", "Hub id"),
    ({"spec.data": ABSENT}, "MissingField", "spec.data", "The prompts"),
)


@pytest.mark.parametrize(("changes", "code", "path", "hint"), CASES, ids=[case[2] for case in CASES])
def test_an_error_names_path_and_remedy(changes: dict[str, Any], code: str, path: str, hint: str) -> None:
    finding = only(changes)
    assert (finding.code, finding.severity, finding.path) == (code, Severity.ERROR, path)
    assert hint in finding.message


def test_all_errors_are_told_at_once() -> None:
    _, found = check_document(job_document({"spec.distillation.topk": 1, "spec.student.model": {}, "spec.suspend": 3}))
    assert {finding.path for finding in found} == {
        "spec.distillation.topk",
        "spec.student.model.source",
        "spec.suspend",
    }


@pytest.mark.parametrize(
    "document", [None, [], "text", 3, {}, {"spec": []}, {"kind": "OPDJob", "spec": {"teachers": [None]}}]
)
def test_no_document_of_any_form_raises(document: Any) -> None:
    job, found = check_document(document)
    assert job is None
    assert found
    assert all(finding.severity is Severity.ERROR for finding in found)


def test_a_section_without_content_is_as_good_as_none() -> None:
    sections = ("rollout", "runtime", "routing", "lifecycle", "suspend", "acknowledge")
    job, found = check_document(job_document({f"spec.{name}": None for name in sections}))
    assert job is not None
    assert (job, found) == check_document(job_document({}))


def test_an_integer_may_be_written_as_a_whole_float() -> None:
    job, _ = check_document(job_document({"spec.training.promptsPerStep": 1e3, "spec.training.gpus": 4.0}))
    assert job is not None
    assert (job.spec.training.prompts_per_step, job.spec.training.gpus) == (1000, 4)
    assert only({"spec.training.gpus": 4.5}).code == "WrongType"


@pytest.mark.parametrize("path", ["spec.training.steps", "spec.training.seed", "spec.ray.head.template.spec.priority"])
@pytest.mark.parametrize("bits", [63, 133, 20_000])
def test_an_integer_that_kubernetes_does_not_hold_is_refused_wherever_it_stands(path: str, bits: int) -> None:
    finding = only({path: 2**bits})
    assert (finding.code, finding.path) == ("OutOfRange", path)
    assert "Write at most 9223372036854775807" in finding.message


def test_a_required_field_that_is_null_is_missing() -> None:
    assert only({"spec.student": None}).code == "MissingField"


def test_a_template_that_is_nested_too_deep_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"a": deep}
    finding = only({"spec.teachers.0.template": deep})
    assert (finding.severity, finding.path) == (Severity.ERROR, "")
    assert "recursion" in finding.message


def test_an_object_that_contains_itself_is_refused() -> None:
    template: dict[str, Any] = {}
    template["a"] = template
    document = job_document({})
    document["spec"]["teachers"][0]["template"] = template
    job, (finding,) = check_document(document)
    assert job is None
    assert "contains itself" in finding.message


def test_text_that_is_no_unicode_is_refused() -> None:
    assert only({"spec.data.source": "/data/\ud800"}).severity is Severity.ERROR


def test_metadata_of_the_api_server_is_accepted() -> None:
    document = job_document(
        {"metadata.creationTimestamp": "2026-01-01T00:00:00Z", "metadata.managedFields": [{"manager": "x"}]}
    )
    assert check_document(document)[0] is not None
