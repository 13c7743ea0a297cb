"""`opd-cluster`: the embedded Kubernetes from the command line."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from opd_cluster import addons, cluster, daemons, full, parts
from opd_cluster.errors import ClusterError
from opd_cluster.layout import Layout, existing, open_layout
from opd_cluster.network import inside
from opd_cluster.shell import find_kubectl, say

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
Name = Annotated[str, typer.Option("--name", envvar="OPD_CLUSTER", help="Which cluster; several can run at once.")]
Parameters = ParamSpec("Parameters")
# Our own options come first; from the first other word on, everything (a later `--` too) is the other program's.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def _guarded(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """A ClusterError becomes two lines on stderr and exit code 1."""

    @functools.wraps(function)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except ClusterError as error:
            say(f"error: {error}")
            if error.hint:
                say(f"hint:  {error.hint}")
            raise typer.Exit(1) from error

    return guarded


def command(function: Callable[Parameters, None]) -> None:
    """Register a subcommand."""
    app.command()(_guarded(function))


def command_passing_on(function: Callable[Parameters, None]) -> None:
    """Register a subcommand that hands all words it does not know to another program."""
    app.command(context_settings=PASS_ON)(_guarded(function))


@command
def up(
    name: Name = "default",
    control_plane: Annotated[
        bool, typer.Option("--control-plane", help="API server, etcd and controllers only.")
    ] = False,
    nodes: Annotated[int, typer.Option(min=2, max=9, help="One CPU node, the rest GPU nodes.")] = 2,
    gpus: Annotated[int, typer.Option(min=1, max=64, help="nvidia.com/gpu that each GPU node advertises.")] = 8,
    pools: Annotated[
        str, typer.Option(help="GPU pools, separated by commas: GPU nodes get label and taint of one after the other.")
    ] = "",
    images: Annotated[
        str, typer.Option(help="Our images to build and load, separated by commas.")
    ] = "operator,trainer",
) -> None:
    """Start the cluster; removes first what a killed run left behind."""
    if control_plane:
        layout = cluster.control_plane_up(name)
    else:
        layout = full.up(name, cluster.Shape(gpu_nodes=nodes - 1, gpus=gpus, pools=_words(pools)))
        full.load(layout, _words(images))
    print(f"export KUBECONFIG={layout.kubeconfig}")


@command
def build(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="Programs (kubernetes, helm, …) and images (operator, trainer, …); default: what up needs."
        ),
    ] = None,
) -> None:
    """Build programs and images into the cache and start nothing; what is there already is not built again."""
    full.build(what or [])


@command
def down(
    name: Name = "default",
    purge: Annotated[bool, typer.Option(help="Remove its files too: images, models, runs.")] = False,
) -> None:
    """Stop everything; no process, mount, namespace, interface or cgroup stays."""
    cluster.down(name, purge=purge)
    data = open_layout(name).data if name in existing() else None
    if data is not None and data.exists():
        size = sum(file.stat().st_size for file in data.rglob("*") if file.is_file()) / 1e9
        print(f"kept: models and runs in {data} ({size:.1f} GB); opd-cluster down --purge removes them too")


@command
def status() -> None:
    """Every cluster of this cache: whether it answers, and what of it is on the machine."""
    for name in existing():
        layout = open_layout(name)
        running = cluster.is_up(layout)
        print(f"{name}: {'running at ' + layout.server if running else 'not running'}")
        for ended in daemons.ended(layout):
            print(f"  ended: {ended} (see {layout.logs / ended}.log)")
        if not running:
            for line in cluster.leftovers(layout):
                print(f"  left behind: {line} (opd-cluster down removes it)")


@command
def kubeconfig(name: Name = "default") -> None:
    """Print the path of the administrator's kubeconfig."""
    print(cluster.require_up(name).kubeconfig)


@command
def load_image(
    images: Annotated[
        list[str],
        typer.Argument(help="operator, trainer, trainer-sglang, or an image archive (OCI or docker)."),
    ],
    name: Name = "default",
) -> None:
    """Build our images and put them on the nodes, or put a foreign archive on every node."""
    layout = cluster.require_up(name)
    for image in images:
        if Path(image).is_file():
            for member in full.nodes(layout, cluster.recorded_shape(layout) or cluster.Shape()):
                member.store.import_archive(Path(image))
        else:
            full.load(layout, [image])


@command
def claim(namespace: Annotated[str, typer.Argument()], name: Name = "default") -> None:
    """Make the claim opd-local (ReadWriteMany, the same directory everywhere) in a namespace; prints the directory."""
    layout = cluster.require_up(name)
    addons.create_claim(layout, namespace)
    print(layout.data)


@command
def install(
    sets: Annotated[list[str] | None, typer.Option("--set", help="Chart values, as for helm.")] = None,
    name: Name = "default",
) -> None:
    """Install or upgrade our operator from charts/opd-operator."""
    layout = cluster.require_up(name)
    full.load(layout, ["opd-operator"])
    print(addons.install_operator(layout, *(sets or [])))


@command_passing_on
def helm(context: typer.Context, name: Name = "default") -> None:
    """Helm against this cluster, for example: opd-cluster helm list -A."""
    layout = cluster.require_up(name)
    _become([str(parts.binary(parts.HELM)), *context.args], layout)


@command_passing_on
def kubectl(context: typer.Context, name: Name = "default") -> None:
    """kubectl against this cluster, for example: opd-cluster kubectl get pods -A."""
    _become([find_kubectl(), *context.args], cluster.require_up(name))


@command_passing_on
def exec(
    context: typer.Context,
    name: Name = "default",
    node: Annotated[str, typer.Option(help="In this node's network; without it in the control plane's.")] = "",
) -> None:
    """Run a command inside the cluster's network: opd-cluster exec --node gpu-0 -- ip route."""
    layout = cluster.require_up(name)
    members = {
        member.name: member.netns for member in full.nodes(layout, cluster.recorded_shape(layout) or cluster.Shape())
    }
    if node and node not in members:
        raise ClusterError(f"no node {node}", f"one of {', '.join(members)}")
    _become([str(word) for word in inside(members.get(node, layout.netns), *context.args)], layout)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _become(argv: list[str], layout: Layout) -> None:
    os.environ["KUBECONFIG"] = str(layout.kubeconfig)
    os.execvp(argv[0], argv)  # noqa: S606 - signals and the exit code are the program's own


def main() -> None:
    app()


if __name__ == "__main__":
    main()
