"""All children of some jobs as YAML. Review a difference, then run again with OPD_UPDATE_GOLDEN=1."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from opd_world import UID, job_document

from opd_api.rules.cluster import OWN_VOLUMES
from opd_api.v1alpha1 import OPDJob
from opd_operator.children import render
from opd_operator.children.engines import bootstrap_text
from opd_operator.children.merge import merge_template
from opd_operator.settings import Settings

GOLDEN = Path(__file__).parent / "golden"
JOBS: dict[str, dict[str, Any]] = {
    "smallest": job_document(),
    "cpu": job_document(
        runtime={"device": "cpu", "acceleratorResource": "nvidia.com/gpu", "imagePullPolicy": "Never"},
        teachers=[{"name": "small", "backend": "transformers", "model": {"source": "/data/teacher", "dtype": "fp32"}}],
        rollout={"engine": "transformers", "maxStaleness": 0},
    ),
    "pools": job_document(
        runtime={
            "image": "registry.example/opd:1",
            "imagePullSecrets": [{"name": "pull"}],
            "env": [
                {"name": "HF_HUB_OFFLINE", "value": "0"},
                {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            ],
            "priorityClassName": "high",
            "serviceAccountName": "reader",
            "nodeSelector": {"pool": "student"},
            "acceleratorResource": "nvidia.com/mig-1g.5gb",
        },
        storage={
            "claimName": "opd",
            "extraVolumes": [{"name": "cache", "mountPath": "/models", "source": {"hostPath": {"path": "/models"}}}],
        },
        teachers=[
            {
                "name": "wide",
                "backend": "vllm",
                "model": {"source": "Qwen/Qwen3-32B", "revision": "main"},
                "replicas": 2,
                "tensorParallelSize": 4,
                "maxContextTokens": 8192,
                "nodeSelector": {"pool": "teacher"},
                "tolerations": [{"key": "pool", "operator": "Equal", "value": "teacher", "effect": "NoSchedule"}],
                "args": ["--gpu-memory-utilization", "0.8"],
                "template": {
                    "spec": {"containers": [{"name": "teacher", "resources": {"requests": {"memory": "200Gi"}}}]}
                },
            },
            {"name": "other", "backend": "lmdeploy", "model": {"source": "Qwen/Qwen3-14B"}, "prefixCaching": False},
            {
                "name": "far",
                "endpoints": ["https://teacher.example"],
                "apiKeySecretRef": {"name": "far", "key": "token"},
                "maxContextTokens": 8192,
            },
        ],
        routing={"map": {"math": "wide", "code": "other"}, "default": "far"},
        rollout={"replicas": 3, "tensorParallelSize": 2, "maxStaleness": 1},
        training={"steps": 10, "gpus": 4},
        ray={"workers": {"gpusPerWorker": 4}, "runtimeEnv": {"env_vars": {"A": "1"}}},
        lifecycle={"cleanup": {"onFailure": "KeepRay"}},
        networkPolicy={
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
        },
    ),
}


def rendered(name: str) -> list[dict[str, Any]]:
    return render(OPDJob.parse(JOBS[name]), Settings())


def child(name: str, kind: str, part: str = "") -> dict[str, Any]:
    return next(item for item in rendered(name) if item["kind"] == kind and part in item["metadata"]["name"])


def pod_specs(name: str) -> dict[str, dict[str, Any]]:
    """Pod specs by role."""
    found = {}
    for item in rendered(name):
        if item["kind"] in ("Job", "Deployment"):
            found[item["spec"]["template"]["metadata"]["labels"]["opd.dev/role"]] = item["spec"]["template"]["spec"]
        if item["kind"] == "RayJob":
            cluster = item["spec"]["rayClusterSpec"]
            found["head"] = cluster["headGroupSpec"]["template"]["spec"]
            found["worker"] = cluster["workerGroupSpecs"][0]["template"]["spec"]
    return found


def env(spec: dict[str, Any]) -> dict[str, Any]:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in spec["containers"][0]["env"]}


def shortened(value: Any) -> Any:
    """The manifests without the text of the engine's bootstrap program, which has a file and a test of its own."""
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shortened(item) for item in value]
    return "(bootstrap_engine.py)" if value == bootstrap_text() else value


