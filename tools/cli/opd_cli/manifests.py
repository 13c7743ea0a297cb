"""YAML files -> documents."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd_api import GROUP, KIND
from opd_api.yaml_documents import YamlError, read_documents


class UnreadableError(Exception):
    """A file that is missing or no YAML; the message says where."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One document of a file."""

    file: str
    document: Any

    @property
    def name(self) -> str:
        """metadata.name, where there is one."""
        metadata = self.document.get("metadata") if isinstance(self.document, dict) else None
        name = metadata.get("name") if isinstance(metadata, dict) else None
        return str(name or "?")

    @property
    def is_job(self) -> bool:
        """Whether it is meant as an OPDJob; a file may also hold claims and Secrets."""
        if not isinstance(self.document, dict):
            return True
        version, kind = str(self.document.get("apiVersion", "")), str(self.document.get("kind", ""))
        return version.startswith(GROUP) or kind.lower() == KIND.lower() or not (version and kind)


def read(file: str) -> list[Manifest]:
    """All documents of a file that are not empty. Raises UnreadableError."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        return [Manifest(file, document) for document in read_documents(text)]
    except YamlError as error:
        raise UnreadableError(f"{file} is no YAML that kubectl would take: {error}") from error


def jobs(file: str) -> list[Manifest]:
    """The OPDJobs of a file. Raises UnreadableError when there is none."""
    found = [manifest for manifest in read(file) if manifest.is_job]
    if not found:
        raise UnreadableError(f"{file} holds no OPDJob (apiVersion: opd.dev/v1alpha1, kind: OPDJob)")
    return found
