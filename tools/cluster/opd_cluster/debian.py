"""Debian packages that the node parts come from, installed by us when missing."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from opd_cluster.errors import ELSEWHERE, ClusterError
from opd_cluster.shell import Stage, run


@dataclass(frozen=True)
class Tool:
    program: str
    package: str


SBIN = "/usr/local/sbin:/usr/sbin:/sbin"

CONTROL_PLANE = (Tool("ip", "iproute2"), Tool("nsenter", "util-linux"), Tool("openssl", "openssl"))
NODE = (
    Tool("containerd", "containerd"),
    Tool("runc", "runc"),
    Tool("/usr/lib/cni/bridge", "containernetworking-plugins"),
    Tool("nft", "nftables"),
    Tool("conntrack", "conntrack"),
    Tool("ipset", "ipset"),
    Tool("iptables", "iptables"),
)
IMAGES = (Tool("debootstrap", "debootstrap"),)


def _found(tool: Tool) -> bool:
    if tool.program.startswith("/"):
        return os.path.exists(tool.program)
    return shutil.which(tool.program, path=f"{os.environ.get('PATH', '')}:{SBIN}") is not None


def ensure(tools: tuple[Tool, ...]) -> None:
    """Install what is missing; raises ClusterError naming the packages where that cannot be done here."""
    missing = sorted({tool.package for tool in tools if not _found(tool)})
    if not missing:
        return
    listed = " ".join(missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterError(f"missing on this machine: {listed}", f"install them and try again. {ELSEWHERE}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with Stage(f"Debian packages {listed}"):
        run(["apt-get", "update", "-q"], env=env, timeout=600)
        # No service may start by itself: containerd runs under our own configuration only.
        run(
            ["apt-get", "install", "-qy", "--no-install-recommends", *missing],
            env={**env, "RUNLEVEL": "1"},
            timeout=900,
        )
