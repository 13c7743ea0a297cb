"""Where everything lies: the cache shared by all clusters, and one state directory and address range per cluster."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from opd_cluster.errors import ClusterError
from opd_cluster.shell import output

SOURCE = Path(__file__).resolve().parents[3]
"""The checkout: Go modules, Dockerfiles, lock files and the chart are read from it."""

SERVICE_CIDR = "10.96.0.0/16"
POD_CIDR = "10.244.0.0/16"
API_SERVICE_ADDRESS = "10.96.0.1"
DNS_SERVICE_ADDRESS = "10.96.0.10"
API_PORT = 6443
MAX_CLUSTERS = 250
RUN_DIR = Path("/run/opd")
"""Sockets and container state, one directory per cluster and node."""


def cache_root() -> Path:
    """OPD_CACHE, else ~/.cache/opd: builds, images and the clusters' own directories."""
    return Path(os.environ.get("OPD_CACHE") or Path.home() / ".cache" / "opd").resolve()


@dataclass(frozen=True)
class Layout:
    """Names, directories and addresses of one cluster; `index` picks its 10.203.<index>.0/24."""

    name: str
    index: int
    root: Path

    @property
    def state(self) -> Path:
        return self.root / "clusters" / self.name

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def kubeconfig(self) -> Path:
        return self.state / "kubeconfig"

    @property
    def data(self) -> Path:
        """The directory behind every claim named opd-local."""
        return self.state / "data"

    @property
    def netns(self) -> str:
        """The control plane's namespace, which also holds the bridge that joins the nodes."""
        return f"opd-{self.name}"

    def node_netns(self, position: int) -> str:
        return f"opd-{self.name}-{position}"

    @property
    def cgroup(self) -> str:
        return f"opd-{self.name}"

    @property
    def host_interface(self) -> str:
        return f"opd{self.index}"

    def address(self, last: int) -> str:
        return f"10.203.{self.index}.{last}"

    @property
    def host_address(self) -> str:
        return self.address(1)

    @property
    def api_address(self) -> str:
        return self.address(2)

    def node_address(self, position: int) -> str:
        return self.address(10 + position)

    @property
    def server(self) -> str:
        return f"https://{self.api_address}:{API_PORT}"


def open_layout(name: str) -> Layout:
    """The layout of a cluster, giving a new one the lowest address range that nobody uses.

    Raises ClusterError for a name that cannot be part of an interface, cgroup and host name.
    """
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?", name):
        raise ClusterError(f"{name!r} is no cluster name", "use at most 32 lower-case letters, digits and dashes")
    root = cache_root()
    with locked(root / "clusters" / ".lock"):
        mine = root / "clusters" / name / "index"
        if not mine.exists():
            taken = {int(file.read_text()) for file in (root / "clusters").glob("*/index")}
            taken |= {
                int(found) for found in re.findall(r"inet 10\.203\.(\d+)\.1/", output(["ip", "-4", "-o", "addr"]))
            }
            free = next((index for index in range(MAX_CLUSTERS) if index not in taken), None)
            if free is None:
                raise ClusterError("every address range is taken", "remove a cluster: opd-cluster down --purge")
            mine.parent.mkdir(parents=True, exist_ok=True)
            mine.write_text(str(free))
        return Layout(name, int(mine.read_text()), root)


def existing(prefix: str = "") -> list[str]:
    """Names of the clusters that have a state directory."""
    return sorted(file.parent.name for file in (cache_root() / "clusters").glob(f"{prefix}*/index"))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file: two runs never build or allocate the same thing at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
