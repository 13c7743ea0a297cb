"""One node: a network namespace with its own containerd, kubelet, kube-proxy and NetworkPolicy firewall."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from opd_cluster import cgroups, daemons, network, parts, pki
from opd_cluster.images.catalog import PAUSE
from opd_cluster.images.store import SHORT_NAMES, Store
from opd_cluster.layout import DNS_SERVICE_ADDRESS, POD_CIDR, RUN_DIR, SERVICE_CIDR, Layout
from opd_cluster.shell import run, tail

SOCKET_SECONDS = 30
KUBELET_DIR = Path("/var/lib/kubelet")
FIREWALL_SECONDS = 60
GPU_RESOURCE = "nvidia.com/gpu"
POOL_LABEL = "opd.dev/gpu-pool"
GPU_TAINT = {"key": GPU_RESOURCE, "value": "present", "effect": "NoSchedule"}


@dataclass(frozen=True)
class Node:
    """Name, place in the address plan and pool of one node. `gpus` units of nvidia.com/gpu are advertised; a node of a named
    GPU pool has the pool's label and taint."""

    layout: Layout
    position: int
    name: str
    gpus: int = 0
    gpu_pool: str = ""

    @property
    def netns(self) -> str:
        return self.layout.node_netns(self.position)

    @property
    def home(self) -> Path:
        return self.layout.state / "nodes" / self.name

    @property
    def run_dir(self) -> Path:
        """Sockets and container state: short, because the kernel allows a socket path 107 characters."""
        return RUN_DIR / self.layout.name / self.name

    @property
    def socket(self) -> Path:
        return self.run_dir / "containerd.sock"

    @property
    def store(self) -> Store:
        return Store(self.socket)

    @property
    def cgroup(self) -> str:
        return f"{self.layout.cgroup}/{self.name}"

    @property
    def pool(self) -> str:
        return "gpu" if self.gpus else "cpu"

    @property
    def labels(self) -> dict[str, str]:
        return {"opd.dev/pool": self.pool, **({POOL_LABEL: self.gpu_pool} if self.gpu_pool else {})}

    @property
    def taints(self) -> list[dict[str, str]]:
        own = {"key": POOL_LABEL, "value": self.gpu_pool, "effect": "NoSchedule"}
        return [*([GPU_TAINT] if self.gpus else []), *([own] if self.gpu_pool else [])]


def start_containerd(node: Node) -> None:
    """The node's network and container runtime; returns when containerd answers. Images of earlier runs are still there."""
    cgroups.create(node.cgroup)
    network.create_node(node.layout, node.position)
    shutil.rmtree(node.run_dir, ignore_errors=True)
    for directory in (node.home, node.run_dir):
        directory.mkdir(parents=True, exist_ok=True)
    _write_network_plugin(node)
    config = node.home / "containerd.toml"
    config.write_text(_containerd_config(node))
    # Each kubelet listens for device plugins at a fixed place below KUBELET_DIR, whatever its root directory is, and empties
    # that place first. Sharing it, two kubelets of ours that start at the same moment end one another; and on a machine that
    # is a node itself, its own kubelet would lose its GPUs. So a node has a mount namespace too: its containerd's.
    KUBELET_DIR.mkdir(parents=True, exist_ok=True)
    line = f"mount -t tmpfs kubelet {KUBELET_DIR} && exec containerd --config {shlex.quote(str(config))}"
    own_mounts = ["unshare", "--mount", "--propagation", "slave"]
    daemons.start(node.layout, _runtime(node), [*own_mounts, "sh", "-c", line], netns=node.netns)
    daemons.await_condition(
        node.layout,
        f"containerd of {node.name} answers",
        lambda: node.socket.exists() and run([*node.store.ctr, "version"], check=False).returncode == 0,
        seconds=SOCKET_SECONDS,
        hint=lambda: tail(node.layout.logs / f"{_runtime(node)}.log"),
    )


def _runtime(node: Node) -> str:
    return f"containerd-{node.name}"


def start_kubelet(node: Node) -> None:
    """kubelet and kube-proxy. The pause image must be loaded before."""
    shutil.rmtree(node.home / "kubelet", ignore_errors=True)
    pki.issue(
        node.layout,
        node.name,
        f"system:node:{node.name}",
        group="system:nodes",
        alternative=f"IP:{node.layout.node_address(node.position)}",
    )
    pki.write_kubeconfig(node.layout, _kubeconfig(node), node.name)
    run_kubelet(node)
    _start_proxy(node, parts.binary(parts.KUBERNETES))


def _kubeconfig(node: Node) -> Path:
    return node.layout.pki / f"{node.name}.kubeconfig"


