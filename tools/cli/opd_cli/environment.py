"""What is installed here: the operator's and the trainer's environment are two."""

from __future__ import annotations

from importlib.util import find_spec

import typer

from opd_cli.console import complain
from opd_cli.exits import Exit


def needs(module: str, command: str) -> None:
    """End with a hint when `module` is not installed."""
    if find_spec(module) is None:
        complain(
            f"{command} needs the trainer's environment, which has {module}. In a checkout: make env-trainer, then "
            f".venv-trainer/bin/{command}. Elsewhere: install the opd wheel with its extra 'trainer'."
        )
        raise typer.Exit(Exit.USAGE)
