"""The HTML report of a run and the records it is made of."""

from __future__ import annotations

from pathlib import Path

from opd_trainer.report.reading import ReportError


def write_report(run_directory: Path) -> Path:
    """Write <run>/report/index.html; see `page.write_report`. Drawing is imported here: records are needed long before."""
    from opd_trainer.report.page import write_report as write

    return write(run_directory)


__all__ = ["ReportError", "write_report"]
