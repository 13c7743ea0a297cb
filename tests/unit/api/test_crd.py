"""The CRD is what the models say, in the form that an API server accepts. A real one is asked in tests/integration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from opd_testing.jobs import job_document

from opd_api.cel import AT_APPLY, VALIDATIONS, may_change
from opd_api.crd import MAX_BYTES, crd, schema, structural, to_yaml
from opd_api.docs import api_page, rules_page, vocabulary_page
from opd_api.generate import chart_copy, generated, main
from opd_api.rules import RULES
from opd_api.rules.schema import field_paths
from opd_api.v1alpha1 import OPDJob
from opd_api.v1alpha1.base import ApiModel

ROOT = Path(__file__).resolve().parents[3]


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}".lstrip("."))
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")
    if isinstance(node.get("additionalProperties"), dict):
        yield from nodes(node["additionalProperties"], f"{path}.*")


SPEC_NODES = [item for item in nodes(schema()) if item[0].startswith(("spec", "status"))]


def test_the_generated_files_are_current() -> None:
    stale = [name for name, text in generated().items() if (ROOT / name).read_text(encoding="utf-8") != text]
    assert stale == [], "run `make generate`"


def test_check_fails_on_a_stale_file_and_writes_nothing(tmp_path: Path) -> None:
    assert main(["--root", str(tmp_path), "--check"]) == 1
    assert list(tmp_path.iterdir()) == []
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--root", str(tmp_path), "--check"]) == 0
    (tmp_path / "docs" / "rules.md").write_text("old")
    assert main(["--root", str(tmp_path), "--check"]) == 1


def test_the_crd_is_small_enough_for_client_side_apply() -> None:
    assert len(to_yaml(crd()).encode()) < MAX_BYTES


@pytest.mark.parametrize(
    "path",
    [
        "spec.distillation.tail",
        "spec.distillation.tokenSelection",
        "spec.distillation.divergence",
        "spec.distillation.whiten",
        "spec.task.policyLoss.type",
        "spec.task.advantageEstimator",
        "spec.training.schedule",
        "spec.training.lossAggregation",
        "spec.training.rolloutCorrection.type",
        "spec.training.rolloutCorrection.level",
    ],
)
def test_a_choice_says_what_each_of_its_values_does(path: str) -> None:
    node = dict(SPEC_NODES)[path]
    text = node["description"]
    assert [value for value in node["enum"] if not re.search(rf"\b{re.escape(value)}\b", text)] == []
    assert len(text) > 2 * sum(map(len, node["enum"]))


def test_every_field_is_described() -> None:
    assert [path for path, node in SPEC_NODES if "description" not in node and not path.endswith(("[]", "*"))] == []


def test_the_schema_is_structural() -> None:
    for path, node in nodes(schema()):
        assert not {"$ref", "anyOf", "oneOf", "allOf", "const", "title", "nullable", "propertyNames"} & set(node), path
        assert ("type" in node) != bool(node.get("x-kubernetes-int-or-string")), path
        assert not ("properties" in node and "additionalProperties" in node), path
        assert "default" not in node or node["default"] is not None, path


def test_everything_that_can_grow_has_a_bound() -> None:
    for path, node in SPEC_NODES:
        if node.get("type") == "string":
            assert "maxLength" in node or "enum" in node, path
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path


def test_unknown_fields_are_kept_only_in_objects_that_kubernetes_owns() -> None:
    kept = {path for path, node in SPEC_NODES if node.get("x-kubernetes-preserve-unknown-fields")}
    leaves = {path.rpartition(".")[2].removesuffix("[]") for path in kept}
    assert leaves == {
        "affinity",
        "topologySpread",
        "template",
        "securityContext",
        "valueFrom",
        "source",
        "runtimeEnv",
        "metricsFrom",
    }


def test_every_field_of_the_models_is_in_the_schema() -> None:
    known = {path for path, _ in nodes(schema())}
    assert set(field_paths(OPDJob, "")) <= known


def test_defaults_of_the_schema_are_those_of_the_models() -> None:
    filled = OPDJob.parse(job_document({"spec.training": {"steps": 1}})).to_yaml_dict()["spec"]

    def compare(node: dict[str, Any], value: Any, path: str) -> int:
        count = 0
        for name, child in node.get("properties", {}).items():
            if "default" in child:
                assert value[name] == child["default"], f"{path}.{name}"
                count += 1
            elif isinstance(value.get(name), dict):
                count += compare(child, value[name], f"{path}.{name}")
        return count

    assert compare(schema()["properties"]["spec"], filled, "spec") > 60


def test_the_schema_accepts_what_the_models_write() -> None:
    """OpenAPI's boolean exclusiveMinimum is JSON schema's draft 4."""
    document = OPDJob.parse(job_document()).to_yaml_dict()
    jsonschema.Draft4Validator(schema()).validate(document)


@pytest.mark.parametrize("value", ["none", "math_verify", "my.rewards:score"])
def test_a_union_of_words_and_a_form_is_one_pattern(value: str) -> None:
    node = schema()["properties"]["spec"]["properties"]["task"]["properties"]["reward"]
    jsonschema.validate(value, node)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(f"{value} and more", node)


def test_a_union_without_a_structural_form_is_refused() -> None:
    class Odd(ApiModel):
        value: int | list[int]

    with pytest.raises(ValueError, match=r"Odd\.value"):
        structural(Odd)


def test_every_rule_at_apply_is_a_rule_of_the_table() -> None:
    assert {rule.code for rule in RULES} >= AT_APPLY
    assert len(AT_APPLY) >= 30


def test_every_cel_message_names_its_code() -> None:
    for validations in VALIDATIONS.values():
        for item in validations:
            assert item.to_schema()["message"].startswith(f"{item.code}: ")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("spec.teachers[1].args[0]", True),
        ("spec.teachers[0].template.spec.containers[0].image", True),
        ("spec.teachers[0].nodeSelector", True),
        ("spec.teachers[0].model.source", False),
        ("spec.teachers", False),
        ("spec.runtime.template", True),
        ("spec.lifecycle.backoffLimit", True),
        ("spec.storage.volumes[0].name", True),
        ("spec.storage.claimName", False),
        ("spec.storage", False),
        ("spec.training.steps", False),
        ("metadata.name", False),
        ("spec", False),
    ],
)
def test_what_may_change_in_a_started_job_is_known_by_its_path(path: str, expected: bool) -> None:
    assert may_change(path) is expected


def test_the_chart_copy_keeps_the_crd_and_can_leave_it_out() -> None:
    text = chart_copy(to_yaml(crd()))
    assert text.startswith("{{- if .Values.crds.enabled }}")
    assert text.rstrip().endswith("{{- end }}")
    body = "\n".join(line for line in text.splitlines() if "{{" not in line)
    document = yaml.safe_load(body)
    assert document["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert document["spec"] == crd()["spec"]
    with pytest.raises(ValueError, match="Helm"):
        chart_copy("description: '{{ template }}'")


def test_the_pages_name_every_field_rule_and_word() -> None:
    api, rules, words = api_page(), rules_page(), vocabulary_page()
    assert all(f"`{path.rpartition('.')[2]}`" in api for path in field_paths(OPDJob, "") if path.startswith("spec."))
    assert all(f"`{rule.code}`" in rules for rule in RULES)
    assert "`TeachersReady`" in words
    assert "| 75 | infrastructure |" in words
