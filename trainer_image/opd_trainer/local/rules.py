"""The same rules as in the operator and in `opd validate`."""

from __future__ import annotations

from pathlib import Path

from opd_api.rules import check_document, refused
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError
from opd_trainer.local.plan import load_manifest
from opd_trainer.local.view import View


def check_rules(file: Path, view: View) -> None:
    """Print what the rules say of the manifest. Raises TrainerError(Config, InvalidSpec) when one refuses it."""
    _, findings = check_document(load_manifest(file), local=True)
    for finding in findings:
        view.say(f"{finding.severity} {finding.code} {finding.path}: {finding.message}")
    if refused(findings):
        raise TrainerError(
            FailureClass.CONFIG, Reason.INVALID_SPEC, f"{file} breaks the rules above; nothing was started"
        )
