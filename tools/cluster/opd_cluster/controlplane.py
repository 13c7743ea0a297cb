"""etcd, API server, controller manager and scheduler as plain processes in the control plane's namespace."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from pathlib import Path

from opd_cluster import daemons, parts, pki
from opd_cluster.layout import API_PORT, POD_CIDR, SERVICE_CIDR, Layout
from opd_cluster.shell import find_kubectl, run, tail

READY_SECONDS = 60


def start(layout: Layout, *, scheduler: bool, controller_qps: int | None = None) -> None:
    """Start all and return when the API server is ready and the controllers have made the first service account.

    `controller_qps`: calls a second that each controller may make; Kubernetes' own limit is 20.
    """
    pki.create_authority(layout)
    pki.issue(layout, "admin", "opd-admin", group="system:masters")
    pki.write_kubeconfig(layout, layout.kubeconfig, "admin")
    program = parts.binary(parts.KUBERNETES)
    daemons.start(layout, "etcd", [program, *_etcd(layout)])
    daemons.start(layout, "kube-apiserver", [program, *_api_server(layout)])
    daemons.await_condition(
        layout,
        "the API server answers",
        lambda: api_ready(layout),
        seconds=READY_SECONDS,
        hint=lambda: _why(layout, "kube-apiserver"),
    )
    limits = [f"--kube-api-qps={controller_qps}", f"--kube-api-burst={2 * controller_qps}"] if controller_qps else []
    daemons.start(layout, "kube-controller-manager", [program, *_controllers(layout), *limits])
    if scheduler:
        config = _component_kubeconfig(layout, "kube-scheduler")
        arguments = [
            "--kubeconfig",
            config,
            "--authentication-kubeconfig",
            config,
            "--authorization-kubeconfig",
            config,
        ]
        daemons.start(layout, "kube-scheduler", [program, "kube-scheduler", *arguments, "--leader-elect=false"])
    daemons.await_condition(
        layout,
        "the controller manager works",
        lambda: _service_account_exists(layout),
        seconds=READY_SECONDS,
        hint=lambda: _why(layout, "kube-controller-manager"),
    )


def _etcd(layout: Layout) -> list[object]:
    # Nothing here outlives a power cut on purpose: without fsync a write takes microseconds.
    arguments = [
        "etcd",
        "--name",
        layout.name,
        "--data-dir",
        layout.state / "etcd",
        "--unsafe-no-fsync",
        "--log-level",
        "warn",
    ]
    client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    arguments += ["--listen-client-urls", client, "--advertise-client-urls", client]
    arguments += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    return [*arguments, "--initial-cluster", f"{layout.name}={peer}"]


def _api_server(layout: Layout) -> list[str]:
    pki_dir = layout.pki
    flags = {
        "etcd-servers": "http://127.0.0.1:2379",
        "authorization-mode": "Node,RBAC",
        "enable-admission-plugins": "NodeRestriction,OwnerReferencesPermissionEnforcement",
        "allow-privileged": "true",
        "bind-address": "0.0.0.0",  # noqa: S104 - all interfaces of our own namespace
        "advertise-address": layout.api_address,
        "secure-port": API_PORT,
        "service-cluster-ip-range": SERVICE_CIDR,
        "client-ca-file": pki_dir / "ca.crt",
        "tls-cert-file": pki_dir / "apiserver.crt",
        "tls-private-key-file": pki_dir / "apiserver.key",
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-key-file": pki_dir / "sa.pub",
        "service-account-signing-key-file": pki_dir / "sa.key",
        "kubelet-client-certificate": pki_dir / "admin.crt",
        "kubelet-client-key": pki_dir / "admin.key",
        "kubelet-certificate-authority": pki_dir / "ca.crt",
        # Nodes have no names that anything could look up.
        "kubelet-preferred-address-types": "InternalIP",
        # No kube-proxy runs beside the API server: it dials pods behind a Service directly.
        "enable-aggregator-routing": "true",
        "profiling": "false",
    }
    return ["kube-apiserver", *(f"--{name}={value}" for name, value in flags.items())]


def _controllers(layout: Layout) -> list[str]:
    config = _component_kubeconfig(layout, "kube-controller-manager")
    flags = {
        "kubeconfig": config,
        "authentication-kubeconfig": config,
        "authorization-kubeconfig": config,
        "use-service-account-credentials": "true",
        "service-account-private-key-file": layout.pki / "sa.key",
        "root-ca-file": layout.pki / "ca.crt",
        "cluster-signing-cert-file": layout.pki / "ca.crt",
        "cluster-signing-key-file": layout.pki / "ca.key",
        "leader-elect": "false",
        "profiling": "false",
        # Nodes come with their own pod ranges, which the routes between them are made for.
        "allocate-node-cidrs": "false",
        "cluster-cidr": POD_CIDR,
        "service-cluster-ip-range": SERVICE_CIDR,
    }
    return ["kube-controller-manager", *(f"--{name}={value}" for name, value in flags.items())]


def _component_kubeconfig(layout: Layout, name: str) -> Path:
    pki.issue(layout, name, f"system:{name}")
    return pki.write_kubeconfig(layout, layout.pki / f"{name}.kubeconfig", name)


def api_ready(layout: Layout) -> bool:
    """One authenticated request to /readyz."""
    try:
        context = ssl.create_default_context(cafile=str(layout.pki / "ca.crt"))
        context.load_cert_chain(layout.pki / "admin.crt", layout.pki / "admin.key")
        direct = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with direct.open(f"{layout.server}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _service_account_exists(layout: Layout) -> bool:
    command = [find_kubectl(), "--kubeconfig", layout.kubeconfig, "get", "serviceaccount", "default", "-n", "default"]
    return run(command, check=False, timeout=30).returncode == 0


def _why(layout: Layout, name: str) -> str:
    return tail(layout.logs / f"{name}.log")
