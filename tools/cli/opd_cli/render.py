"""`opd render`."""

from __future__ import annotations

import os
import sys

from rich.markup import escape

from opd_api.crd import to_yaml
from opd_api.rules import check_document, refused
from opd_api.v1alpha1 import OPDJob
from opd_cli.console import complain
from opd_cli.exits import Exit
from opd_cli.manifests import UnreadableError, jobs


def run(file: str, *, namespace: str | None) -> int:
    """Print the children of every job of a file as YAML; refused jobs have none."""
    from opd_operator.children.render import render
    from opd_operator.settings import Settings, SettingsError

    try:
        settings = Settings.from_environment(os.environ)
        manifests = jobs(file)
    except (UnreadableError, SettingsError) as error:
        complain(escape(str(error)))
        return Exit.REFUSED
    accepted: list[OPDJob] = []
    for item in manifests:
        job, findings = check_document(item.document)
        if job is None or refused(findings):
            errors = "; ".join(f"{f.path}: {f.message}" for f in findings if f.severity == "Error")
            complain(escape(f"{item.name} would be refused: {errors}"))
            return Exit.REFUSED
        if job.metadata.namespace is None and namespace is not None:
            job = job.model_copy(update={"metadata": job.metadata.model_copy(update={"namespace": namespace})})
        accepted.append(job)
    for job in accepted:
        for child in render(job, settings):
            sys.stdout.write("---\n" + to_yaml(child))
    return Exit.OK
