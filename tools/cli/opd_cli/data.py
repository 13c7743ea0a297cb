"""`opd data`."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.markup import escape

from opd_cli.console import complain
from opd_cli.exits import Exit


def run(output: str, *, seed: int, count: int) -> int:
    """Write the prompts as JSON lines."""
    from opd_trainer.rollout.proxy import proxy_lines

    text = "".join(line + "\n" for line in proxy_lines(seed=seed, count=count))
    if output == "-":
        sys.stdout.write(text)
        return Exit.OK
    try:
        path = Path(output)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        complain(escape(f"{output} cannot be written: {error.strerror}"))
        return Exit.REFUSED
    print(f"{count} prompts in {output}")
    return Exit.OK
