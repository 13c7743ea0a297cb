"""Puts an image into a node's containerd: layers as hard-linked snapshots, manifest and configuration as a tiny archive."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import tarfile
from pathlib import Path

from opd_cluster.errors import ClusterError
from opd_cluster.images.dockerfile import Image
from opd_cluster.images.layers import Layer, link_tree
from opd_cluster.shell import output, run

# What containerd's reference parser makes of a short name; nothing is ever asked of that host.
SHORT_NAMES = "docker.io/library/"
MEDIA = "application/vnd.oci.image"
GC_ROOT = "containerd.io/gc.root"


class Store:
    """The image store of one running containerd."""

    def __init__(self, socket: Path) -> None:
        self.ctr = ["ctr", "--address", str(socket), "--namespace", "k8s.io"]

    def load(self, image: Image) -> bool:
        """Make the image known; False when this very image was there already.

        Layers that the node has are kept; new ones are linked from the cache, so that no blob and no second copy exists.
        """
        manifest, config = documents(image)
        if self._digest_of(image) == digest_of(manifest):
            return False
        chain = [self._snapshot(layer, parent) for layer, parent in _chained(image.layers)]
        archive = _archive(image, manifest, config)
        done = subprocess.run(
            [*self.ctr, "images", "import", "-"], input=archive, capture_output=True, timeout=300, check=False
        )
        if done.returncode != 0:
            raise ClusterError(f"containerd refused {image.name}: {done.stderr.decode()[-500:]}")
        for snapshot in chain:  # from now on the image holds them: they go when it is replaced
            run([*self.ctr, "snapshots", "label", snapshot, f"{GC_ROOT}="])
        return True

    def import_archive(self, archive: Path) -> None:
        """An OCI or docker archive that another tool wrote."""
        run([*self.ctr, "images", "import", archive], timeout=1800)

    def _digest_of(self, image: Image) -> str:
        listed = output([*self.ctr, "images", "ls", f"name=={SHORT_NAMES}{image.name}"])
        found = re.search(r"sha256:[0-9a-f]{64}", listed)
        return found[0] if found else ""

    def _snapshot(self, layer: Layer, parent: str) -> str:
        name = _chain_id(parent, layer)
        if run([*self.ctr, "snapshots", "info", name], check=False).returncode == 0:
            run([*self.ctr, "snapshots", "label", name, f"{GC_ROOT}=load"])
            return name
        draft = f"draft-{name}"
        run([*self.ctr, "snapshots", "rm", draft], check=False)  # of an interrupted load
        run([*self.ctr, "snapshots", "prepare", draft, *([parent] if parent else [])])
        mount = output([*self.ctr, "snapshots", "mounts", "/unused", draft])
        found = re.search(r"upperdir=([^,\s]+)", mount) or re.search(r"\s(/\S+/fs)\s", mount)
        if not found:
            raise ClusterError(f"no directory in containerd's answer: {mount}")
        link_tree(layer.path, Path(found[1]))
        run([*self.ctr, "snapshots", "commit", name, draft])
        return name


def _chain_id(parent: str, layer: Layer) -> str:
    """containerd's name for the stack `parent` plus `layer` (OCI image spec, ChainID)."""
    return digest_of(f"{parent} {layer.diff_id}".encode()) if parent else layer.diff_id


def _chained(layers: tuple[Layer, ...]) -> list[tuple[Layer, str]]:
    pairs, parent = [], ""
    for layer in layers:
        pairs.append((layer, parent))
        parent = _chain_id(parent, layer)
    return pairs


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def documents(image: Image) -> tuple[bytes, bytes]:
    """(manifest, configuration) as canonical JSON: the same layers give the same image digest."""
    config = json.dumps(image.config(), sort_keys=True).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{MEDIA}.manifest.v1+json",
        "config": {"mediaType": f"{MEDIA}.config.v1+json", "digest": digest_of(config), "size": len(config)},
        "layers": [
            {"mediaType": f"{MEDIA}.layer.v1.tar", "digest": layer.diff_id, "size": 0} for layer in image.layers
        ],
    }
    return json.dumps(manifest, sort_keys=True).encode(), config


def _archive(image: Image, manifest: bytes, config: bytes) -> bytes:
    """An OCI layout without layer blobs: containerd has their snapshots, and never looks at blobs it need not unpack."""
    reference = {
        "mediaType": f"{MEDIA}.manifest.v1+json",
        "digest": digest_of(manifest),
        "size": len(manifest),
        "annotations": {"io.containerd.image.name": f"{SHORT_NAMES}{image.name}"},
    }
    entries = {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [reference]}).encode(),
        f"blobs/sha256/{digest_of(manifest)[7:]}": manifest,
        f"blobs/sha256/{digest_of(config)[7:]}": config,
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in entries.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
