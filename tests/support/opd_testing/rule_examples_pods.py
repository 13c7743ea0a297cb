"""Examples (see rule_examples) of rules 28 to 30: arguments of servers, and what goes into pods."""

from __future__ import annotations

from typing import Any

from opd_testing.rule_examples import ARGS, ARGS_OF_0, Changes, Example

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
HEAD, HEAD_AT = "spec.ray.head.template", "spec.ray.head.template.spec"
ENV = "spec.runtime.env"
BACKEND = "spec.teachers.0.backend"


def _argument(backend: str, written: list[str], remedy: list[str]) -> Example:
    return Example(
        "OwnedArgument", f"{ARGS}[0]", {BACKEND: backend, ARGS_OF_0: written}, {BACKEND: backend, ARGS_OF_0: remedy}
    )


def _field(path: str, wrong: Any, right: Any, inner: str = "") -> Example:
    """A field with a wrong and a right value; `inner` is blamed inside of it."""
    return Example("PodField", path + inner, {path: wrong}, {path: right})


def _node_affinity(**expression: Any) -> Changes:
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}}}


def _container(**fields: Any) -> Changes:
    return {"spec": {"containers": [{"name": "ray-head", **fields}]}}


NODE_TERM = f".nodeAffinity.{REQUIRED}.nodeSelectorTerms[0].matchExpressions[0]"
POOL = {"key": "pool", "operator": "In", "values": ["a"]}
SPREAD = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
NEAR = {"labelSelector": {"matchLabels": {"app": "a"}}, "topologyKey": "kubernetes.io/hostname"}

