"""The life of a cluster: up, down, and what both are made of."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from opd_cluster import cgroups, controlplane, daemons, debian, network, parts
from opd_cluster.errors import ClusterError
from opd_cluster.layout import RUN_DIR, SOURCE, Layout, existing, open_layout
from opd_cluster.shell import Stage, find_kubectl, need_root, run, say, wait_for

CRD_SECONDS = 30
KUBERAY_KINDS = ("rayclusters", "rayjobs", "rayservices")


@dataclass(frozen=True)
class Shape:
    """What an `up` asked for; a running cluster of the same shape is left as it is."""

    control_plane_only: bool = False
    gpu_nodes: int = 1
    gpus: int = 8
    #: Names of the pools that the GPU nodes belong to in turn; each pool has a label and a taint of its own.
    pools: tuple[str, ...] = ()


def kubectl(
    layout: Layout, *arguments: str | Path, input_text: str | None = None, check: bool = True, timeout: float = 120
) -> str:
    """kubectl as the cluster's administrator; its standard output."""
    command = [find_kubectl(), "--kubeconfig", layout.kubeconfig, *arguments]
    return run(command, input_text=input_text, check=check, timeout=timeout).stdout


def recorded_shape(layout: Layout) -> Shape | None:
    file = layout.state / "shape.json"
    if not file.exists():
        return None
    values = json.loads(file.read_text())
    return Shape(**{**values, "pools": tuple(values.get("pools", ()))})


def record_shape(layout: Layout, shape: Shape) -> None:
    (layout.state / "shape.json").write_text(json.dumps(asdict(shape)))


def is_up(layout: Layout) -> bool:
    """Whether the API server answers and every daemon runs; a half-dead cluster does not count."""
    exists = layout.kubeconfig.exists() and layout.netns in network.namespaces(layout)
    return exists and not daemons.ended(layout) and controlplane.api_ready(layout)


def running_as(layout: Layout, shape: Shape) -> bool:
    """Whether the cluster runs in this shape; raises ClusterError if it runs in another one, which nobody asked to end."""
    if not is_up(layout):
        return False
    recorded = recorded_shape(layout)
    if recorded is not None and recorded != shape:
        raise ClusterError(
            f"cluster {layout.name} runs already, as {recorded}",
            f"opd-cluster down --name {layout.name}, or another --name",
        )
    return recorded == shape


def control_plane_up(name: str, *, scheduler: bool = False, controller_qps: int | None = None) -> Layout:
    """API server, etcd and controller manager with the KubeRay and OPDJob CRDs: all that needs no node. About 5 s.

    Removes first what a killed run of that name left behind. Needs root. Benchmarks bring nodes that are played
    (`scheduler`) and lift the limit of the controllers' calls (see controlplane.start).
    """
    need_root("opd-cluster up --control-plane")
    debian.ensure(debian.CONTROL_PLANE)
    layout = open_layout(name)
    shape = Shape(control_plane_only=True, gpu_nodes=0, gpus=0)
    if running_as(layout, shape):
        return layout
    for part in (parts.KUBERNETES, parts.KUBERAY):
        parts.binary(part)
    clean(layout)
    begin(layout)
    with Stage(f"control plane at {layout.server}"):
        controlplane.start(layout, scheduler=scheduler, controller_qps=controller_qps)
    install_crds(layout, ours=True)
    record_shape(layout, shape)
    return layout


def begin(layout: Layout) -> None:
    """An empty cgroup and namespace for a fresh cluster; a new etcd each time."""
    shutil.rmtree(layout.state / "etcd", ignore_errors=True)
    shutil.rmtree(layout.logs, ignore_errors=True)
    cgroups.create(layout.cgroup)
    network.create_fabric(layout)


def install_crds(layout: Layout, *, ours: bool) -> None:
    """KubeRay's CRDs, and with `ours` the OPDJob's as `make generate` wrote it (where no chart brings it)."""
    with Stage("custom resource definitions"):
        for file in (kuberay_crds(), *(sorted((SOURCE / "crds").glob("*.yaml")) if ours else ())):
            # Server-side: KubeRay's schemas do not fit into the annotation that a client-side apply writes.
            kubectl(layout, "apply", "--server-side", "--force-conflicts", "--validate=false", "-f", file)
        # `kubectl wait` fails on a CRD that has no conditions at all yet.
        wait_for("custom resource definitions Established", lambda: _established(layout), seconds=CRD_SECONDS)