def run_kubelet(node: Node) -> None:
    """The kubelet alone: also one that takes over from a dead one, with the pods that it left."""
    program, layout = parts.binary(parts.KUBERNETES), node.layout
    config = node.home / "kubelet.json"
    config.write_text(json.dumps(_kubelet_config(node), indent=1))
    arguments = {
        "config": config,
        "kubeconfig": _kubeconfig(node),
        "root-dir": node.home / "kubelet",
        "hostname-override": node.name,
        "node-ip": layout.node_address(node.position),
        "node-labels": ",".join(f"{name}={value}" for name, value in node.labels.items()),
    }
    mounts = f"--mount=/proc/{daemons.pid(layout, _runtime(node))}/ns/mnt"
    command = ["nsenter", mounts, program, "kubelet", *_flags(arguments)]
    daemons.start(layout, f"kubelet-{node.name}", command, netns=node.netns)


def kill_kubelet(node: Node) -> None:
    """As a node ends that hangs: nobody is told, and its containers run on."""
    daemons.kill(node.layout, f"kubelet-{node.name}")


def _flags(arguments: dict[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in arguments.items()]


def _start_proxy(node: Node, program: Path) -> None:
    layout, name = node.layout, f"proxy-{node.name}"
    pki.issue(layout, name, "system:kube-proxy")
    arguments = {
        "kubeconfig": pki.write_kubeconfig(layout, layout.pki / f"{name}.kubeconfig", name),
        "hostname-override": node.name,
        "proxy-mode": "nftables",
        "cluster-cidr": POD_CIDR,
        # The table size is the machine's, not the namespace's: leave it alone.
        "conntrack-max-per-core": "0",
    }
    daemons.start(layout, name, [program, "kube-proxy", *_flags(arguments)], netns=node.netns)


def start_firewall(node: Node) -> None:
    """Enforce NetworkPolicies; the node must be registered. Returns when the first rules stand."""
    layout, name = node.layout, f"firewall-{node.name}"
    pki.issue(layout, name, "system:opd-firewall")
    arguments = {
        "kubeconfig": pki.write_kubeconfig(layout, layout.pki / f"{name}.kubeconfig", name),
        "run-firewall": "true",
        "run-router": "false",
        "run-service-proxy": "false",
        "run-loadbalancer": "false",
        "service-cluster-ip-range": SERVICE_CIDR,
        "hostname-override": node.name,
    }
    daemons.start(
        layout,
        name,
        [parts.binary(parts.KUBE_ROUTER), *_flags(arguments)],
        netns=node.netns,
        env={"NODE_NAME": node.name},
        # Traffic between two pods of one bridge passes the firewall only with this, per network namespace.
        before="echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables",
    )
    rules = network.inside(node.netns, "iptables", "-n", "-L", "KUBE-ROUTER-FORWARD")
    daemons.await_condition(
        layout,
        f"NetworkPolicies are enforced on {node.name}",
        lambda: run(rules, check=False).returncode == 0,
        seconds=FIREWALL_SECONDS,
        hint=lambda: tail(layout.logs / f"{name}.log"),
    )


def _write_network_plugin(node: Node) -> None:
    directory = node.home / "cni"
    directory.mkdir(exist_ok=True)
    bridge = {
        "type": "bridge",
        "bridge": "pods",
        "isGateway": True,
        "hairpinMode": True,
        "ipMasq": False,
        "ipam": {
            "type": "host-local",
            "dataDir": str(node.run_dir / "addresses"),
            "ranges": [[{"subnet": network.pod_cidr(node.position)}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    document = {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}
    (directory / "pods.conflist").write_text(json.dumps(document, indent=1))
    # An image that nobody loaded is refused at once; without this, containerd would wait for a name server that is not there.
    nowhere = node.home / "registries" / "_default"
    nowhere.mkdir(parents=True, exist_ok=True)
    (nowhere / "hosts.toml").write_text(
        'server = "http://127.0.0.1:1"\n[host."http://127.0.0.1:1"]\ncapabilities = ["pull", "resolve"]\n'
    )


def _containerd_config(node: Node) -> str:
    return f"""\
version = 2
root = "{node.home}/containerd"
state = "{node.run_dir}/state"
oom_score = 0
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
address = "{node.socket}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{SHORT_NAMES}{PAUSE}"
disable_apparmor = true
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
default_runtime_name = "runc"
discard_unpacked_layers = true
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{node.home}/cni"
[plugins."io.containerd.grpc.v1.cri".registry]
config_path = "{node.home}/registries"
"""


def _kubelet_config(node: Node) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{node.socket}",
        "podLogsDir": str(node.home / "pod-logs"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "localStorageCapacityIsolation": False,
        # The disk is the user's: nothing of it is reclaimed, and a nearly full one evicts nobody.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "maxPods": 110,
        "clusterDomain": "cluster.local",
        "clusterDNS": [DNS_SERVICE_ADDRESS],
        "resolvConf": "/dev/null",
        "registerWithTaints": node.taints,
        "podCIDR": network.pod_cidr(node.position),
        "tlsCertFile": str(node.layout.pki / f"{node.name}.crt"),
        "tlsPrivateKeyFile": str(node.layout.pki / f"{node.name}.key"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(node.layout.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "nodeStatusUpdateFrequency": "5s",
        "serializeImagePulls": False,
        "logging": {"verbosity": 1},
    }