@pytest.mark.parametrize("name", sorted(JOBS))
def test_the_children_are_the_golden_ones(name: str) -> None:
    text = yaml.safe_dump_all(shortened(rendered(name)), sort_keys=False, width=140)
    golden = GOLDEN / f"{name}.yaml"
    if os.environ.get("OPD_UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", sorted(JOBS))
def test_every_child_belongs_to_the_job_and_carries_its_labels(name: str) -> None:
    for item in rendered(name):
        (owner,) = item["metadata"]["ownerReferences"]
        assert owner["uid"] == UID
        assert owner["controller"] is True
        assert owner["blockOwnerDeletion"] is True
        assert item["metadata"]["labels"]["opd.dev/job"] == "math"
        assert item["metadata"]["namespace"] == "team"


@pytest.mark.parametrize("name", sorted(JOBS))
def test_every_pod_meets_the_restricted_pod_security_standard(name: str) -> None:
    for spec in pod_specs(name).values():
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == 1000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


@pytest.mark.parametrize("name", sorted(JOBS))
def test_only_the_head_has_a_token(name: str) -> None:
    specs = pod_specs(name)
    assert {role for role, spec in specs.items() if spec["automountServiceAccountToken"]} == {"head"}
    assert specs["head"]["serviceAccountName"] == "math-head"


def test_the_head_may_touch_one_config_map_only() -> None:
    assert child("smallest", "Role")["rules"] == [
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["math-progress"], "verbs": ["get", "patch"]}
    ]


def test_keys_come_from_secrets_and_appear_in_no_argument() -> None:
    for name in JOBS:
        for spec in pod_specs(name).values():
            for item in spec["containers"][0]["env"]:
                if "KEY" in item["name"]:
                    assert "secretKeyRef" in item["valueFrom"]
    words = pod_specs("smallest")["teacher"]["containers"][0]["args"]
    assert not [word for word in words if "key" in word]


def test_only_pods_that_talk_to_teachers_get_their_keys() -> None:
    having = {role for role, spec in pod_specs("pools").items() if any("API_KEY" in name for name in env(spec))}
    assert having == {"teacher", "probe", "head"}
    assert env(pod_specs("pools")["head"])["OPD_TEACHER_API_KEY_FAR"] == {
        "secretKeyRef": {"name": "far", "key": "token"}
    }


def test_only_the_check_may_reach_a_hub() -> None:
    specs = pod_specs("smallest")
    assert "HF_HUB_OFFLINE" not in env(specs["check"])
    assert {env(specs[role])["HF_HUB_OFFLINE"] for role in ("teacher", "probe", "head", "worker")} == {"1"}
    assert {env(spec)["HF_HOME"] for spec in specs.values()} == {"/data/hf"}


def test_without_a_check_every_pod_may_reach_a_hub() -> None:
    document = job_document(preflight={"enabled": False})
    for item in render(OPDJob.parse(document), Settings()):
        assert item["kind"] != "Job"
        assert "HF_HUB_OFFLINE" not in yaml.safe_dump(item)


def test_the_users_environment_wins() -> None:
    assert env(pod_specs("pools")["worker"])["HF_HUB_OFFLINE"] == "0"


