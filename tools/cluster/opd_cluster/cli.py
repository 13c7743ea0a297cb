"""`opd-cluster`: the embedded Kubernetes from the command line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, ParamSpec

import typer

from opd_cluster import cluster
from opd_cluster.errors import ClusterError
from opd_cluster.layout import existing, open_layout
from opd_cluster.shell import say

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
Name = Annotated[str, typer.Option("--name", envvar="OPD_CLUSTER", help="Which cluster; several can run at once.")]
Parameters = ParamSpec("Parameters")


def command(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Register a subcommand; a ClusterError becomes two lines on stderr and exit code 1."""

    @functools.wraps(function)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except ClusterError as error:
            say(f"error: {error}")
            if error.hint:
                say(f"hint:  {error.hint}")
            raise typer.Exit(1) from error

    app.command()(guarded)
    return function


@command
def up(
    name: Name = "default",
    control_plane: Annotated[
        bool, typer.Option("--control-plane", help="API server, etcd and controllers only.")
    ] = False,
) -> None:
    """Start the cluster; removes first what a killed run left behind."""
    layout = cluster.control_plane_up(name)
    print(f"export KUBECONFIG={layout.kubeconfig}")


@command
def down(
    name: Name = "default",
    purge: Annotated[bool, typer.Option(help="Remove its files too: images, models, runs.")] = False,
) -> None:
    """Stop everything; no process, mount, namespace, interface or cgroup stays."""
    cluster.down(name, purge=purge)


@command
def status() -> None:
    """Every cluster of this cache: whether it answers, and what of it is on the machine."""
    for name in existing():
        layout = open_layout(name)
        running = cluster.is_up(layout)
        print(f"{name}: {'running at ' + layout.server if running else 'not running'}")
        if not running:
            for line in cluster.leftovers(layout):
                print(f"  left behind: {line} (opd-cluster down removes it)")


@command
def kubeconfig(name: Name = "default") -> None:
    """Print the path of the administrator's kubeconfig."""
    print(cluster.require_up(name).kubeconfig)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
