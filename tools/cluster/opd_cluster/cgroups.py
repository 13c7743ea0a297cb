"""One cgroup per cluster in every hierarchy: how we find each process of a cluster again, however it was started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from opd_cluster.errors import ClusterError

GRACE_SECONDS = 1.0
"""Nothing in a cluster that goes down is worth waiting for: its etcd is thrown away, containerd's store survives a kill."""
V2_CONTROLLERS = ("cpu", "cpuset", "io", "memory", "pids")


def hierarchies() -> list[Path]:
    """Mount points of all cgroup hierarchies: one on a version 2 machine, about ten on version 1 or a hybrid."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    found = [Path(fields[1]) for fields in mounts if fields[2] in ("cgroup", "cgroup2")]
    if not found:
        raise ClusterError("no cgroup hierarchy is mounted", "kubelet cannot run in this sandbox")
    return found


def create(group: str) -> None:
    """Make `group` everywhere, ready to hold children of its own (kubelets get one each)."""
    for mount in hierarchies():
        path = mount
        for part in Path(group).parts:
            _delegate(path)
            path = path / part
            path.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):  # version 1: an empty cpuset holds no process
                if mount.name != "unified" and (path / name).exists() and not (path / name).read_text().strip():
                    (path / name).write_text((path.parent / name).read_text())
        _delegate(path)


def _delegate(path: Path) -> None:
    control, offered = path / "cgroup.subtree_control", path / "cgroup.controllers"
    if not control.exists():
        return
    for name in V2_CONTROLLERS:
        if name in offered.read_text().split():
            # EBUSY: the root of someone else's delegation; what is needed there is on already.
            with contextlib.suppress(OSError):
                control.write_text(f"+{name}")


def join_command(group: str) -> str:
    """A shell line that puts the shell itself into `group`/system, in one hierarchy, before it execs a daemon."""
    leaf = hierarchies()[0] / group / "system"
    leaf.mkdir(exist_ok=True)
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (leaf / name).exists() and not (leaf / name).read_text().strip():
            (leaf / name).write_text((leaf.parent / name).read_text())
    return f"echo $$ > {leaf}/cgroup.procs"


def _tree(group: str) -> list[Path]:
    """Every directory of the group, children before parents."""
    found: list[Path] = []
    for mount in hierarchies():
        for path, _, _ in os.walk(mount / group, topdown=False):
            found.append(Path(path))
    return found


def members(group: str) -> set[int]:
    """Process ids in the group, in any hierarchy and at any depth."""
    pids: set[int] = set()
    for path in _tree(group):
        with contextlib.suppress(OSError):  # the directory went away between the walk and the read
            pids |= {int(line) for line in (path / "cgroup.procs").read_text().split()}
    return pids - {0}


def kill(group: str, others: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """End every process of the group and of `others`: SIGTERM, a grace of one second, SIGKILL.

    Raises ClusterError when a process survives (only one stuck in the kernel can).
    """
    for number, patience in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, 20.0)):
        deadline = time.monotonic() + patience
        pending = alive(members(group) | others)
        for pid in pending:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while pending and time.monotonic() < deadline:
            time.sleep(0.05)
            pending = alive(members(group) | others)
            if number == signal.SIGKILL:  # a shim may have started another one meanwhile
                for pid in pending:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
    if pending:
        raise ClusterError(f"processes {sorted(pending)} survive SIGKILL")


def alive(pids: set[int]) -> set[int]:
    """Those of `pids` that run (a zombie does not)."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                found.add(pid)
    return found


def remove(group: str) -> None:
    """Remove the (empty) group from every hierarchy."""
    deadline = time.monotonic() + 10
    while left := _tree(group):
        for path in left:
            with contextlib.suppress(OSError):  # EBUSY: the kernel is still letting go of a dead process
                path.rmdir()
        if time.monotonic() > deadline:
            raise ClusterError(f"cgroup directories cannot be removed: {left[0]}")
        time.sleep(0.02)