def _established(layout: Layout) -> bool:
    items = json.loads(kubectl(layout, "get", "crd", "-o", "json"))["items"]
    conditions = [item.get("status", {}).get("conditions") or [] for item in items]
    return all(any(c["type"] == "Established" and c["status"] == "True" for c in found) for found in conditions)


def kuberay_crds() -> Path:
    """KubeRay's CRDs in one JSON file, less what costs the API server seconds and nobody reads here.

    Descriptions are nine tenths of 4 MB; version v1alpha1 and RayCronJob (behind a feature gate) are not used.
    """
    target = parts.files(parts.KUBERAY) / "crds.json"
    if not target.exists():
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        files = [parts.files(parts.KUBERAY) / "crd" / "bases" / f"ray.io_{plural}.yaml" for plural in KUBERAY_KINDS]
        items = [_terse(yaml.load(file.read_text(), Loader=loader)) for file in files]  # noqa: S506 - a safe loader
        for item in items:
            item["spec"]["versions"] = [version for version in item["spec"]["versions"] if version["name"] == "v1"]
        partial = target.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
        partial.rename(target)
    return target


def _terse(node: Any) -> Any:
    if isinstance(node, dict):
        return {k: _terse(v) for k, v in node.items() if not (k == "description" and isinstance(v, str))}
    return [_terse(item) for item in node] if isinstance(node, list) else node


def clean(layout: Layout) -> None:
    """End every process of the cluster and remove its mounts, namespaces, interfaces and cgroups. Files stay."""
    cgroups.kill(layout.cgroup, network.processes(layout))
    unmount(layout)
    network.remove(layout)
    cgroups.remove(layout.cgroup)
    daemons.forget(layout)
    shutil.rmtree(layout.pki, ignore_errors=True)
    for file in (layout.kubeconfig, layout.state / "shape.json"):
        file.unlink(missing_ok=True)


def mounts_below(path: Path) -> list[str]:
    """Mount points under `path`, innermost first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    decoded = [re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), point) for point in points]
    return sorted((point for point in decoded if Path(point).is_relative_to(path)), key=len, reverse=True)


def _mounts(layout: Layout) -> list[str]:
    return mounts_below(layout.state) + mounts_below(RUN_DIR / layout.name)


def unmount(layout: Layout) -> None:
    """Unmount what dead kubelets and containers left, and remove the sockets and links beside it."""
    for point in _mounts(layout):
        run(["umount", point], check=False)
    if left := _mounts(layout):
        run(["umount", "--lazy", *left])
    shutil.rmtree(RUN_DIR / layout.name, ignore_errors=True)
    for link in Path("/var/log/containers").glob("*"):  # kubelet's legacy links; its option cannot turn them off
        if link.is_symlink() and Path(os.readlink(link)).is_relative_to(layout.state):
            link.unlink()


def down(name: str, *, purge: bool = False) -> None:
    """Remove a running or half-dead cluster. `purge` removes its directory too: images, data, runs."""
    need_root("opd-cluster down")
    if name not in existing():
        say(f"no cluster {name}")
        return
    layout = open_layout(name)
    with Stage(f"remove cluster {name}"):
        clean(layout)
        if purge:
            shutil.rmtree(layout.state)


def sweep(prefix: str) -> None:
    """Remove the clusters named `<prefix><pid>[-…]` whose process is gone: what killed test sessions left behind."""
    for name in existing(prefix):
        pid = name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            down(name, purge=True)


def leftovers(layout: Layout) -> list[str]:
    """What of the cluster is on the machine: empty after `down`."""
    found = [f"process {pid}" for pid in sorted(cgroups.members(layout.cgroup) | network.processes(layout))]
    found += [f"mount {point}" for point in _mounts(layout)]
    found += [f"network namespace {name}" for name in network.namespaces(layout)]
    found += [f"interface {entry}" for entry in os.listdir("/sys/class/net") if entry == layout.host_interface]
    return found + [
        f"cgroup {mount / layout.cgroup}" for mount in cgroups.hierarchies() if (mount / layout.cgroup).exists()
    ]


def require_up(name: str) -> Layout:
    """The layout of a running cluster; raises ClusterError when it is not running."""
    if name in existing():
        layout = open_layout(name)
        if is_up(layout):
            return layout
    raise ClusterError(f"cluster {name} is not running", "start it with: opd-cluster up")
