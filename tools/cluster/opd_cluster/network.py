"""Network namespaces: one for the control plane with a bridge in it, one per node, one veth pair to the host.

Nothing is ever routed beyond the machine: forwarding on the host's end is off, and a Service address that kube-proxy has
not translated yet dies on the node. The host's own firewall rules and routes are not touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from opd_cluster.layout import SERVICE_CIDR, Layout
from opd_cluster.shell import output, run

NETNS_DIR = Path("/var/run/netns")


def pod_cidr(position: int) -> str:
    return f"10.244.{position}.0/24"


def inside(netns: str, *command: object) -> list[object]:
    """A command line that runs in the namespace.

    Never `ip netns exec`: it mounts a fresh /sys, which hides the cgroups from kubelet.
    """
    return ["nsenter", f"--net={NETNS_DIR / netns}", *command]


def _script(netns: str, text: str) -> None:
    run(inside(netns, "sh", "-e", "-c", text))


def create_fabric(layout: Layout) -> None:
    """The control plane's namespace, reachable from the host at `layout.api_address`."""
    if shutil.which("modprobe"):  # built into many kernels, where this fails and nothing is missing
        run(["modprobe", "-aq", "overlay", "br_netfilter", "nf_tables", "ip_set"], check=False)
    run(["ip", "netns", "add", layout.netns])
    host, peer = layout.host_interface, "uplink"
    run(["ip", "link", "add", host, "type", "veth", "peer", "name", peer, "netns", layout.netns])
    run(["ip", "addr", "add", f"{layout.host_address}/24", "dev", host])
    run(["ip", "link", "set", host, "up"])
    Path(f"/proc/sys/net/ipv4/conf/{host}/forwarding").write_text("0")
    with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
        Path(f"/proc/sys/net/ipv6/conf/{host}/disable_ipv6").write_text("1")
    _script(
        layout.netns,
        f"""
        ip link set lo up
        ip link add fabric type bridge
        ip link set {peer} master fabric up
        ip addr add {layout.api_address}/24 dev fabric
        ip link set fabric up
        ip route add default via {layout.host_address}
        """,
    )


def create_node(layout: Layout, position: int) -> None:
    """A node's namespace: eth0 on the cluster's bridge, and routes to the other nodes' pods are added by `join`."""
    netns = layout.node_netns(position)
    run(["ip", "netns", "add", netns])
    _script(
        layout.netns,
        f"""
        ip link add node{position} type veth peer name eth0 netns {netns}
        ip link set node{position} master fabric up
        ip route add {pod_cidr(position)} via {layout.node_address(position)}
        """,
    )
    _script(
        netns,
        f"""
        ip link set lo up
        ip addr add {layout.node_address(position)}/24 dev eth0
        ip link set eth0 up
        ip route add default via {layout.host_address}
        ip route add {SERVICE_CIDR} dev eth0
        echo 1 > /proc/sys/net/ipv4/ip_forward
        """,
    )


def join(layout: Layout, count: int) -> None:
    """Routes between the pods of `count` nodes."""
    for position in range(count):
        for other in range(count):
            if other != position:
                route = f"ip route add {pod_cidr(other)} via {layout.node_address(other)}"
                _script(layout.node_netns(position), route)


def cut(layout: Layout, position: int) -> None:
    """Pull a node's cable: nobody reaches it or its pods, which run on."""
    _script(layout.netns, f"ip link set node{position} down")


def mend(layout: Layout, position: int) -> None:
    """Plug it in again."""
    _script(layout.netns, f"ip link set node{position} up")


def namespaces(layout: Layout) -> list[str]:
    """The cluster's namespaces that exist now, killed runs' ones included."""
    if not NETNS_DIR.exists():
        return []
    pattern = re.compile(re.escape(layout.netns) + r"(-\d+)?")
    return sorted(entry for entry in os.listdir(NETNS_DIR) if pattern.fullmatch(entry))


def processes(layout: Layout) -> set[int]:
    """Processes that live in one of the cluster's namespaces (an interrupted `exec`, for example)."""
    inodes = set()
    for name in namespaces(layout):
        with contextlib.suppress(OSError):
            inodes.add(os.stat(NETNS_DIR / name).st_ino)
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # ended meanwhile
                if os.stat(entry / "ns" / "net").st_ino in inodes:
                    found.add(int(entry.name))
    return found


def remove(layout: Layout) -> None:
    """Remove interfaces and namespaces of the cluster; what is not there is fine."""
    if f" {layout.host_interface}@" in output(["ip", "-o", "link"]):
        run(["ip", "link", "del", layout.host_interface])
    for name in reversed(namespaces(layout)):
        run(["ip", "netns", "del", name])
