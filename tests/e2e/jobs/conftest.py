"""Tiny models on the claim, and a way to apply OPDJobs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opd_jobs import ROOT, TRAINER_PYTHON, Watcher


@pytest.fixture(scope="session")
def tiny_files(running_cluster: Any) -> Path:
    """Tiny models and prompts on the claim."""
    folder = Path(running_cluster.data) / "tiny"
    if not (folder / "prompts.jsonl").exists():
        subprocess.run([TRAINER_PYTHON, ROOT / "tests/support/tiny_job_files.py", folder], check=True, timeout=300)
    return folder


@pytest.fixture
def submit(operator: Any, namespace: str, tiny_files: Path) -> Callable[[dict[str, Any]], Watcher]:
    """Apply an OPDJob in the test's namespace."""

    def apply(manifest: dict[str, Any]) -> Watcher:
        operator.apply(namespace, manifest)
        return Watcher(operator, namespace, manifest["metadata"]["name"])

    return apply
