"""The images of the cluster: ours from their Dockerfiles, the cluster's own from single static binaries."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from opd_cluster import parts
from opd_cluster.errors import ClusterError
from opd_cluster.images import rootfs
from opd_cluster.images.dockerfile import Image, build
from opd_cluster.images.layers import Layer, digest, make_layer, record
from opd_cluster.layout import SOURCE, locked
from opd_cluster.shell import run

VERSION_FILE = SOURCE / "pyproject.toml"
PAUSE = "opd-pause:1"


def version() -> str:
    found = re.search(r'^version = "(.+)"', VERSION_FILE.read_text(), flags=re.M)
    if not found:
        raise ClusterError(f"no version in {VERSION_FILE}")
    return found[1]


def static(name: str, part: parts.Part, *, user: str = "65532:65532") -> Image:
    """An image FROM scratch: one binary, which is also the entry point."""

    def fill(target: Path) -> None:
        shutil.copy(parts.binary(part), target / part.name)

    layer = make_layer(digest("static", part.name, parts.key(part)), f"{part.name} from scratch", fill)
    record(name, (layer,))
    return Image(name, (layer,), entrypoint=(f"/{part.name}",), user=user)


def pause() -> Image:
    return static(PAUSE, parts.PAUSE)


def kuberay() -> Image:
    return static("opd-kuberay:1.6.2", parts.KUBERAY)


def operator() -> Image:
    base = (rootfs.base(),)
    below = (*base, rootfs.dependencies("operator-image", base))
    return _from_dockerfile("opd-operator", "operator/Dockerfile", below, "operator-image")


def trainer() -> Image:
    return _from_dockerfile("opd-trainer", "trainer_image/Dockerfile", _trainer_layers(), "trainer-image")


def trainer_sglang() -> Image:
    below = _trainer_layers()
    added = rootfs.dependencies("trainer-sglang-image", below, installed="trainer-image")
    # Debian's packages know nothing of Python's: the compiler is made on the root file system alone, once for all locks.
    compiler = rootfs.compiler(below[:1])
    layers = (*below, added, compiler)
    return _from_dockerfile("opd-trainer-sglang", "trainer_image/Dockerfile", layers, "trainer-sglang-image")


def _trainer_layers() -> tuple[Layer, ...]:
    base = (rootfs.base(),)
    return (*base, rootfs.dependencies("trainer-image", base))


BUILDERS = {"opd-operator": operator, "opd-trainer": trainer, "opd-trainer-sglang": trainer_sglang}


def _from_dockerfile(name: str, file: str, below: tuple[Layer, ...], lock: str) -> Image:
    release = version()
    with locked(SOURCE / "dist" / ".lock"):
        wheel()
        arguments = {"LOCK": lock, "VERSION": release}
        image = build(f"{name}:{release}", SOURCE / file, SOURCE, below, arguments)
    record(image.name, image.layers)
    return image


def wheel() -> None:
    """Build dist/opd-*.whl when the sources are newer; hatchling writes equal bytes for equal sources."""
    for old in (SOURCE / "dist").glob("opd-*.whl"):
        old.unlink()
    run([rootfs.find_uv(), "build", "--wheel", "--quiet", "--out-dir", SOURCE / "dist", SOURCE], timeout=600)
