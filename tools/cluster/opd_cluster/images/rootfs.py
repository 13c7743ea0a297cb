"""The layers below our Dockerfiles: a small Debian, and the locked Python packages linked from uv's cache."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from opd_cluster import debian
from opd_cluster.errors import ClusterError
from opd_cluster.images.layers import Layer, chroot, digest, make_layer
from opd_cluster.layout import SOURCE, cache_root
from opd_cluster.shell import run

SUITE = "bookworm"
PYTHON = "3.11"
"""Debian bookworm's Python and the version that the lock files are resolved for."""
PACKAGES = ("python3", "python3-venv", "tini", "wget", "ca-certificates", "procps")
COMPILER = ("gcc", "g++", "libc6-dev")
"""What the trainer's Dockerfile installs beside SGLang."""
VENV = "opt/venv"
REVISION = "2"


def find_uv() -> str:
    """uv from the search path, beside this Python, or the one that the project's set-up keeps in the cache."""
    places = [Path(sys.executable).with_name("uv"), cache_root() / "uv" / "bin" / "uv"]
    found = shutil.which("uv") or next((str(place) for place in places if place.exists()), None)
    if not found:
        raise ClusterError("uv is missing", "make env-operator installs it")
    return found


def base() -> Layer:
    """Debian with Python, tini and wget (KubeRay's probes call it), 200 MB."""
    return make_layer(digest("base", SUITE, *PACKAGES), f"Debian {SUITE} root file system", _debootstrap)


def _debootstrap(target: Path) -> None:
    debian.ensure(debian.IMAGES)
    run(["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, target], timeout=1800)
    for waste in (
        "usr/share/doc",
        "usr/share/locale",
        "usr/share/man",
        "var/cache/apt",
        "var/lib/apt/lists",
        "debootstrap",
    ):
        shutil.rmtree(target / waste, ignore_errors=True)
    for directory in ("var/cache/apt/archives/partial", "var/lib/apt/lists/partial"):
        (target / directory).mkdir(parents=True)


def compiler(below: tuple[Layer, ...]) -> Layer:
    """A C and C++ compiler: a RUN of a Dockerfile has no network to install one over."""
    names = " ".join(COMPILER)
    waste = "/var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb /usr/share/doc /usr/share/man"
    script = f"apt-get update -q && apt-get install -qy --no-install-recommends {names} && rm -rf {waste}"

    def fill(target: Path) -> None:
        resolver = target / "etc" / "resolv.conf"
        resolver.parent.mkdir()
        shutil.copy("/etc/resolv.conf", resolver)  # the one in `below` is of the day that it was made
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive"}
        chroot(below, target, script, env=env, network=True)
        resolver.unlink()

    return make_layer(digest("compiler", SUITE, *COMPILER, *(layer.key for layer in below)), names, fill)


def dependencies(lock: str, below: tuple[Layer, ...], installed: str = "") -> Layer:
    """The packages of locks/`lock`.txt in /opt/venv, less those that `installed` (another lock) put into `below`.

    Files are hard links into uv's cache where that is on the same disk, so ten gigabytes of CUDA libraries cost nothing;
    only compiled bytecode is new.
    """
    wanted = _requirements(lock)
    have = _requirements(installed) if installed else {}
    if clash := sorted(name for name in have if name in wanted and have[name] != wanted[name]):
        raise ClusterError(
            f"locks/{lock}.txt and locks/{installed}.txt disagree on {', '.join(clash)}", "run tools/dev/lock.sh"
        )
    lines = [text for name, text in wanted.items() if name not in have]
    key = digest("dependencies", PYTHON, REVISION, *(layer.key for layer in below), *lines)
    return make_layer(
        key, f"{len(lines)} Python packages of locks/{lock}.txt", lambda target: _install(lines, below, target)
    )


def _requirements(lock: str) -> dict[str, str]:
    """Package name → its lines (version and hashes), comments dropped."""
    text = re.sub(r"^\s*#.*\n", "", (SOURCE / "locks" / f"{lock}.txt").read_text(), flags=re.M)
    found = re.findall(r"^([A-Za-z0-9._-]+)(?=[\[=; ])((?:.*\\\n)*.*)", text, flags=re.M)
    return {name: name + rest for name, rest in found}


def _install(lines: list[str], below: tuple[Layer, ...], target: Path) -> None:
    venv = target / VENV
    venv.mkdir(parents=True)
    requirements = target.parent / "requirements.txt"
    requirements.write_text("\n".join(lines))
    options = ["--python", PYTHON, "--no-deps", "--require-hashes", "--link-mode", "hardlink", "--quiet"]
    run([find_uv(), "pip", "install", *options, "--prefix", venv, "-r", requirements], timeout=3600)
    requirements.unlink()
    for script in (venv / "bin").glob("*"):
        content = script.read_bytes()
        if content.startswith(b"#!") and b"python" in content.split(b"\n", 1)[0]:
            mode = script.stat().st_mode
            script.unlink()  # a new file: the old one may be a link into uv's cache
            script.write_bytes(f"#!/{VENV}/bin/python\n".encode() + content.split(b"\n", 1)[1])
            script.chmod(mode)
    # Non-root containers cannot write bytecode beside the sources, and without it each import of torch takes a minute.
    # Some packages carry templates that are no valid Python: compileall goes on but ends with 1.
    compile_all = f"python3 -m compileall -q -j 2 /{VENV}/lib || find /{VENV}/lib -name '*.pyc' | grep -q ."
    chroot(below, target, compile_all, env={"PATH": "/usr/bin:/bin"})