def test_accelerators_are_requested_by_teachers_and_workers_only() -> None:
    held = {
        role: spec["containers"][0]["resources"].get("limits", {}).get("nvidia.com/mig-1g.5gb")
        for role, spec in pod_specs("pools").items()
    }
    # 3 engines of 2 units and 4 learners, 4 units a worker: 2 + 2 | 2 + 1 + 1 | 1 + 1
    assert held == {"check": None, "teacher": 1, "probe": None, "head": None, "worker": 4}
    assert child("pools", "RayJob")["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 3


def test_a_cpu_job_fits_a_small_node() -> None:
    for spec in pod_specs("cpu").values():
        requests = spec["containers"][0]["resources"]["requests"]
        assert (requests["cpu"], requests["memory"]) == ("250m", "1Gi")


def test_roles_with_accelerators_tolerate_their_taint() -> None:
    specs = pod_specs("smallest")
    default = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert specs["teacher"]["tolerations"] == specs["worker"]["tolerations"] == [default]
    assert "tolerations" not in specs["check"]


def test_a_roles_placement_replaces_the_runtimes() -> None:
    wide = child("pools", "Deployment", "wide")["spec"]["template"]["spec"]
    assert wide["nodeSelector"] == {"pool": "teacher"}
    assert [item["key"] for item in wide["tolerations"]] == ["pool", "nvidia.com/mig-1g.5gb"]
    assert pod_specs("pools")["worker"]["nodeSelector"] == {"pool": "student"}


def test_the_rules_know_every_volume_of_the_pods() -> None:
    for spec in [*pod_specs("smallest").values(), child("pools", "Deployment", "wide")["spec"]["template"]["spec"]]:
        mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
        own = {name: path for name, path in mounts.items() if name in OWN_VOLUMES}
        assert own == {name: path for name, path in OWN_VOLUMES.items() if name in own}
        assert {"home", "tmp", "dshm"} <= set(own)
        assert {volume["name"] for volume in pod_specs("smallest")["teacher"]["volumes"]} <= {"data", *OWN_VOLUMES}


def test_a_template_is_merged_last() -> None:
    wide = child("pools", "Deployment", "wide")["spec"]["template"]["spec"]
    assert wide["containers"][0]["resources"]["requests"] == {"nvidia.com/mig-1g.5gb": 4, "memory": "200Gi"}


@pytest.mark.parametrize("items", [[{"image": "x"}], [None], ["x"], [{"name": ["x"]}], [{"name": {"x": 1}}]])
def test_a_list_whose_elements_have_no_name_is_left_to_the_api_server_to_refuse(items: list[Any]) -> None:
    base = {"spec": {"containers": [{"name": "teacher"}]}}
    assert merge_template(base, {"spec": {"containers": items}}) == {"spec": {"containers": items}}


def test_the_ray_job_leaves_retries_and_the_head_to_us() -> None:
    job = child("smallest", "RayJob")
    spec = job["spec"]
    assert (spec["submissionMode"], spec["backoffLimit"], spec["shutdownAfterJobFinishes"]) == ("HTTPMode", 0, True)
    assert spec["entrypoint"] == "opd-trainer run --config /etc/opd/job.json"
    assert job["metadata"]["annotations"]["ray.io/disable-provisioned-head-restart"] == "true"
    head = spec["rayClusterSpec"]["headGroupSpec"]
    assert head["template"]["spec"]["restartPolicy"] == "Never"
    assert head["rayStartParams"]["num-gpus"] == "0"
    assert "suspend" not in spec


def test_pods_of_the_student_get_time_to_save() -> None:
    for role in ("head", "worker"):
        spec = pod_specs("smallest")[role]
        assert spec["terminationGracePeriodSeconds"] == 150
        assert spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["opd-trainer", "drain", "--wait"]
    environment = yaml.safe_load(child("pools", "RayJob")["spec"]["runtimeEnvYAML"])
    assert environment == {"env_vars": {"A": "1", "RAY_JOB_STOP_WAIT_TIME_S": "150"}}


def test_student_pods_carry_our_labels_so_that_we_see_them() -> None:
    cluster = child("smallest", "RayJob")["spec"]["rayClusterSpec"]
    for group, role in ((cluster["headGroupSpec"], "head"), (cluster["workerGroupSpecs"][0], "worker")):
        labels = group["template"]["metadata"]["labels"]
        assert (labels["opd.dev/job"], labels["opd.dev/role"], labels["opd.dev/attempt"]) == ("math", role, "1")


@pytest.mark.parametrize("metadata", [None, {"labels": None}, {"labels": {"opd.dev/job": "other", "team": "x"}}])
def test_no_template_takes_our_labels_from_a_pod(metadata: Any) -> None:
    document = job_document(ray={"head": {"template": {"metadata": metadata}}})
    job = next(item for item in render(OPDJob.parse(document), Settings()) if item["kind"] == "RayJob")
    labels = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["metadata"]["labels"]
    assert (labels["opd.dev/job"], labels["opd.dev/role"], labels["opd.dev/attempt"]) == ("math", "head", "1")
    assert ("team" in labels) == bool((metadata or {}).get("labels"))


def test_readiness_of_sglang_generates_and_liveness_does_not() -> None:
    container = pod_specs("smallest")["teacher"]["containers"][0]
    probes = {
        name: (
            container[name]["httpGet"]["path"],
            container[name]["timeoutSeconds"],
            container[name]["periodSeconds"],
            container[name]["failureThreshold"],
        )
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert probes == {
        "startupProbe": ("/health_generate", 30, 10, 180),
        "readinessProbe": ("/health_generate", 25, 30, 3),
        "livenessProbe": ("/health", 10, 30, 10),
    }
    assert env(pod_specs("smallest")["teacher"])["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"


def test_a_deployment_outlasts_the_startup_budget_of_its_pods_and_needs_no_second_set_of_gpus() -> None:
    spec = child("smallest", "Deployment")["spec"]
    assert spec["progressDeadlineSeconds"] == 1860
    assert spec["strategy"] == {"type": "Recreate"}
    service = child("smallest", "Service")["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is False
    assert service["selector"] == spec["selector"]["matchLabels"]


def test_vllm_may_return_as_many_log_probabilities_as_top_k_asks_for() -> None:
    document = job_document(
        teachers=[{"name": "big", "backend": "vllm", "model": {"source": "/data/teacher"}}],
        distillation={"signal": "loss", "tokenSelection": "teacher_topk", "topK": 64, "divergence": "forward_kl"},
    )
    (found,) = [item for item in render(OPDJob.parse(document), Settings()) if item["kind"] == "Deployment"]
    args = found["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[args.index("--max-logprobs") + 1] == "64"


def test_sglang_on_a_cpu_gets_a_bounded_pool() -> None:
    document = job_document(runtime={"device": "cpu"}, rollout={"engine": "transformers"})
    (found,) = [item for item in render(OPDJob.parse(document), Settings()) if item["kind"] == "Deployment"]
    container = found["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][container["args"].index("--max-total-tokens") + 1] == "16384"
    assert {"name": "SGLANG_USE_CPU_ENGINE", "value": "1"} in container["env"]
    assert "limits" not in container["resources"]


def test_the_network_policy_lets_in_own_pods_kuberay_and_scrapers() -> None:
    inside, kuberay, scrape = child("pools", "NetworkPolicy")["spec"]["ingress"]
    assert inside["from"] == [{"podSelector": {"matchLabels": {"opd.dev/job": "math"}}}]
    assert "ports" not in inside
    assert kuberay["from"][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kuberay-operator"}
    assert [port["port"] for port in kuberay["ports"]] == [8265]
    assert scrape["from"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}
    assert [port["port"] for port in scrape["ports"]] == [9400, 30000]
    assert "from" not in child("smallest", "NetworkPolicy")["spec"]["ingress"][2]


def test_configuration_is_immutable_and_named_by_its_content() -> None:
    config = child("smallest", "ConfigMap", "config")
    assert config["immutable"] is True
    assert config["metadata"]["name"].endswith(config["metadata"]["annotations"]["opd.dev/config-hash"])
    other = job_document(lifecycle={"ttlSecondsAfterFinished": 5})
    names = [item["metadata"]["name"] for item in render(OPDJob.parse(other), Settings())]
    assert config["metadata"]["name"] in names, "a TTL renames nothing"
    other = job_document(training={"steps": 11})
    names = [item["metadata"]["name"] for item in render(OPDJob.parse(other), Settings())]
    assert config["metadata"]["name"] not in names
