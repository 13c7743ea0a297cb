"""What runs on top of a bare Kubernetes: GPUs that are advertised, DNS, storage, KubeRay, and our operator by Helm."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from opd_cluster import daemons, parts, pki
from opd_cluster.images import catalog
from opd_cluster.images.store import digest_of, documents
from opd_cluster.layout import DNS_SERVICE_ADDRESS, SOURCE, Layout
from opd_cluster.node import GPU_RESOURCE, Node
from opd_cluster.shell import find_kubectl, output, run, tail, wait_for

CLAIM = "opd-local"
KUBERAY_NAMESPACE = "kuberay-system"
OPERATOR_NAMESPACE = "opd-system"
DNS_PORT = 1053
DNS_READY_PORT = 8181
ROLL_OUT_SECONDS = 120

Manifest = dict[str, Any]


def apply(layout: Layout, *manifests: Manifest) -> None:
    """Create or update as administrator."""
    document = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
    command = [
        find_kubectl(),
        "--kubeconfig",
        layout.kubeconfig,
        "apply",
        "--server-side",
        "--force-conflicts",
        "-f",
        "-",
    ]
    run(command, input_text=document, timeout=120)


def reader(name: str, user: str, *rules: Manifest) -> tuple[Manifest, Manifest]:
    """A cluster role of list and watch `rules` and its binding to a user."""
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name},
        "rules": list(rules),
    }
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": reference,
        "subjects": [subject],
    }
    return role, binding


def _rule(group: str, *resources: str) -> Manifest:
    return {"apiGroups": [group], "resources": list(resources), "verbs": ["get", "list", "watch"]}


def start_dns(layout: Layout) -> None:
    """CoreDNS in the control plane's namespace, known to pods by the usual Service address."""
    pki.issue(layout, "coredns", "system:opd-dns")
    kubeconfig = pki.write_kubeconfig(layout, layout.pki / "coredns.kubeconfig", "coredns")
    corefile = layout.state / "Corefile"
    # No cache and a TTL of a second: tests replace pods behind headless Services all the time.
    corefile.write_text(
        f".:{DNS_PORT} {{\n  bind {layout.api_address}\n  errors\n  ready {layout.api_address}:{DNS_READY_PORT}\n"
        f"  kubernetes cluster.local in-addr.arpa {{\n    kubeconfig {kubeconfig}\n    ttl 1\n  }}\n}}\n"
    )
    metadata = {"name": "kube-dns", "namespace": "kube-system"}
    names = (("dns", "UDP"), ("dns-tcp", "TCP"))
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": DNS_SERVICE_ADDRESS,
            "ports": [
                {"name": name, "protocol": protocol, "port": 53, "targetPort": DNS_PORT} for name, protocol in names
            ],
        },
    }
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {**metadata, "labels": {"kubernetes.io/service-name": "kube-dns"}},
        "addressType": "IPv4",
        "ports": [{"name": name, "protocol": protocol, "port": DNS_PORT} for name, protocol in names],
        "endpoints": [{"addresses": [layout.api_address], "conditions": {"ready": True}}],
    }
    rules = (_rule("", "services", "pods", "namespaces", "endpoints"), _rule("discovery.k8s.io", "endpointslices"))
    apply(layout, *reader("opd-dns", "system:opd-dns", *rules), service, endpoints)
    daemons.start(layout, "coredns", [parts.binary(parts.COREDNS), "-conf", corefile])
    wait_for("DNS is ready", lambda: _dns_ready(layout), seconds=30, hint=lambda: tail(layout.logs / "coredns.log"))


def _dns_ready(layout: Layout) -> bool:
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"http://{layout.api_address}:{DNS_READY_PORT}/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def allow_firewall(layout: Layout) -> None:
    """What kube-router may read to enforce NetworkPolicies."""
    rules = (
        _rule("", "namespaces", "pods", "services", "nodes", "endpoints"),
        _rule("networking.k8s.io", "networkpolicies"),
        _rule("discovery.k8s.io", "endpointslices"),
    )
    apply(layout, *reader("opd-firewall", "system:opd-firewall", *rules))


