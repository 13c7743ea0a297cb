"""Text for people on standard error and output; colours only where a terminal shows them."""

from __future__ import annotations

from rich.console import Console


def output() -> Console:
    """Standard output; lines do not wrap, so that they can be searched."""
    return Console(highlight=False, soft_wrap=True)


def complain(message: str) -> None:
    """One line on standard error."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[red]error:[/red] {message}")
