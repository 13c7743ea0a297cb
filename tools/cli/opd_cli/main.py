"""The commands. Each imports what it needs when it runs, so that `opd validate` works without torch and `opd run` without kopf."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opd_cli.exits import EXIT_CODES, Exit

app = typer.Typer(
    name="opd",
    help="On-policy distillation on Kubernetes: write an OPDJob, check it, see what it makes, run it.",
    epilog="Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
data_app = typer.Typer(help="Prompts files.", no_args_is_help=True)
app.add_typer(data_app, name="data")

Files = Annotated[list[str], typer.Argument(help="Manifests; - reads standard input.", metavar="FILE...")]


@app.command()
def validate(
    files: Files,
    local: Annotated[bool, typer.Option("--local", help="As for `opd run`: no claim is needed.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON list of findings.")] = False,
) -> None:
    """Check OPDJobs against the schema and every rule, without a cluster. Exit code 1 when one would be refused."""
    from opd_cli.validate import run

    raise typer.Exit(run(files, local=local, as_json=json_output))


@app.command()
def explain(
    field: Annotated[
        str, typer.Argument(help="A field (distillation.tail), the code of a rule, or a word of the status.")
    ],
) -> None:
    """Say what a field means and takes, what a rule wants, or what a reason in the status stands for."""
    from opd_cli.explain import run

    raise typer.Exit(run(field))


@app.command()
def render(
    file: Annotated[str, typer.Argument(help="Manifest; - reads standard input.")],
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Namespace of jobs that name none.")
    ] = None,
) -> None:
    """Print the objects that the operator would make for the first attempt. OPD_OPERATOR_* variables stand for its settings."""
    from opd_cli.render import run

    raise typer.Exit(run(file, namespace=namespace))


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="OPDJob manifest.")],
    data: Annotated[Path, typer.Option(help="Folder that stands for the claim.")] = Path("opd-data"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew instead of resuming.")] = False,
) -> None:
    """Run a job on this machine, without Kubernetes. Ctrl-C saves and stops; the same command resumes."""
    from opd_cli.environment import needs

    needs("torch", "opd run")
    from opd_trainer.local import run_local

    raise typer.Exit(run_local(str(file), data=str(data), fresh=fresh))


@app.command()
def report(
    run_directory: Annotated[Path, typer.Argument(help="Run directory: <mountPath>/opd/<namespace>/<name>-<uid>.")],
) -> None:
    """Write the HTML report of a run, finished or not, and print its path."""
    from opd_cli.environment import needs

    needs("matplotlib", "opd report")
    from opd_cli.report import run as write

    raise typer.Exit(write(run_directory))


@data_app.command()
def proxy(
    output: Annotated[str, typer.Option("--output", "-o", help="File to write; - is standard output.")] = "-",
    seed: Annotated[int, typer.Option(help="The same seed gives the same file.")] = 0,
    count: Annotated[int, typer.Option(help="Number of prompts.", min=1, max=1_000_000)] = 256,
) -> None:
    """Write a deterministic file of prompts with checkable answers, to try a job before the real data is there."""
    from opd_cli.data import run

    raise typer.Exit(run(output, seed=seed, count=count))


def main() -> None:
    """Entry point for `python -m opd_cli.main`."""
    app()


__all__ = ["Exit", "app", "main"]

if __name__ == "__main__":
    main()
