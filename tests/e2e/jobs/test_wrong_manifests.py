"""Wrong input gets an error that names field and remedy, at the earliest stage, and no GPU pod where it could be known before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest
from opd_jobs import START_DEADLINE, Watcher, tiny_job

from opd_cluster.errors import ClusterError

Submit = Callable[[dict[str, Any]], Watcher]
pytestmark = pytest.mark.timeout(900)


class Stage(StrEnum):
    """Where the mistake is seen."""

    APPLY = "the API server refuses it"
    ACCEPT = "the operator's rules refuse it"
    CHECK = "the input check finds it, on a CPU"
    PROBE = "the teacher probe finds it"
    WAIT = "it waits and says for what"


@dataclass(frozen=True)
class Wrong:
    """A mistake, where it is seen, and what the message must name."""

    name: str
    changes: dict[str, Any]
    stage: Stage
    named: tuple[str, ...]


TEACHER = {"name": "main", "backend": "transformers", "model": {"source": "/data/tiny/teacher", "dtype": "fp32"}}
EXTERNAL = {"name": "main", "backend": "transformers", "tokenizer": "/data/tiny/teacher"}
DEADLINES = {"teacherReadyDeadlineSeconds": 60, "preRunningDeadlineSeconds": 60}

WRONG = [
    Wrong("typo in a field", {"training": {"stepz": 4}}, Stage.APPLY, ("stepz",)),
    Wrong("typo in a section", {"trainnig": {"steps": 4}}, Stage.APPLY, ("trainnig",)),
    Wrong("wrong enum", {"distillation": {"signal": "advantages"}}, Stage.APPLY, ("signal", "advantage")),
    Wrong("wrong type", {"training": {"steps": "many"}}, Stage.APPLY, ("steps", "integer")),
    Wrong("steps and epochs", {"training": {"epochs": 2}}, Stage.APPLY, ("steps", "epochs")),
    Wrong("neither steps nor epochs", {"training": {"steps": None}}, Stage.APPLY, ("steps", "epochs")),
    Wrong("no teacher", {"teachers": []}, Stage.APPLY, ("teachers",)),
    Wrong("model and endpoints", {"teachers": [{**TEACHER, "endpoints": ["http://a.example"]}]}, Stage.APPLY, ("model", "endpoints")),
    Wrong("two teachers of one name", {"teachers": [TEACHER, TEACHER]}, Stage.APPLY, ("teachers",)),
    Wrong("negative timeout", {"lifecycle": {"stallTimeoutSeconds": -1}}, Stage.APPLY, ("stallTimeoutSeconds",)),
    Wrong("unknown teacher in the map", {"routing": {"map": {"even": "nobody"}}}, Stage.APPLY, ("spec", "routing.map", "teachers")),
    Wrong(
        "back-propagated k1",
        {"distillation": {"signal": "loss", "tokenSelection": "student_sampled", "topK": None, "divergence": "k1"}},
        Stage.APPLY,
        ("spec.distillation", "signal: advantage"),
    ),
    Wrong("set without topK", {"distillation": {"topK": None}}, Stage.APPLY, ("spec.distillation", "topK")),
    Wrong("no claim", {"storage": {"claimName": None}}, Stage.APPLY, ("claimName",)),
    Wrong("top-p", {"rollout": {"sampling": {"topP": 0.9}}}, Stage.APPLY, ("spec.rollout.sampling", "topP: 1")),
    Wrong("set divergence as advantage", {"distillation": {"signal": "advantage"}}, Stage.ACCEPT, ("spec.distillation.signal", "loss")),
    Wrong("an engine larger than a worker", {"runtime": {"device": "cuda"}, "rollout": {"engine": "sglang", "tensorParallelSize": 16}, "ray": {"workers": {"gpusPerWorker": 8}}}, Stage.ACCEPT, ("tensorParallelSize", "gpusPerWorker")),
    Wrong("weights over NCCL", {"runtime": {"device": "cuda"}, "training": {"weightSync": "nccl"}}, Stage.ACCEPT, ("spec.training.weightSync", "disk")),
    Wrong("topK larger than the vocabulary", {"distillation": {"topK": 100_000}}, Stage.CHECK, ("spec.distillation.topK", "Write topK: 64")),
    Wrong("missing data file", {"data": {"source": "/data/tiny/nothing.jsonl"}}, Stage.CHECK, ("data.source", "nothing.jsonl")),
    Wrong("missing model", {"student": {"model": {"source": "/data/tiny/nobody"}}}, Stage.CHECK, ("student", "nobody")),
    Wrong("wrong field of the data", {"data": {"promptField": "question"}}, Stage.CHECK, ("promptField", "prompt")),
    Wrong(
        "tokenizer mismatch",
        {"teachers": [{**TEACHER, "model": {"source": "/data/tiny/other", "dtype": "fp32"}}]},
        Stage.CHECK,
        ("TokenizerMismatch", "spec.teachers[0]"),
    ),
    Wrong(
        "claim that does not exist",
        {"storage": {"claimName": "no-such-claim"}, "lifecycle": DEADLINES},
        Stage.WAIT,
        ("no-such-claim",),
    ),
    Wrong(
        "unreachable endpoint",
        {"teachers": [{**EXTERNAL, "endpoints": ["http://teacher.nowhere.svc:30000"]}], "lifecycle": DEADLINES},
        Stage.PROBE,
        ("main", "teacher.nowhere"),
    ),
    Wrong("image that does not exist", {"runtime": {"image": "no/such-image:1"}, "lifecycle": DEADLINES}, Stage.WAIT, ("no/such-image",)),
    Wrong(
        "more GPUs than any node has",
        {"teachers": [{**TEACHER, "template": {"spec": {"containers": [{"name": "teacher", "resources": {"requests": {"nvidia.com/gpu": 99}, "limits": {"nvidia.com/gpu": 99}}}]}}}], "lifecycle": DEADLINES},
        Stage.WAIT,
        ("nvidia.com/gpu",),
    ),
]  # fmt: skip


def parameters(stages: set[Stage]) -> list[Any]:
    """The mistakes of these stages as pytest parameters."""
    # What waits for a deadline takes a minute each; the others are seen in seconds.
    waits = {Stage.PROBE, Stage.WAIT}
    return [
        pytest.param(wrong, id=wrong.name, marks=pytest.mark.long if wrong.stage in waits else pytest.mark.smoke)
        for wrong in WRONG
        if wrong.stage in stages
    ]


def assert_names(message: str, wrong: Wrong) -> None:
    for word in wrong.named:
        assert word in message, f"'{word}' is not named in: {message}"


@pytest.mark.parametrize("wrong", parameters({Stage.APPLY}))
def test_the_api_server_refuses(submit: Submit, wrong: Wrong) -> None:
    with pytest.raises(ClusterError) as refused:
        submit(tiny_job(**wrong.changes))
    assert_names(str(refused.value), wrong)


@pytest.mark.parametrize("wrong", parameters({Stage.ACCEPT}))
def test_the_rules_refuse_before_any_pod(submit: Submit, wrong: Wrong) -> None:
    watcher = submit(tiny_job(**wrong.changes))
    watcher.cluster.wait(
        "Accepted=False", lambda: watcher.condition("Accepted").get("status") == "False", 30, watcher.namespace
    )
    findings = " ".join(f"{f['path']}: {f['message']}" for f in watcher.status()["findings"])
    assert_names(findings, wrong)
    assert not watcher.pods()


@pytest.mark.parametrize("wrong", parameters({Stage.CHECK}))
def test_the_input_check_fails_the_job_without_a_gpu(submit: Submit, wrong: Wrong) -> None:
    watcher = submit(tiny_job(**wrong.changes))

    def failed() -> bool:
        assert not watcher.gpu_pods(), "a GPU pod exists though the input check had not passed"
        return watcher.status().get("phase") == "Failed"

    watcher.cluster.wait("the job to fail", failed, START_DEADLINE, watcher.namespace)
    findings = " ".join(f"{f['path']}: {f['code']} {f['message']}" for f in watcher.status().get("findings", []))
    assert_names(findings + " " + watcher.condition("Failed")["message"], wrong)


@pytest.mark.parametrize("wrong", parameters({Stage.PROBE, Stage.WAIT}))
def test_what_never_comes_is_named_and_nothing_is_left(submit: Submit, wrong: Wrong) -> None:
    watcher = submit(tiny_job(**wrong.changes))
    said: set[str] = set()

    def failed() -> bool:
        assert not watcher.ray_jobs()
        said.update(condition.get("message", "") for condition in watcher.status().get("conditions", []))
        return watcher.status().get("phase") == "Failed"

    watcher.cluster.wait("the job to fail", failed, START_DEADLINE, watcher.namespace)
    assert_names(" ".join(said), wrong)
    watcher.wait_free()
