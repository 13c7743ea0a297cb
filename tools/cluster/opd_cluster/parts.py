"""The Go programs of the cluster, each built once per content of its module and kept in the cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from opd_cluster.errors import ELSEWHERE, ClusterError
from opd_cluster.layout import SOURCE, cache_root, locked
from opd_cluster.shell import Stage, output, run, say

PROGRESS_SECONDS = 10.0
KUBERNETES_VERSION = ("1", "36", "v1.36.3")


@dataclass(frozen=True)
class Part:
    """One Go module under tools/cluster/go and the package in it (or in a module it requires) to build."""

    name: str
    package: str = "."
    tags: str = ""
    flags: str = ""
    carry: tuple[str, str] | None = None
    """(module, directory in it): files that belong to the program, copied beside it into `files/`."""


_VERSION = "k8s.io/component-base/version"
_MAJOR, _MINOR, _FULL = KUBERNETES_VERSION

KUBERNETES = Part(
    "kubernetes",
    tags="providerless",
    flags=f"-X {_VERSION}.gitVersion={_FULL} -X {_VERSION}.gitMajor={_MAJOR} -X {_VERSION}.gitMinor={_MINOR}",
)
KUBERAY = Part(
    "kuberay",
    "github.com/ray-project/kuberay/ray-operator",
    carry=("github.com/ray-project/kuberay/ray-operator", "config"),
)
COREDNS = Part("coredns")
HELM = Part("helm", "helm.sh/helm/v4/cmd/helm")
KUBE_ROUTER = Part("kube-router", "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router")
PAUSE = Part("pause")
#: Not in ALL: built when a test asks for it.
KUEUE = Part("kueue", "sigs.k8s.io/kueue/cmd/kueue", carry=("sigs.k8s.io/kueue", "config/components"))
KWOK = Part("kwok", "sigs.k8s.io/kwok/cmd/kwok")
"""A kubelet without containers, for benchmarks: no cluster needs it, and it is built only where it is asked for."""

CONTROL_PLANE = (KUBERNETES,)
ALL = (KUBERNETES, PAUSE, COREDNS, KUBE_ROUTER, KUBERAY, HELM)


def module(part: Part) -> Path:
    return SOURCE / "tools" / "cluster" / "go" / part.name


def key(part: Part) -> str:
    """Hash of everything that decides what the program is: sources, go.mod, go.sum, flags."""
    digest = hashlib.sha256(repr(part).encode())
    for file in sorted(module(part).iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def home(part: Part) -> Path:
    return cache_root() / "parts" / f"{part.name}-{key(part)}"


def binary(part: Part) -> Path:
    """The program, built when the cache lacks it."""
    target = home(part) / part.name
    if not target.exists():
        with locked(cache_root() / "parts" / f".{part.name}.lock"):
            if not target.exists():
                _build(part, target)
                _drop_build_cache()
    return target


def _build_cache() -> Path:
    """Go's build cache of our own: what an interrupted build resumes from, 6 GB that go when every part is built."""
    return cache_root() / "go-build"


def _drop_build_cache() -> None:
    """Unless a part is missing, or somebody else builds from it right now."""
    if not all((home(part) / part.name).exists() for part in ALL):
        return
    with _cache_lock().open("w") as lock, contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(_build_cache(), ignore_errors=True)


def _cache_lock() -> Path:
    return cache_root() / "parts" / ".go-build.lock"


def files(part: Part) -> Path:
    """The directory of the files carried with the program."""
    binary(part)
    return home(part) / "files"


def _build(part: Part, target: Path) -> None:
    if shutil.which("go") is None:
        raise ClusterError("Go (1.26 or newer) is needed to build the cluster's programs", ELSEWHERE)
    env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false", "GOCACHE": str(_build_cache())}
    work = target.parent.with_name(f".{target.parent.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    with Stage(f"build {part.name} from source"), _cache_lock().open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        if part.carry:
            name, directory = part.carry
            run(["go", "mod", "download"], cwd=module(part), env=env, timeout=1800)
            found = output(["go", "list", "-m", "-f", "{{.Dir}}", name], cwd=module(part), env=env)
            shutil.copytree(Path(found.strip()) / directory, work / "files")
            run(["chmod", "-R", "u+w", work / "files"])  # the module cache is read-only, and so are copies of it
        _compile(part, work / part.name, env)
    for old in target.parent.parent.glob(f"{part.name}-*"):
        shutil.rmtree(old)
    work.rename(target.parent)


def _compile(part: Part, out: Path, env: dict[str, str]) -> None:
    """`go build`, telling how many packages are done. An interrupted build resumes from Go's own cache."""
    say(f"    {part.name}: downloading modules")
    total = len(
        output(
            ["go", "list", "-deps", "-tags", part.tags, part.package], cwd=module(part), env=env, timeout=1800
        ).split()
    )
    command = ["go", "build", "-v", "-trimpath", "-tags", part.tags, "-ldflags", f"-s -w {part.flags}", "-o", str(out)]
    build = subprocess.Popen(
        ["nice", *command, part.package], cwd=module(part), env=env, stderr=subprocess.PIPE, text=True
    )
    assert build.stderr is not None
    last, spoken = [""], time.monotonic()
    try:
        for done, line in enumerate(build.stderr, 1):
            last = [*last[-20:], line]
            if time.monotonic() - spoken > PROGRESS_SECONDS:
                say(f"    {part.name}: {done} of up to {total} packages compiled")
                spoken = time.monotonic()
    except BaseException:
        # Whoever gives up waiting (Ctrl-C, a test's deadline) must not leave a compiler beside the next try.
        build.terminate()
        build.wait()
        raise
    if build.wait() != 0:
        raise ClusterError(f"go build of {part.name} failed:\n{''.join(last)}")
