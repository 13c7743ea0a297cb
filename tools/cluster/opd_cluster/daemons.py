"""Starting the long-running processes of a cluster: in its namespace, in its cgroup, with a log file each."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from opd_cluster import cgroups
from opd_cluster.debian import SBIN
from opd_cluster.errors import ClusterError
from opd_cluster.layout import Layout
from opd_cluster.network import inside
from opd_cluster.shell import tail, wait_for


def environment() -> dict[str, str]:
    """What a daemon may know of the caller's environment: the search path, nothing else.

    Proxies and credentials of the calling shell stay outside the cluster.
    """
    return {"PATH": f"{os.environ.get('PATH', '/usr/bin:/bin')}:{SBIN}", "HOME": "/root", "LANG": "C.UTF-8"}


def start(
    layout: Layout,
    name: str,
    command: Sequence[object],
    *,
    netns: str = "",
    env: dict[str, str] | None = None,
    before: str = "",
) -> None:
    """Start a daemon that outlives us. `before` is a shell line run in the daemon's place just before the exec."""
    layout.logs.mkdir(parents=True, exist_ok=True)
    line = (
        f"{cgroups.join_command(layout.cgroup)} && {before or ':'} && exec {shlex.join(str(word) for word in command)}"
    )
    with (layout.logs / f"{name}.log").open("ab") as log:
        daemon = subprocess.Popen(
            [str(word) for word in inside(netns or layout.netns, "sh", "-c", line)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**environment(), **(env or {})},
            cwd="/",
        )
    (_pids(layout) / name).parent.mkdir(exist_ok=True)
    (_pids(layout) / name).write_text(str(daemon.pid))


def _pids(layout: Layout) -> Path:
    return layout.state / "pids"


def _started(layout: Layout) -> dict[str, int]:
    return {file.name: int(file.read_text()) for file in sorted(_pids(layout).glob("*"))}


def pid(layout: Layout, name: str) -> int:
    """Process id of a daemon that was started (it may have ended since)."""
    return _started(layout)[name]


def ended(layout: Layout) -> list[str]:
    """Names of the daemons that were started and do not run any more."""
    running = cgroups.alive(cgroups.members(layout.cgroup))
    return [name for name, pid in _started(layout).items() if pid not in running]


def await_condition(
    layout: Layout, what: str, condition: Callable[[], object], *, seconds: float, hint: Callable[[], str] | None = None
) -> None:
    """`shell.wait_for` while the cluster comes up: nobody restarts a daemon, so the first that ends is the failure.

    Raises ClusterError with the end of that daemon's log, at once.
    """

    def holds() -> object:
        # Not `ended`: a daemon that has just been started is not yet in its cgroup.
        started = _started(layout)
        running = cgroups.alive(set(started.values()))
        for name, number in started.items():
            if number not in running:
                raise ClusterError(f"{what}: {name} ended", tail(layout.logs / f"{name}.log"))
        return condition()

    wait_for(what, holds, seconds=seconds, hint=hint)


def kill(layout: Layout, name: str) -> None:
    """End a daemon with SIGKILL, and only it: what it started runs on. Raises ClusterError when it does not run."""
    file = _pids(layout) / name
    pid = int(file.read_text()) if file.exists() else 0
    if pid not in cgroups.alive(cgroups.members(layout.cgroup)):
        raise ClusterError(f"{name} of cluster {layout.name} does not run", "opd-cluster status")
    os.kill(pid, signal.SIGKILL)


def forget(layout: Layout) -> None:
    shutil.rmtree(_pids(layout), ignore_errors=True)
