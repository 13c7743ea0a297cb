"""A whole cluster: control plane, one CPU node, GPU nodes, images, DNS, NetworkPolicies, storage and KubeRay."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable

from opd_cluster import addons, cluster, controlplane, daemons, debian, network, node, parts
from opd_cluster.cluster import Shape
from opd_cluster.errors import ELSEWHERE, ClusterError
from opd_cluster.images import catalog
from opd_cluster.images.dockerfile import Image
from opd_cluster.layout import Layout, cache_root, locked, open_layout
from opd_cluster.node import Node
from opd_cluster.shell import Stage, need_root, say

NODE_SECONDS = 60
NEEDED_BYTES = 12 * 10**9
"""Go build caches 4 GB, Kubernetes programs 0.6 GB, base and bytecode 2 GB, slack; CUDA libraries are links into uv's cache."""


def nodes(layout: Layout, shape: Shape) -> list[Node]:
    """The CPU node first, then the GPU nodes."""
    pools = shape.pools or ("",)
    return [
        Node(layout, 0, "cpu-0"),
        *(
            Node(layout, 1 + index, f"gpu-{index}", shape.gpus, pools[index % len(pools)])
            for index in range(shape.gpu_nodes)
        ),
    ]


def up(name: str, shape: Shape) -> Layout:
    """Bring the cluster up; one of the same shape that runs already only gets the images that changed.

    Raises ClusterError naming the part that cannot run here and what to use instead.
    """
    need_root("opd-cluster up")
    debian.ensure(debian.CONTROL_PLANE + debian.NODE)
    _check_space()
    for part in parts.ALL:
        parts.binary(part)
    catalog.pause()
    catalog.kuberay()
    layout = open_layout(name)
    with locked(cache_root() / "clusters" / f".{name}.lock"):
        return _up(layout, shape)


def _up(layout: Layout, shape: Shape) -> Layout:
    if cluster.running_as(layout, shape) and not _dead(layout, nodes(layout, shape)):
        say(f"cluster {layout.name} is up already at {layout.server}")
        return layout
    cluster.clean(layout)
    cluster.begin(layout)
    with Stage(f"control plane at {layout.server}"):
        controlplane.start(layout, scheduler=True)
    cluster.install_crds(layout, ours=False)
    _start_nodes(layout, nodes(layout, shape))
    cluster.record_shape(layout, shape)
    return layout


def _start_nodes(layout: Layout, members: list[Node]) -> None:
    with Stage("DNS, storage and permissions"):
        addons.start_dns(layout)
        addons.allow_firewall(layout)
        addons.create_storage(layout)
        addons.create_claim(layout, "default")
    with Stage(f"{len(members)} nodes ready"):
        for member in members:
            node.start_containerd(member)
            member.store.load(catalog.pause())
        network.join(layout, len(members))
        members[0].store.load(catalog.kuberay())
        for member in members:
            node.start_kubelet(member)
        daemons.await_condition(
            layout,
            "every node is ready",
            lambda: not _dead(layout, members),
            seconds=NODE_SECONDS,
            hint=lambda: _why(layout),
        )
        for member in members:
            node.start_firewall(member)
            if member.gpus:
                addons.advertise_gpus(layout, member)
    with Stage("KubeRay"):
        addons.install_kuberay(layout)
        target = "deployment/kuberay-operator"
        wait = ("rollout", "status", target, "-n", addons.KUBERAY_NAMESPACE, f"--timeout={addons.ROLL_OUT_SECONDS}s")
        cluster.kubectl(layout, *wait, timeout=addons.ROLL_OUT_SECONDS + 10)


def _dead(layout: Layout, members: list[Node]) -> set[str]:
    """Names of nodes that are not Ready."""
    expected = {member.name for member in members}
    answer = json.loads(cluster.kubectl(layout, "get", "nodes", "-o", "json"))
    ready = {
        item["metadata"]["name"]
        for item in answer["items"]
        for condition in item["status"].get("conditions", [])
        if condition["type"] == "Ready" and condition["status"] == "True"
    }
    return expected - ready


def _why(layout: Layout) -> str:
    return f"{cluster.kubectl(layout, 'describe', 'nodes', check=False)[-3000:]}\nlogs: {layout.logs}\n{ELSEWHERE}"


def _check_space() -> None:
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    if (root / "layers").exists():  # most of it is spent already
        return
    free = shutil.disk_usage(root).free
    say(
        f"needs up to {NEEDED_BYTES / 1e9:.0f} GB under {root} beside the Python environments; {free / 1e9:.0f} GB are free"
    )
    if free < NEEDED_BYTES:
        raise ClusterError(
            f"not enough disk under {root}", f"set OPD_CACHE to a directory on a larger disk. {ELSEWHERE}"
        )


PROGRAMS = {part.name: part for part in (*parts.ALL, parts.KUEUE, parts.KWOK)}


def build(words: Iterable[str]) -> None:
    """Put programs and images of ours into the cache, so that starting a cluster later only starts it.

    Raises ClusterError for a word that is neither.
    """
    wanted = list(words) or [*(part.name for part in parts.ALL), "operator", "trainer"]
    unknown = [word for word in wanted if word not in PROGRAMS and _image_name(word) not in catalog.BUILDERS]
    if unknown:
        images = [name.removeprefix("opd-") for name in catalog.BUILDERS]
        raise ClusterError(f"nothing here is called {', '.join(unknown)}", f"one of {', '.join([*PROGRAMS, *images])}")
    for word in wanted:
        if word in PROGRAMS:
            parts.binary(PROGRAMS[word])
            continue
        need_root("building images")
        debian.ensure(debian.CONTROL_PLANE + debian.NODE)
        _check_space()
        with Stage(f"image {_image_name(word)}"):
            catalog.BUILDERS[_image_name(word)]()


def _image_name(word: str) -> str:
    return word if word.startswith("opd-") else f"opd-{word}"


def load(layout: Layout, names: Iterable[str]) -> list[Image]:
    """Build our images (what changed of them) and put them where their pods run.

    The operator goes to the CPU node, the SGLang image to GPU nodes, the trainer everywhere.
    """
    shape = cluster.recorded_shape(layout) or Shape()
    built = []
    for word in names:
        name = _image_name(word)
        if name not in catalog.BUILDERS:
            raise ClusterError(
                f"{name} is no image of ours", f"one of {', '.join(catalog.BUILDERS)}, or the path of an image archive"
            )
        with Stage(f"image {name}"):
            image = catalog.BUILDERS[name]()
            say(f"    {image.name}: {image.bytes / 1e9:.2f} GB in {len(image.layers)} layers")
            for member in _where(name, nodes(layout, shape)):
                if member.store.load(image):
                    say(f"    {image.name} → {member.name}")
        built.append(image)
    return built


def _where(name: str, members: list[Node]) -> list[Node]:
    if name == "opd-operator":
        return members[:1]
    return [member for member in members if member.gpus] if name == "opd-trainer-sglang" else members