def advertise_gpus(layout: Layout, node: Node) -> None:
    """Capacity that the scheduler counts and no device stands behind; kubelet keeps what it finds there."""
    path = f"/status/capacity/{GPU_RESOURCE.replace('/', '~1')}"
    patch = json.dumps([{"op": "add", "path": path, "value": str(node.gpus)}])
    command = [find_kubectl(), "--kubeconfig", layout.kubeconfig, "patch", "node", node.name]
    run([*command, "--subresource=status", "--type=json", "--patch", patch])


def create_storage(layout: Layout) -> None:
    """The shared directory, writable for uid and gid 1000 (fsGroup does not act on host paths), and its class."""
    layout.data.mkdir(parents=True, exist_ok=True)
    os.chown(layout.data, 1000, 1000)
    layout.data.chmod(0o2775)
    apply(
        layout,
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": CLAIM},
            "provisioner": "kubernetes.io/no-provisioner",
        },
    )


def create_claim(layout: Layout, namespace: str) -> None:
    """ReadWriteMany claim `opd-local` in a namespace; every namespace's claim is the same directory."""
    volume_name = f"{CLAIM}-{namespace}"
    kubectl = [find_kubectl(), "--kubeconfig", layout.kubeconfig]
    phase = run([*kubectl, "get", "pv", volume_name, "-o", "jsonpath={.status.phase}"], check=False).stdout
    if phase in ("Released", "Failed"):  # the namespace was deleted and has come back
        run([*kubectl, "delete", "pv", volume_name, "--timeout=30s"])
    size = {"storage": "100Gi"}
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": CLAIM}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": volume_name},
        "spec": {
            **common,
            "capacity": size,
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": namespace, "name": CLAIM},
            "hostPath": {"path": str(layout.data), "type": "Directory"},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM, "namespace": namespace},
        "spec": {**common, "volumeName": volume_name, "resources": {"requests": size}},
    }
    apply(layout, volume, claim)
    run([*kubectl, "wait", f"pvc/{CLAIM}", "-n", namespace, "--for=jsonpath={.status.phase}=Bound", "--timeout=30s"])


def install_kuberay(layout: Layout) -> None:
    """KubeRay's operator as a Deployment, with the permissions that its own release lists."""
    role = yaml.safe_load((parts.files(parts.KUBERAY) / "rbac" / "role.yaml").read_text())
    name = "kuberay-operator"
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/component": name}
    role["metadata"] = {"name": name}
    container = {
        "name": name,
        "image": catalog.kuberay().name,
        "imagePullPolicy": "Never",
        "args": ["--enable-leader-election=false"],
        "ports": [{"name": "http", "containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/metrics", "port": "http"}, "periodSeconds": 2},
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
    }
    pod = {"serviceAccountName": name, "containers": [container]}
    account = {"kind": "ServiceAccount", "name": name, "namespace": KUBERAY_NAMESPACE}
    metadata = {"name": name, "namespace": KUBERAY_NAMESPACE, "labels": labels}
    apply(
        layout,
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": KUBERAY_NAMESPACE}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        role,
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
            "subjects": [account],
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "selector": {"matchLabels": {"app.kubernetes.io/name": name}},
                "strategy": {"type": "Recreate"},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
    )


def helm(layout: Layout, *arguments: str | Path) -> str:
    """Helm against this cluster; its standard output."""
    return output([parts.binary(parts.HELM), "--kubeconfig", layout.kubeconfig, *arguments], timeout=600)


def install_operator(layout: Layout, *values: str) -> str:
    """Install or upgrade our chart with the images of this checkout; `values` are more `--set` arguments.

    The image's digest goes into the pod template: a rebuilt image of the same version replaces the running pod.
    """
    chart = SOURCE / "charts" / "opd-operator"
    digest = digest_of(documents(catalog.operator())[0])
    sets = [word for value in (f"podAnnotations.opd\\.dev/image={digest}", *values) for word in ("--set", value)]
    options = ["--namespace", OPERATOR_NAMESPACE, "--create-namespace", "--wait", "--timeout", f"{ROLL_OUT_SECONDS}s"]
    return helm(layout, "upgrade", "--install", "opd-operator", chart, *options, *sets)
