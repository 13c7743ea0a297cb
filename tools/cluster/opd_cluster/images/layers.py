"""Layers: directories in the cache, keyed by what they are made from, and a way to run a command on a stack of them."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from opd_cluster.errors import ClusterError
from opd_cluster.layout import cache_root, locked
from opd_cluster.shell import Stage, run

GRACE_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class Layer:
    """One directory of files, in overlayfs' own notation (whiteouts and all). Never changed once it has its name."""

    key: str
    summary: str

    @property
    def path(self) -> Path:
        return cache_root() / "layers" / self.key / "fs"

    @property
    def bytes(self) -> int:
        """Sum of its files' sizes; on disk it may be less, see `link_tree`."""
        return int((self.path.parent / "bytes").read_text())

    @property
    def diff_id(self) -> str:
        """What stands for the layer's tar digest. No tar is ever made: layers reach containerd as directories."""
        return "sha256:" + hashlib.sha256(self.key.encode()).hexdigest()


def digest(*words: str | bytes) -> str:
    """A short content key of the words in their order."""
    whole = hashlib.sha256()
    for word in words:
        data = word.encode() if isinstance(word, str) else word
        whole.update(len(data).to_bytes(8, "big") + data)
    return whole.hexdigest()[:16]


def make_layer(key: str, summary: str, fill: Callable[[Path], None]) -> Layer:
    """The layer of that key, filled by `fill(directory)` if the cache lacks it; an interrupted fill starts anew."""
    layer = Layer(key, summary)
    if layer.path.exists():
        return layer
    home = layer.path.parent
    with locked(home.parent / f".{key}.lock"):
        if not layer.path.exists():
            partial = home.with_name(f".{key}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "fs").mkdir(parents=True)
            with Stage(summary):
                fill(partial / "fs")
            shutil.rmtree(partial / "work", ignore_errors=True)
            (partial / "bytes").write_text(str(tree_bytes(partial / "fs")))
            partial.rename(home)
    (home.parent / f".{key}.lock").unlink(missing_ok=True)
    return layer


def chroot(
    lower: Sequence[Layer],
    upper: Path,
    script: str,
    *,
    user: str = "0:0",
    env: dict[str, str] | None = None,
    network: bool = False,
) -> None:
    """Run a shell script as in a container on the stack `lower` (bottom first); what it writes lands in `upper`.

    The mounts live in a private namespace and end with the script. Without `network` the script has none, which proves
    that everything it needs is in the layers below. Raises ClusterError with the script's last lines.
    """
    base = upper.parent
    root, work = base / "root", base / "work"
    for directory in (root, work):
        directory.mkdir(exist_ok=True)
    stack = ":".join(str(layer.path) for layer in reversed(lower))
    inner = ["env", "-i", *(f"{name}={value}" for name, value in (env or {}).items()), "sh", "-e", "-c", script]
    text = f"""
        mount -t overlay overlay -o lowerdir={stack},upperdir={upper},workdir={work} {root}
        mount -t proc proc {root}/proc
        mount -t tmpfs tmpfs {root}/dev
        for name in null zero random urandom; do touch {root}/dev/$name; mount --bind /dev/$name {root}/dev/$name; done
        (cd {root}/dev && umask 0 && mkdir shm)
        exec chroot --userspec={user} {root} {shlex.join(inner)}
    """
    spaces = ["--mount", "--fork", "--pid", "--kill-child", *([] if network else ["--net"])]
    done = subprocess.run(
        ["unshare", *spaces, "sh", "-e", "-c", text],
        capture_output=True,
        text=True,
        timeout=3600,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    root.rmdir()
    if done.returncode != 0:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-25:])
        raise ClusterError(f"exit code {done.returncode} in the image build: {script}\n{last}")


def link_tree(source: Path, target: Path) -> None:
    """Copy a directory as hard links (a full copy where the file systems differ): same content, no disk."""
    linked = run(["cp", "-al", f"{source}/.", target], check=False, timeout=1800)
    if linked.returncode != 0:
        run(["cp", "-a", f"{source}/.", target], timeout=3600)


def tree_bytes(path: Path) -> int:
    """Sum of the file sizes below a directory, hard-linked ones counted once."""
    seen: dict[tuple[int, int], int] = {}
    for directory, _, names in os.walk(path):
        for name in names:
            stat = os.lstat(os.path.join(directory, name))
            seen[(stat.st_dev, stat.st_ino)] = stat.st_size
    return sum(seen.values())


def record(image: str, layers: Sequence[Layer]) -> None:
    """Remember what the newest build of an image consists of, and remove layers that no newest build uses.

    A day's grace protects builds and loads of other checkouts that share the cache.
    """
    root = cache_root() / "layers"
    records = root / ".images"
    records.mkdir(exist_ok=True)
    (records / image.replace("/", "_").partition(":")[0]).write_text("\n".join(layer.key for layer in layers))
    used = {key for file in records.iterdir() for key in file.read_text().split()}
    for home in root.iterdir():
        if (
            not home.name.startswith(".")
            and home.name not in used
            and time.time() - home.stat().st_mtime > GRACE_SECONDS
        ):
            shutil.rmtree(home)