POD_EXAMPLES = (
    # 28: arguments
    _argument("sglang", ["--port", "1"], ["--max-running-requests", "4"]),
    _argument("sglang", ["--tp", "2"], ["--dp-size", "2"]),
    _argument("sglang", ["--model_path=/x"], ["--mem-fraction-static=0.7"]),
    _argument("sglang", ["--config", "/x"], ["--chunked-prefill-size", "4096"]),
    _argument("vllm", ["-tp=2"], ["--max-logprobs", "64"]),
    _argument("vllm", ["--max-model", "100"], ["--max-num-seqs", "100"]),
    _argument("vllm", ["other/model"], ["--seed", "1"]),
    _argument("lmdeploy", ["--api-keys", "x"], ["--cache-max-entry-count", "0.5"]),
    _argument("transformers", ["--device=cpu"], ["--threads=2"]),
    # 29: what goes into pods
    _field("spec.storage.claimName", "My_Claim", "my-claim"),
    _field("spec.runtime.image", "a b", "a:b"),
    _field("spec.runtime.acceleratorResource", "gpu", "amd.com/gpu"),
    _field("spec.runtime.nodeSelector", {"pool": "a b"}, {"pool": "a"}, ".pool"),
    _field("spec.runtime.nodeSelector", {"-x": "a"}, {"example.com/x": ""}, ".-x"),
    _field("spec.runtime.tolerations", [{"operator": "Exist"}], [{"operator": "Exists"}], "[0].operator"),
    _field("spec.runtime.tolerations", [{"effect": "NoExecute"}], [{"operator": "Exists"}], "[0].operator"),
    _field(
        "spec.runtime.tolerations",
        [{"key": "a", "operator": "Exists", "value": "b"}],
        [{"key": "a", "operator": "Equal", "value": "b"}],
        "[0].value",
    ),
    _field(
        "spec.runtime.tolerations",
        [{"key": "a", "tolerationSeconds": 5, "effect": "NoSchedule"}],
        [{"key": "a", "tolerationSeconds": 5, "effect": "NoExecute"}],
        "[0].effect",
    ),
    _field("spec.runtime.tolerations", [{"key": "a", "effect": "Never"}], [{"key": "a"}], "[0].effect"),
    _field(
        "spec.runtime.affinity",
        _node_affinity(key="pool", operator="in", values=["a"]),
        _node_affinity(**POOL),
        f"{NODE_TERM}.operator",
    ),
    _field(
        "spec.runtime.affinity",
        _node_affinity(key="pool", operator="In"),
        _node_affinity(key="pool", operator="Exists"),
        f"{NODE_TERM}.values",
    ),
    _field(
        "spec.runtime.affinity",
        _node_affinity(key="cores", operator="Gt", values=["many"]),
        _node_affinity(key="cores", operator="Gt", values=["8"]),
        f"{NODE_TERM}.values",
    ),
    _field(
        "spec.runtime.affinity",
        {"nodeAffinity": {REQUIRED: {}}},
        {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [POOL]}]}}},
        f".nodeAffinity.{REQUIRED}.nodeSelectorTerms",
    ),
    _field(
        "spec.runtime.affinity",
        {"nodeAffinity": {PREFERRED: [{"weight": 0, "preference": {}}]}},
        {"nodeAffinity": {PREFERRED: [{"weight": 1, "preference": {}}]}},
        f".nodeAffinity.{PREFERRED}[0].weight",
    ),
    _field(
        "spec.runtime.affinity",
        {"podAntiAffinity": {REQUIRED: [{"labelSelector": {}}]}},
        {"podAntiAffinity": {REQUIRED: [NEAR]}},
        f".podAntiAffinity.{REQUIRED}[0].topologyKey",
    ),
    _field("spec.runtime.affinity", {"podAffinity": "near"}, {"podAffinity": {REQUIRED: [NEAR]}}, ".podAffinity"),
    _field("spec.runtime.topologySpread", [SPREAD | {"maxSkew": 0}], [SPREAD], "[0].maxSkew"),
    _field("spec.runtime.topologySpread", [SPREAD | {"whenUnsatisfiable": "x"}], [SPREAD], "[0].whenUnsatisfiable"),
    _field("spec.runtime.resources", {"requests": {"memory": "64 Gi"}}, {"requests": {"memory": "64Gi"}}, ".requests.memory"),
    _field("spec.runtime.resources", {"requests": {"cpu": "-1"}}, {"requests": {"cpu": "100m"}}, ".requests.cpu"),
    _field("spec.runtime.resources", {"requests": {"gpu": 1}}, {"requests": {"cpu": 1}}, ".requests.gpu"),
    _field(
        "spec.runtime.resources",
        {"requests": {"memory": "2Gi"}, "limits": {"memory": "2G"}},
        {"requests": {"memory": "2G"}, "limits": {"memory": "2Gi"}},
        ".requests.memory",
    ),
    _field(
        "spec.runtime.resources", {"limits": {"a.com/b": "500m"}}, {"limits": {"a.com/b": "2"}}, ".limits.a.com/b"
    ),
    _field(ENV, [{"name": "A", "valueFrom": {}}], [{"name": "A", "value": ""}], "[0].valueFrom"),
    _field(
        ENV,
        [{"name": "A", "value": "x", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "[0].valueFrom",
    ),
    _field(
        ENV,
        [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "hub"}}}],
        [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
        "[0].valueFrom.secretKeyRef.key",
    ),
    _field(
        ENV,
        [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.phase"}}}],
        [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['a']"}}}],
        "[0].valueFrom.fieldRef.fieldPath",
    ),
    _field(HEAD, {"metadata": {"labels": {"a": 1}}}, {"metadata": {"labels": {"a": "1"}}}, ".metadata.labels.a"),
    _field(
        HEAD,
        {"metadata": {"annotations": {"a": "x" * 300_000}}},
        {"metadata": {"annotations": {"a": "x y"}}},
        ".metadata.annotations",
    ),
    _field(HEAD, {"spec": []}, {"spec": {}}, ".spec"),
    _field(HEAD, {"spec": {"containers": {}}}, _container(), ".spec.containers"),
    _field(HEAD, _container(env=[{"name": "A", "value": 1}]), _container(env=[{"name": "A", "value": "1"}]), ".spec.containers[0].env[0].value"),
    _field(
        HEAD,
        _container(resources={"limits": {"memory": True}}),
        _container(resources={"limits": {"memory": 2e9}}),
        ".spec.containers[0].resources.limits.memory",
    ),
    Example(
        "PodField",
        "spec.storage.extraVolumes[0].source",
        {"spec.storage.extraVolumes": [{"name": "x", "mountPath": "/x", "source": {"emptyDir": {}, "hostPath": {}}}]},
        {"spec.storage.extraVolumes": [{"name": "x", "mountPath": "/x", "source": {"emptyDir": {}}}]},
    ),
    # 30: restart policies
    *(
        Example(
            "RestartPolicy",
            f"{path}.template.spec.restartPolicy",
            {f"{place}.template": {"spec": {"restartPolicy": wrong}}},
            {f"{place}.template": {"spec": {"restartPolicy": right}}},
        )
        for path, place, wrong, right in (
            ("spec.ray.head", "spec.ray.head", "Always", "Never"),
            ("spec.ray.head", "spec.ray.head", "OnFailure", "Never"),
            ("spec.ray.workers", "spec.ray.workers", "Always", "Never"),
            ("spec.teachers[0]", "spec.teachers.0", "Never", "Always"),
        )
    ),
)  # fmt: skip
