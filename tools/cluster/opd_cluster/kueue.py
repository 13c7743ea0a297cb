"""Kueue, for the tests that need a queue: its controller as a Deployment, and its webhooks for namespaces that ask for them.

A part that no cluster needs: built and installed only where it is asked for, and removed again.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import yaml

from opd_cluster import parts
from opd_cluster.addons import ROLL_OUT_SECONDS
from opd_cluster.cluster import kubectl
from opd_cluster.images.catalog import static
from opd_cluster.layout import Layout
from opd_cluster.node import Node
from opd_cluster.shell import find_kubectl, output, wait_for

NAMESPACE = "kueue-system"
IMAGE = "opd-kueue:0.17.0"
#: Namespaces with this label are Kueue's business; its webhooks see no object of any other.
NAMESPACE_LABEL = "opd.dev/kueue"
DEPLOYMENT = "kueue-controller-manager"
CERTIFICATES = "/tmp/k8s-webhook-server/serving-certs"  # noqa: S108 - where the program looks, inside its container
COMPONENTS = ("crd", "rbac", "manager", "internalcert", "webhook")
FRAMEWORKS = ("batch/job", "ray.io/rayjob", "ray.io/raycluster", "pod", "deployment")

Manifest = dict[str, Any]


def install(layout: Layout, node: Node, *external: str) -> None:
    """Run Kueue on a node. `external` are kinds (`OPDJob.v1alpha1.opd.dev`) that Kueue leaves to a controller of their own."""
    node.store.load(static(IMAGE, parts.KUEUE))
    manifests = [_fitted(item) for item in yaml.safe_load_all(_rendered(layout, external)) if item]
    manifests += _may_read(external)
    document = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    kubectl(layout, "apply", "--server-side", "--force-conflicts", "-f", "-", input_text=document, timeout=300)
    wait = ("rollout", "status", f"deployment/{DEPLOYMENT}", "-n", NAMESPACE, f"--timeout={2 * ROLL_OUT_SECONDS}s")
    kubectl(layout, *wait, timeout=2 * ROLL_OUT_SECONDS + 10)
    wait_for("Kueue's webhooks answer", lambda: _answers(layout), seconds=ROLL_OUT_SECONDS)


def remove(layout: Layout) -> None:
    """Its webhooks first: nothing waits for one that is gone."""
    kinds = "mutatingwebhookconfigurations,validatingwebhookconfigurations"
    kubectl(layout, "delete", kinds, "-l", "app.kubernetes.io/name=kueue", "--ignore-not-found")
    kubectl(layout, "delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=false")


def _may_read(external: tuple[str, ...]) -> list[Manifest]:
    """Kueue looks at the owners of what it manages, also at those that are not its own."""
    if not external:
        return []
    resources = {f"{kind.lower()}s": group for kind, _, group in (name.split(".", 2) for name in external)}
    rules = [
        {"apiGroups": [group], "resources": [plural], "verbs": ["get", "list", "watch"]}
        for plural, group in resources.items()
    ]
    api, name = "rbac.authorization.k8s.io", "kueue-reads-external-kinds"
    account = {"kind": "ServiceAccount", "name": DEPLOYMENT, "namespace": NAMESPACE}
    return [
        {"apiVersion": f"{api}/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules},
        {
            "apiVersion": f"{api}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": name},
            "subjects": [account],
        },
    ]


def _configuration(external: tuple[str, ...]) -> Manifest:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": ":8081"},
        "webhook": {"port": 9443},
        "leaderElection": {"leaderElect": False},
        "integrations": {"frameworks": list(FRAMEWORKS), "externalFrameworks": list(external)},
        "featureGates": {"VisibilityOnDemand": False},
    }


def _rendered(layout: Layout, external: tuple[str, ...]) -> str:
    """Kueue's own manifests through kubectl's kustomize, with our configuration."""
    work = layout.state / "kueue"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(parts.files(parts.KUEUE), work / "components")
    (work / "components/manager/controller_manager_config.yaml").write_text(yaml.safe_dump(_configuration(external)))
    container = {
        "name": "manager",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/kueue"],
        "args": ["--config=/configuration/controller_manager_config.yaml", "--zap-log-level=2"],
        "ports": [{"containerPort": 9443, "name": "webhook-server", "protocol": "TCP"}],
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        "volumeMounts": [
            {"name": "manager-config", "mountPath": "/configuration"},
            {"name": "cert", "mountPath": CERTIFICATES, "readOnly": True},
        ],
    }
    volumes = [
        {"name": "manager-config", "configMap": {"name": "manager-config"}},
        {"name": "cert", "secret": {"secretName": "webhook-server-cert"}},
    ]
    patch = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "controller-manager", "namespace": "system"},
        # Another configuration is another pod.
        "spec": {
            "template": {
                "metadata": {"annotations": {f"{NAMESPACE_LABEL}-external": " ".join(external)}},
                "spec": {"containers": [container], "volumes": volumes},
            }
        },
    }
    overlay = {
        "namespace": NAMESPACE,
        "namePrefix": "kueue-",
        "labels": [
            {"pairs": {"app.kubernetes.io/name": "kueue"}, "includeTemplates": True},
            {"pairs": {"control-plane": "controller-manager"}, "includeSelectors": True},
        ],
        "resources": [f"components/{name}" for name in COMPONENTS],
        "patches": [{"patch": json.dumps(patch)}],
    }
    (work / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    return output([find_kubectl(), "kustomize", work], timeout=60)


def _fitted(item: Manifest) -> Manifest:
    """Webhooks look at objects of our namespaces only."""
    if item["kind"].endswith("WebhookConfiguration"):
        for webhook in item["webhooks"]:
            groups = {group for rule in webhook["rules"] for group in rule["apiGroups"]}
            if "kueue.x-k8s.io" not in groups:
                webhook["namespaceSelector"] = {"matchLabels": {NAMESPACE_LABEL: "true"}}
    return item


def _answers(layout: Layout) -> bool:
    """A flavor can be made (without being made)."""
    flavor = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "trial"}}
    words = ("create", "--dry-run=server", "-o", "name", "-f", "-")
    return bool(kubectl(layout, *words, input_text=json.dumps(flavor), check=False))
