"""`opd report`."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape

from opd_cli.console import complain
from opd_cli.exits import Exit


def run(run_directory: Path) -> int:
    """Write the report anew from the records of the run."""
    from opd_trainer.report import ReportError, write_report

    try:
        path = write_report(run_directory)
    except (ReportError, OSError) as error:
        complain(escape(str(error)))
        return Exit.REFUSED
    print(path)
    return Exit.OK
