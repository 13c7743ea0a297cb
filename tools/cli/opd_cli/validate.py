"""`opd validate`."""

from __future__ import annotations

import json

from rich.markup import escape

from opd_api.rules import Finding, check_document
from opd_api.vocabulary import Severity
from opd_cli.console import complain, output
from opd_cli.exits import Exit
from opd_cli.manifests import Manifest, UnreadableError, jobs

COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOT_CHECKED: "cyan"}


def run(files: list[str], *, local: bool, as_json: bool) -> int:
    """Print the findings of every job of every file; 1 when one is an error."""
    checked: list[tuple[Manifest, list[Finding]]] = []
    unreadable = False
    for file in files:
        try:
            checked += [(item, check_document(item.document, local=local)[1]) for item in jobs(file)]
        except UnreadableError as error:
            complain(escape(str(error)))
            unreadable = True
    if as_json:
        print(json.dumps([_entry(item, found) for item, findings in checked for found in findings], indent=2))
    else:
        for item, findings in checked:
            _print(item, findings)
    errors = any(finding.severity is Severity.ERROR for _, findings in checked for finding in findings)
    return Exit.REFUSED if errors or unreadable else Exit.OK


def _entry(item: Manifest, finding: Finding) -> dict[str, str]:
    return {
        "file": item.file,
        "job": item.name,
        "code": finding.code,
        "severity": finding.severity.value,
        "path": finding.path,
        "message": finding.message,
    }


def _print(item: Manifest, findings: list[Finding]) -> None:
    console = output()
    errors = sum(finding.severity is Severity.ERROR for finding in findings)
    verdict = "[red]refused[/red]" if errors else "[green]accepted[/green]"
    others = len(findings) - errors
    counts = [f"{n} {word}{'' if n == 1 else 's'}" for n, word in ((errors, "error"), (others, "warning")) if n]
    console.print(
        f"[bold]{escape(item.file)}[/bold] {escape(item.name)}: {verdict}" + "".join(f", {c}" for c in counts)
    )
    for finding in findings:
        colour = COLOURS[finding.severity]
        console.print(
            f"  [{colour}]{finding.severity}[/{colour}] [bold]{escape(finding.path or '.')}[/bold] {finding.code}"
        )
        console.print(f"      {escape(finding.message)}")
