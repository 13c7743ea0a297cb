"""The chart, rendered by the real Helm."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

from opd_cluster import parts
from opd_operator.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "opd-operator"
GOLDEN = Path(__file__).parent / "golden"
Manifest = dict[str, Any]


@pytest.fixture(scope="session")
def helm() -> Path:
    """Helm 4, built once from its Go module and cached."""
    return Path(parts.binary(parts.HELM))


class Renderer:
    def __init__(self, binary: Path) -> None:
        self.binary = binary

    def run(self, *arguments: str, values: Manifest | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(self.binary), "template", "opd-operator", str(CHART), "--namespace", "opd-system", *arguments]
        if values is not None:
            command += ["--values", "-"]
        text = yaml.safe_dump(values) if values is not None else None
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)

    def __call__(self, *arguments: str, values: Manifest | None = None) -> list[Manifest]:
        result = self.run(*arguments, values=values)
        assert result.returncode == 0, result.stderr
        return [document for document in yaml.safe_load_all(result.stdout) if document]

    def refuses(self, values: Manifest, *arguments: str) -> str:
        result = self.run(*arguments, values=values)
        assert result.returncode != 0, "the chart should refuse these values"
        return result.stderr


@pytest.fixture(scope="session")
def render(helm: Path) -> Renderer:
    return Renderer(helm)


@pytest.fixture(scope="session")
def values_module() -> ModuleType:
    path = ROOT / "tools" / "chart" / "values.py"
    spec = importlib.util.spec_from_file_location("chart_values", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["chart_values"] = module
    spec.loader.exec_module(module)
    return module


def of(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    found = [
        manifest for manifest in manifests if manifest["kind"] == kind and name in (None, manifest["metadata"]["name"])
    ]
    assert len(found) == 1, [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    return found[0]


def names(manifests: list[Manifest], kind: str) -> set[str]:
    return {manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == kind}


def container(manifests: list[Manifest]) -> Manifest:
    return of(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]


def environment(manifests: list[Manifest]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container(manifests)["env"]}


def test_lint_finds_nothing_wrong(helm: Path) -> None:
    result = subprocess.run([helm, "lint", "--strict", CHART], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_default_render_is_the_golden_one(render: Renderer) -> None:
    text = yaml.safe_dump_all(render("--set", "crds.enabled=false"), sort_keys=True)
    golden = GOLDEN / "default.yaml"
    if os.environ.get("OPD_UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text(), "review the difference, then run again with OPD_UPDATE_GOLDEN=1"


def test_the_schema_is_generated_from_the_models(values_module: ModuleType) -> None:
    assert (CHART / "values.schema.json").read_text() == values_module.schema_text(), "run make generate"


def test_values_yaml_and_the_models_have_the_same_values_and_defaults(values_module: ModuleType) -> None:
    written = yaml.safe_load((CHART / "values.yaml").read_text())
    defaults = values_module.ChartValues().model_dump(by_alias=True, exclude={"global_"})
    assert written == defaults


def test_every_object_of_the_schema_refuses_unknown_values() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    for name, definition in [("", schema), *schema["definitions"].items()]:
        assert definition["additionalProperties"] is False, name


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replica": 2}, "replica"),
        ({"images": {"trainers": "x"}}, "trainers"),
        ({"operator": {"workers": 0}}, "workers"),
        ({"operator": {"logLevel": "LOUD"}}, "logLevel"),
        ({"watchNamespaces": "team"}, "watchNamespaces"),
        ({"watchNamespaces": ["Team_A"]}, "watchNamespaces"),
        ({"defaults": {"imagePullPolicy": "Sometimes"}}, "imagePullPolicy"),
        ({"metrics": {"podMonitor": {"interval": "soon"}}}, "interval"),
        ({"crds": {"keep": "maybe"}}, "keep"),
    ],
)
def test_a_wrong_value_is_refused_by_name(render: Renderer, values: Manifest, words: str) -> None:
    assert words in render.refuses(values)


def test_every_setting_of_the_chart_is_one_that_the_operator_knows(render: Renderer) -> None:
    found = environment(render())
    settings = Settings.from_environment(
        found | {"OPD_OPERATOR_IDENTITY": "pod", "OPD_OPERATOR_LEASE_NAMESPACE": "opd-system"}
    )
    assert settings == Settings(lease_name="opd-operator", lease_namespace="opd-system", identity="pod")


def test_values_reach_the_operator_as_settings(render: Renderer) -> None:
    values: Manifest = {
        "images": {"trainer": "r/t:1", "sglang": "r/s:1", "vllm": "r/v:1", "lmdeploy": "r/l:1"},
        "watchNamespaces": ["a", "b"],
        "defaults": {
            "imagePullPolicy": "Never",
            "rayVersion": "2.99",
            "clusterDomain": "corp",
            "kuberayOperatorName": "k",
        },
        "operator": {
            "workers": 3,
            "capacityBackoffMinSeconds": 5,
            "capacityBackoffMaxSeconds": 20,
            "resyncSeconds": 1e6,
        },
        "leaderElection": {"durationSeconds": 6, "renewSeconds": 4, "retrySeconds": 0.5},
    }
    found = environment(render(values=values))
    found |= {"OPD_OPERATOR_IDENTITY": "pod", "OPD_OPERATOR_LEASE_NAMESPACE": "opd-system"}
    settings = Settings.from_environment(found)
    assert settings.trainer_image == "r/t:1"
    assert (settings.sglang_image, settings.vllm_image, settings.lmdeploy_image) == ("r/s:1", "r/v:1", "r/l:1")
    assert settings.watch_namespaces == ("a", "b")
    assert settings.image_pull_policy == "Never"
    assert (settings.ray_version, settings.cluster_domain, settings.kuberay_operator_name) == ("2.99", "corp", "k")
    assert (settings.workers, settings.resync_seconds) == (3, 1e6)
    assert (settings.capacity_backoff_min_seconds, settings.capacity_backoff_max_seconds) == (5, 20)
    assert (settings.lease_duration_seconds, settings.lease_renew_seconds, settings.lease_retry_seconds) == (6, 4, 0.5)


def test_roles_of_namespaces_hold_the_same_rules_as_the_cluster_role(render: Renderer) -> None:
    everywhere = render()
    some = render(values={"watchNamespaces": ["team-a", "team-b"]})
    rules = of(everywhere, "ClusterRole", "opd-operator")["rules"]
    roles = [m for m in some if m["kind"] == "Role" and m["metadata"]["name"] == "opd-operator"]
    assert {role["metadata"]["namespace"] for role in roles} == {"team-a", "team-b"}
    assert all(role["rules"] == rules for role in roles)
    assert "opd-operator" not in names(some, "ClusterRole")
    assert not names(some, "ClusterRoleBinding")
    bindings = [m for m in some if m["kind"] == "RoleBinding" and m["metadata"]["name"] == "opd-operator"]
    assert {binding["metadata"]["namespace"] for binding in bindings} == {"team-a", "team-b"}
    assert all(binding["subjects"][0]["namespace"] == "opd-system" for binding in bindings)


def test_no_rule_has_a_wildcard_and_secrets_can_only_be_created(render: Renderer) -> None:
    for manifest in render():
        for rule in manifest.get("rules", []):
            assert "*" not in rule["apiGroups"] + rule["resources"] + rule["verbs"]
            if "secrets" in rule["resources"]:
                assert rule["verbs"] == ["create"]


def test_only_its_own_lease_can_be_written(render: Renderer) -> None:
    rules = of(render(), "Role", "opd-operator-leader")["rules"]
    assert [rule.get("resourceNames") for rule in rules] == [None, ["opd-operator"]]
    assert rules[0]["verbs"] == ["create"]
    off = render("--set", "leaderElection.enabled=false")
    assert "opd-operator-leader" not in names(off, "Role")
    assert of(off, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}


def test_editors_may_write_jobs_and_viewers_only_read_them(render: Renderer) -> None:
    manifests = render()
    edit = of(manifests, "ClusterRole", "opd-operator-edit")
    view = of(manifests, "ClusterRole", "opd-operator-view")
    assert "rbac.authorization.k8s.io/aggregate-to-view" not in edit["metadata"]["labels"]
    assert set(view["rules"][0]["verbs"]) == {"get", "list", "watch"}
    assert "opdjobs/status" not in edit["rules"][0]["resources"]
    assert "opd-operator-edit" not in names(render("--set", "rbac.aggregate=false"), "ClusterRole")


def test_the_crd_is_installed_and_kept_unless_told_otherwise(render: Renderer) -> None:
    crd = of(render(), "CustomResourceDefinition")
    assert crd["metadata"]["name"] == "opdjobs.opd.dev"
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    dropped = of(render("--set", "crds.keep=false"), "CustomResourceDefinition")
    assert "helm.sh/resource-policy" not in (dropped["metadata"].get("annotations") or {})
    assert not names(render("--set", "crds.enabled=false"), "CustomResourceDefinition")


def test_the_operator_runs_with_the_least_rights_a_container_can_have(render: Renderer) -> None:
    pod = of(render(), "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = pod["containers"][0]["securityContext"]
    assert security == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_probes_ask_the_endpoints_that_the_operator_serves(render: Renderer) -> None:
    found = container(render())
    port = next(entry for entry in found["ports"] if entry["name"] == "http")
    assert str(port["containerPort"]) == environment(render())["OPD_OPERATOR_HTTP_PORT"]
    assert found["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert found["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert found["startupProbe"]["httpGet"]["path"] == "/readyz"


def test_monitors_are_off_by_default_and_need_their_api(render: Renderer) -> None:
    assert {manifest["kind"] for manifest in render()}.isdisjoint({"ServiceMonitor", "PodMonitor"})
    for monitor in ("serviceMonitor", "podMonitor"):
        refusal = render.refuses({"metrics": {monitor: {"enabled": True}}})
        assert "install the Prometheus operator's CRDs" in refusal
        assert f"metrics.{monitor}.enabled" in refusal


def test_the_pod_monitor_selects_heads_and_teachers_where_jobs_may_be(render: Renderer) -> None:
    values: Manifest = {"metrics": {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}}}
    monitor = of(render("--api-versions", "monitoring.coreos.com/v1", values=values), "PodMonitor")
    (expression,) = monitor["spec"]["selector"]["matchExpressions"]
    assert expression == {"key": "opd.dev/role", "operator": "In", "values": ["head", "teacher"]}
    assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} == {"metrics", "http"}
    assert monitor["spec"]["namespaceSelector"] == {"any": True}
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    some = render("--api-versions", "monitoring.coreos.com/v1", values=values | {"watchNamespaces": ["team"]})
    assert of(some, "PodMonitor")["spec"]["namespaceSelector"] == {"matchNames": ["team"]}


def test_the_service_monitor_finds_the_metrics_service(render: Renderer) -> None:
    values: Manifest = {"metrics": {"serviceMonitor": {"enabled": True}}}
    manifests = render("--api-versions", "monitoring.coreos.com/v1", values=values)
    service, monitor = of(manifests, "Service"), of(manifests, "ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["honorLabels"] is True, "namespace is the job's"
    assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    pod = of(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= pod.items()


def test_several_replicas_without_an_election_are_refused(render: Renderer) -> None:
    refusal = render.refuses({"replicas": 2, "leaderElection": {"enabled": False}})
    assert "leaderElection.enabled=true" in refusal
    assert of(render("--set", "replicas=2"), "Deployment")["spec"]["replicas"] == 2


def test_notes_say_what_to_do_next(helm: Path) -> None:
    def notes(*arguments: str) -> str:
        command = [helm, "install", "opd-operator", CHART, "-n", "opd-system", "--dry-run=client", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout.partition("NOTES:")[2]

    text = notes()
    assert "kubectl get opd -w" in text
    assert "KubeRay is missing" in text
    assert "deletes the CRD and with it EVERY OPDJob" in notes("--set", "crds.keep=false")
    assert "OPDJobs in team" in notes("--set", "watchNamespaces={team}")
