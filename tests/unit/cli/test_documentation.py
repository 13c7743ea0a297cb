"""docs/cli.md tells of every command, option and exit code there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from opd_cli.exits import EXIT_CODES
from opd_cli.main import app

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")


def commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def test_every_command_and_option_is_documented() -> None:
    found = dict(commands(typer.main.get_command(app), "opd"))
    assert len(found) == 6
    for name, command in found.items():
        row = re.search(rf"^\| `{name} .*$", PAGE, re.MULTILINE)
        assert row is not None, name
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name != "help":
                assert any(option in row[0] for option in parameter.opts), f"{name} {parameter.opts}"


def test_every_exit_code_is_documented() -> None:
    for code, meaning in EXIT_CODES.items():
        assert f"| {code} | {meaning} |" in PAGE
