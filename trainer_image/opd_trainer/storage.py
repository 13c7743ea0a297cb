"""The run directory: who may write what, and the fence between two attempts."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from opd_api.paths import weights_name
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError

_ATTEMPT = re.compile(r"^a(\d+)$")
WEIGHTS_KEPT = 2


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """`<mountPath>/<runPath>/<namespace>/<name>-<uid8>` as seen by one attempt. Methods touch the disk."""

    root: Path
    attempt: int

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def logs(self) -> Path:
        return self.root / "logs" / f"attempt-{self.attempt}"

    @property
    def report(self) -> Path:
        return self.root / "report"

    @property
    def export(self) -> Path:
        return self.root / "export"

    def create(self) -> None:
        """Make the folders and this attempt's mark in `weights`. Raises TrainerError(Config, StorageNotWritable)."""
        try:
            for folder in (self.checkpoints, self.weights / f"a{self.attempt}", self.logs, self.report):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainerError(
                FailureClass.CONFIG,
                Reason.STORAGE_NOT_WRITABLE,
                f"the run directory {self.root} cannot be written: {error}; check the claim, its access mode and runAsUser",
            ) from error

    def check_fence(self) -> None:
        """Raises TrainerError(Infrastructure, Superseded) when a higher attempt has begun."""
        highest = max((int(m[1]) for p in self.weights.glob("a*") if (m := _ATTEMPT.match(p.name))), default=0)
        if highest > self.attempt:
            raise TrainerError(
                FailureClass.INFRASTRUCTURE,
                Reason.SUPERSEDED,
                f"attempt {highest} owns {self.root}; attempt {self.attempt} stops without writing",
            )

    def weights_of(self, version: int) -> Path:
        """Final name of published weights."""
        return self.weights / weights_name(version, self.attempt)

    def prune_weights(self, in_use: Collection[int] = ()) -> None:
        """Keep the last two versions of this attempt and those in use, and nothing of earlier attempts."""
        own = self.weights / f"a{self.attempt}"
        folders = {int(p.name[1:]): p for p in own.glob("v*") if p.name[1:].isdigit()}
        for version in sorted(folders)[:-WEIGHTS_KEPT]:
            if version not in in_use:
                shutil.rmtree(folders[version])
        for folder in self.weights.glob("a*"):
            match = _ATTEMPT.match(folder.name)
            if match and int(match[1]) < self.attempt:
                shutil.rmtree(folder)

    def drop_weights(self) -> None:
        """Remove every published version; this attempt's mark stays. For a run whose export stands: nobody loads them again."""
        self.prune_weights()
        for folder in (self.weights / f"a{self.attempt}").glob("v*"):
            shutil.rmtree(folder)


def replace_directory(source: Path, target: Path) -> None:
    """Put a complete folder in the place of another one. A crash in between leaves the old one under `<name>.old`."""
    old = target.with_name(f"{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    source.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old text or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
