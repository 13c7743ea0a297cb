"""The CRD in a real API server: what it accepts, what it refuses with which words, and what it fixes once a job has started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from kubernetes import client, config
from opd_testing.jobs import changed, job_document
from opd_testing.rule_examples import EXAMPLES, SECOND, Changes, Example

from opd_api import GROUP, PLURAL, VERSION
from opd_api.cel import AT_APPLY, IMMUTABLE_SECTIONS
from opd_api.rules import check_document
from opd_cluster.errors import ClusterError
from opd_cluster.shell import wait_for

if TYPE_CHECKING:
    from conftest import ControlPlane

EXAMPLE_FILES = Path(__file__).resolve().parents[3] / "examples"
STARTED = {"startTime": "2026-01-01T00:00:00Z", "phase": "Training"}


class Jobs:
    """OPDJobs of one namespace, through the API as any client sees it."""

    def __init__(self, kubeconfig: str, namespace: str) -> None:
        self._api = client.CustomObjectsApi(config.new_client_from_config(kubeconfig))
        self._where = (GROUP, VERSION, namespace, PLURAL)

    def create(self, document: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        options: dict[str, Any] = {"dry_run": "All"} if dry_run else {}
        return self._api.create_namespaced_custom_object(*self._where, document, field_validation="Strict", **options)

    def refusal(self, document: dict[str, Any]) -> str:
        """The message of the refusal."""
        with pytest.raises(client.ApiException) as caught:
            self.create(document, dry_run=True)
        assert caught.value.status in (400, 422), caught.value
        return str(json.loads(caught.value.body)["message"])

    def patch(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._api.patch_namespaced_custom_object(*self._where, name, body)

    def change(self, name: str, changes: Changes) -> dict[str, Any]:
        """Replace the whole object, with changes by dotted path."""
        return self._api.replace_namespaced_custom_object(*self._where, name, changed(self.get(name), changes))

    def patch_status(self, name: str, status: dict[str, Any]) -> dict[str, Any]:
        return self._api.patch_namespaced_custom_object_status(*self._where, name, {"status": status})

    def get(self, name: str) -> dict[str, Any]:
        return self._api.get_namespaced_custom_object(*self._where, name)


@pytest.fixture
def jobs(control_plane: ControlPlane, namespace: str) -> Jobs:
    return Jobs(str(control_plane.kubeconfig), namespace)


def started(jobs: Jobs, changes: Changes | None = None) -> str:
    """A job whose first child was created."""
    name = jobs.create(job_document(changes))["metadata"]["name"]
    jobs.patch_status(name, STARTED)
    return str(name)


def structural_errors(changes: Changes) -> set[str]:
    return {item.code for item in check_document(job_document(changes))[1] if item.severity == "Error"} & AT_APPLY


AT_APPLY_EXAMPLES = [example for example in EXAMPLES if example.code in AT_APPLY]


def test_the_smallest_job_is_accepted_and_gets_its_defaults(jobs: Jobs) -> None:
    made = jobs.create(job_document())
    assert made["spec"]["training"]["promptsPerStep"] == 64
    assert made["spec"]["teachers"][0]["backend"] == "sglang"
    assert check_document({key: made[key] for key in ("apiVersion", "kind", "metadata", "spec")})[0] is not None


def test_every_rule_at_apply_has_an_example() -> None:
    assert {example.code for example in AT_APPLY_EXAMPLES} == AT_APPLY


@pytest.mark.parametrize("example", AT_APPLY_EXAMPLES, ids=lambda example: f"{example.code}-{example.path}")
def test_the_api_server_refuses_what_the_rule_refuses(jobs: Jobs, example: Example) -> None:
    message = jobs.refusal(job_document(example.refused))
    assert example.code in message or (example.code == "DuplicateTeacher" and "Duplicate value" in message)


def test_the_api_server_accepts_what_the_rules_accept(jobs: Jobs) -> None:
    accepted = [example.accepted for example in EXAMPLES if not structural_errors(example.accepted)]
    # Also what only the operator refuses: a rule that stands in no schema must not have found its way there.
    accepted += [example.refused for example in EXAMPLES if not structural_errors(example.refused)]
    assert len(accepted) > 60
    for changes in accepted:
        jobs.create(job_document(changes), dry_run=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spec.distillation.topk": 8}, 'unknown field "spec.distillation.topk"'),
        ({"spec.teachers.0.modle": {}}, 'unknown field "spec.teachers[0].modle"'),
        ({"spec.distillation.signal": "los"}, 'Unsupported value: "los"'),
        ({"spec.training.steps": "200"}, "must be of type integer"),
        ({"spec.training.steps": 0}, "greater than or equal to 1"),
        ({"spec.teachers.0.name": "Big_One"}, "spec.teachers[0].name"),
        ({"spec.task.reward": "mathverify"}, "spec.task.reward"),
        ({"spec.student.model": {}}, "spec.student.model.source: Required value"),
    ],
)
def test_typos_and_wrong_values_are_refused_by_path(jobs: Jobs, changes: Changes, words: str) -> None:
    assert words in jobs.refusal(job_document(changes))


def test_every_example_is_accepted(jobs: Jobs) -> None:
    examples = sorted(EXAMPLE_FILES.glob("*.yaml"))
    assert len(examples) >= 7
    for example in examples:
        jobs.create(yaml.safe_load(example.read_text(encoding="utf-8")), dry_run=True)


def test_kubectl_apply_says_the_remedy(control_plane: ControlPlane, namespace: str) -> None:
    document = yaml.safe_dump(job_document({"spec.training.epochs": 1}))
    with pytest.raises(ClusterError, match="StepsXorEpochs: write exactly one of steps and epochs"):
        control_plane.kubectl("apply", "-n", namespace, "-f", "-", input_text=document)


def test_kubectl_applies_on_the_client_side_and_shows_the_columns(
    control_plane: ControlPlane, namespace: str, jobs: Jobs
) -> None:
    document = yaml.safe_dump(job_document())
    for _ in range(2):
        control_plane.kubectl("apply", "-n", namespace, "-f", "-", input_text=document)
    assert jobs.get("math")["metadata"]["generation"] == 1, "the second apply changes nothing"
    jobs.patch_status(
        "math",
        {
            "phase": "Training",
            "reason": "TrainingRunning",
            "attempt": 2,
            "teachersReady": "2/2",
            "stepProgress": "120/200",
            "training": {"reverseKl": "0.1234", "lastCheckpoint": {"step": 120, "path": "/data/step-120.a2"}},
            "conditions": [
                {
                    "type": "Succeeded",
                    "status": "True",
                    "reason": "Succeeded",
                    "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }
            ],
        },
    )
    heading, row = control_plane.kubectl("get", "opd", "-n", namespace).splitlines()
    assert heading.split() == ["NAME", "PHASE", "TEACHERS", "STEP", "KL", "AGE"]
    assert row.split()[:5] == ["math", "Training", "2/2", "120/200", "0.1234"]
    wide = control_plane.kubectl("get", "opd", "-n", namespace, "-o", "wide")
    assert wide.split("\n")[0].split()[-3:] == ["ATTEMPT", "REASON", "CHECKPOINT"]
    assert "/data/step-120.a2" in wide
    wait = control_plane.kubectl("wait", "-n", namespace, "--for=condition=Succeeded", "opdjob/math", "--timeout=5s")
    assert "condition met" in wait


def test_kubectl_explains_every_level(control_plane: ControlPlane) -> None:
    def tail() -> str:
        try:
            return control_plane.kubectl("explain", "opdjob.spec.distillation.tail")
        except ClusterError:  # the schema of a new kind is published a moment after the kind is served
            return ""

    wait_for("the API server to publish the schema", tail, seconds=60)
    # kubectl wraps the text; every value is explained.
    assert "one more bucket holds it" in " ".join(tail().split())
    assert "teacherIdleTimeoutSeconds" in control_plane.kubectl("explain", "opd.spec", "--recursive")


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("student", {"model": {"source": "Qwen/Qwen3-4B"}}),
        ("routing", {"default": "teacher"}),
        ("distillation", {"coefficient": 2}),
        ("task", {"reward": "exact_match"}),
        ("data", {"source": "/data/other.jsonl"}),
        ("rollout", {"maxResponseTokens": 64}),
        ("training", {"steps": 300}),
    ],
)
def test_what_is_trained_is_fixed_once_the_job_has_started(jobs: Jobs, section: str, change: dict[str, Any]) -> None:
    name = jobs.create(job_document())["metadata"]["name"]
    jobs.patch(name, {"spec": {"suspend": False, section: change}})
    assert jobs.get(name)["metadata"]["generation"] == 2, "before the start everything may change"
    jobs.patch_status(name, STARTED)
    with pytest.raises(client.ApiException) as caught:
        jobs.patch(name, {"spec": {section: None if section in ("routing", "task") else {**_other(section)}}})
    assert f"Immutable: spec.{section} cannot change" in caught.value.body


def _other(section: str) -> dict[str, Any]:
    return {
        "student": {"tokenizer": "Qwen/Qwen3-0.6B"},
        "distillation": {"coefficient": 3},
        "data": {"seed": 7},
        "rollout": {"replicas": 2},
        "training": {"gpus": 2},
    }[section]


def test_all_fixed_sections_are_tried() -> None:
    assert set(IMMUTABLE_SECTIONS) == {"student", "routing", "distillation", "task", "data", "rollout", "training"}


def test_a_section_cannot_appear_or_vanish_after_the_start(jobs: Jobs) -> None:
    name = started(jobs)
    with pytest.raises(client.ApiException, match=r"Immutable: spec\.task"):
        jobs.patch(name, {"spec": {"task": {"reward": "exact_match"}}})


@pytest.mark.parametrize(("field", "value"), [("claimName", "other"), ("mountPath", "/other"), ("runPath", "other")])
def test_the_place_of_the_checkpoints_is_fixed_once_the_job_has_started(jobs: Jobs, field: str, value: str) -> None:
    name = started(jobs)
    with pytest.raises(client.ApiException, match=r"of spec\.storage cannot change"):
        jobs.change(name, {f"spec.storage.{field}": value})


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.teachers.0.model.source": "other"},
        {"spec.teachers.0.replicas": 2},
        {"spec.teachers.0.maxContextTokens": 9000},
        {"spec.teachers.0.name": "renamed"},
        {"spec.teachers.0": {"name": "teacher", "endpoints": ["http://other.example"]}},
        {"spec.teachers": [{"name": "teacher", "model": {"source": "Qwen/Qwen3-32B"}}, SECOND]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_teachers_are_fixed_once_the_job_has_started(jobs: Jobs, changes: Changes) -> None:
    name = started(jobs)
    with pytest.raises(client.ApiException) as caught:
        jobs.change(name, changes)
    assert caught.value.status == 422
    assert "Immutable: spec.teachers cannot change" in caught.value.body


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.teachers.0.args": ["--x"]},
        {"spec.teachers.0.image": "server:2"},
        {"spec.teachers.0.nodeSelector": {"pool": "b"}},
        {"spec.teachers.0.template": {"metadata": {"labels": {"a": "b"}}}},
        {"spec.ray.workers.gpusPerWorker": 4, "spec.runtime.priorityClassName": "high"},
        {"spec.storage.extraVolumes": [{"name": "x", "mountPath": "/x", "source": {"emptyDir": {}}}]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_where_and_how_pods_run_may_change_after_the_start(jobs: Jobs, changes: Changes) -> None:
    assert jobs.change(started(jobs), changes)["metadata"]["generation"] == 2


def test_status_and_lifecycle_of_a_started_smallest_job_still_change(jobs: Jobs) -> None:
    name = started(jobs)
    jobs.patch_status(name, {"phase": "Succeeded", "completionTime": "2026-01-01T01:00:00Z"})
    jobs.patch(name, {"spec": {"lifecycle": {"ttlSecondsAfterFinished": 60}}})
    jobs.patch(name, {"spec": {"suspend": True, "diagnostics": {"logResponses": True}}})
    jobs.patch(name, {"metadata": {"annotations": {"a": "b"}}})
    job = jobs.get(name)
    assert (job["status"]["phase"], job["spec"]["lifecycle"]["ttlSecondsAfterFinished"]) == ("Succeeded", 60)
    assert job["spec"]["suspend"] is True


def test_a_status_outside_its_bounds_is_refused(jobs: Jobs) -> None:
    name = started(jobs)
    finding = {"code": "C", "severity": "Error", "path": "spec", "message": "m"}
    with pytest.raises(client.ApiException, match="must have at most 16 items"):
        jobs.patch_status(name, {"findings": [finding] * 17})
