"""Every example is a job that would be accepted, with exactly the warnings that its comments talk about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from opd_api.rules import check_document, refused
from opd_operator.children.render import render
from opd_operator.settings import Settings

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
WARNINGS: dict[str, set[str]] = {
    "quickstart": {"LearningRateHigh"},
    "dapo-math-qwen3-8b": set(),
    "teacher-topk-verl": {"TruncForwardKl"},
    "teacher-topk-relax": set(),
    "topk-advantage-relax": {"SetAdvantageIsZero"},
    "tropd-nemo-rl": set(),
    "two-teachers": set(),
    "external-teacher": set(),
}


def document(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def test_all_examples_are_listed() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == set(WARNINGS)


@pytest.mark.parametrize("name", sorted(WARNINGS))
def test_an_example_is_accepted_with_the_warnings_it_explains(name: str) -> None:
    job, findings = check_document(document(name))
    assert job is not None
    assert not refused(findings)
    assert {finding.code for finding in findings} == WARNINGS[name]
    assert job.metadata.name == name


@pytest.mark.parametrize("name", sorted(WARNINGS))
def test_an_example_renders(name: str) -> None:
    job, _ = check_document(document(name))
    assert job is not None
    kinds = [child["kind"] for child in render(job, Settings())]
    assert kinds[-1] == "RayJob"
    assert kinds.count("Deployment") == sum(teacher.served_by_operator for teacher in job.spec.teachers)


def test_an_acknowledgement_is_needed_where_it_stands() -> None:
    for name in WARNINGS:
        without = document(name)
        codes = without["spec"].pop("acknowledge", [])
        assert refused(check_document(without)[1]) is bool(codes), name
