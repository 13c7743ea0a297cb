"""Checkpoints on the claim: complete or invisible, valid or skipped loudly, and never written by a superseded attempt.

checkpoints/step-40.a2/          learner/ (DCP shards)  controller.json  manifest.json (sizes and sha256 of the rest)
checkpoints/step-60.a2.tmp/      being written; a crash leaves it, the next attempt removes it
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd_api.paths import checkpoint_name
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
CONTROLLER = "controller.json"
_NAME = re.compile(r"^step-(\d+)\.a(\d+)$")
_MARK = re.compile(r"^(?:step-\d+\.)?a(\d+)(?:\.tmp)?$")
_HASH_THREADS = 4
_HASH_BLOCK = 1 << 22


class BrokenCheckpointError(Exception):
    """A folder that is not a complete checkpoint; the message says why."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A valid checkpoint."""

    path: Path
    step: int
    attempt: int
    controller_state: dict[str, Any]


class CheckpointStore:
    """The checkpoints of a run as seen by one attempt. Methods touch the disk and block."""

    def __init__(self, root: Path, attempt: int, *, keep_last: int = 2, keep_every_steps: int | None = None) -> None:
        """`root` is the run directory."""
        self._root = root
        self._folder = root / "checkpoints"
        self._attempt = attempt
        self._keep_last = keep_last
        self._keep_every = keep_every_steps

    def check_fence(self) -> None:
        """Raises TrainerError(Infrastructure, Superseded) when a higher attempt has left a mark in the run directory."""
        marks = [*self._folder.glob("step-*"), *(self._root / "weights").glob("a*")]
        highest = max((int(found[1]) for mark in marks if (found := _MARK.match(mark.name))), default=0)
        if highest > self._attempt:
            raise TrainerError(
                FailureClass.INFRASTRUCTURE,
                Reason.SUPERSEDED,
                f"attempt {highest} owns {self._root}; attempt {self._attempt} stops without writing",
            )

    def begin(self, step: int) -> Path:
        """An empty folder for the checkpoint of `step`; it counts only after `commit`."""
        self.check_fence()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for leftover in self._folder.glob("*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
            path = self._folder / f"{checkpoint_name(step, self._attempt)}.tmp"
            path.mkdir()
        except OSError as error:
            raise _storage_error(self._folder, error) from error
        return path

    def commit(self, path: Path, controller_state: dict[str, Any]) -> Path:
        """Controller state, fsync, manifest, rename, prune; returns the final folder.

        Raises TrainerError: Superseded, or the storage refuses.
        """
        final = path.with_name(path.name.removesuffix(".tmp"))
        try:
            (path / CONTROLLER).write_text(json.dumps(controller_state), encoding="utf-8")
            _write_manifest(path)
            self.check_fence()
            if final.exists():
                shutil.rmtree(final)
            path.rename(final)
            _fsync(final.parent)
        except OSError as error:
            raise _storage_error(final, error) from error
        self._prune()
        return final

    def latest(self) -> StoredCheckpoint | None:
        """The valid checkpoint of the highest attempt, then step. Broken ones are skipped with a warning."""
        for path in self._ordered():
            try:
                return read_checkpoint(path)
            except BrokenCheckpointError as broken:
                logger.warning("checkpoint %s is skipped: %s", path, broken)
        return None

    def resume(self, setting: str) -> StoredCheckpoint | None:
        """`training.checkpoint.resume`: auto, never, or a path to start from.

        A path is used while the run has no checkpoint of its own, so that a retry goes on instead of starting again.
        Raises TrainerError(Config) when the path is no checkpoint.
        """
        if setting == "never":
            return None
        found = self.latest()
        if setting == "auto" or found is not None:
            return found
        try:
            return read_checkpoint(Path(setting))
        except BrokenCheckpointError as broken:
            raise TrainerError(
                FailureClass.CONFIG,
                Reason.CONFIG_ERROR,
                f"training.checkpoint.resume: {setting} is not a usable checkpoint: {broken}",
            ) from broken

    def _ordered(self) -> list[Path]:
        """Committed folders, newest first."""
        return sorted((p for p in self._folder.glob("step-*") if _NAME.match(p.name)), key=_parse, reverse=True)

    def _prune(self) -> None:
        for path in self._ordered()[self._keep_last :]:
            step = _parse(path)[1]
            if self._keep_every is None or step % self._keep_every:
                shutil.rmtree(path, ignore_errors=True)


def read_checkpoint(path: Path) -> StoredCheckpoint:
    """Verify every size and hash of the manifest. Raises BrokenCheckpointError."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = manifest["files"]
        for name, facts in files.items():
            size = (path / name).stat().st_size
            if size != facts["size"]:
                raise BrokenCheckpointError(f"{name} has {size} bytes instead of {facts['size']}")
        with ThreadPoolExecutor(_HASH_THREADS) as pool:
            for name, digest in zip(files, pool.map(lambda name: _sha256(path / name), files), strict=True):
                if digest != files[name]["sha256"]:
                    raise BrokenCheckpointError(f"{name} has another sha256 than the manifest says")
        state = json.loads((path / CONTROLLER).read_text(encoding="utf-8"))
        return StoredCheckpoint(path, int(manifest["step"]), int(manifest["attempt"]), state)
    except FileNotFoundError as error:
        raise BrokenCheckpointError(f"{Path(error.filename).name} is missing") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BrokenCheckpointError(f"{type(error).__name__}: {error}") from error


def check_step(learner: Path, steps: int | None) -> None:
    """Compare the step of a checkpoint with the `steps` that the shards in its `learner` folder have behind them.

    None: the shards were written before they counted. Raises TrainerError(Config): training on would repeat or leave out steps.
    """
    checkpoint = learner.parent
    step = int(json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["step"])
    if steps is not None and steps != step:
        raise TrainerError(
            FailureClass.CONFIG,
            Reason.CONFIG_ERROR,
            f"{checkpoint} is the checkpoint of step {step}, but its weights have {steps} steps behind them; remove the folder,"
            " and the run goes on from the checkpoint before it, or write training.checkpoint.resume: never",
        )


def _write_manifest(path: Path) -> None:
    names = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    for folder in (path, *(folder for folder in path.rglob("*") if folder.is_dir())):
        _fsync(folder)
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        digests = list(pool.map(lambda name: _sha256(path / name, sync=True), names))
    attempt, step = _parse(path.with_name(path.name.removesuffix(".tmp")))
    files = {
        name: {"size": (path / name).stat().st_size, "sha256": digest}
        for name, digest in zip(names, digests, strict=True)
    }
    manifest = path / MANIFEST
    manifest.write_text(json.dumps({"step": step, "attempt": attempt, "files": files}, indent=1), encoding="utf-8")
    _fsync(manifest)
    _fsync(path)


def _parse(path: Path) -> tuple[int, int]:
    """(attempt, step) of a folder name."""
    found = _NAME.match(path.name)
    if found is None:
        raise ValueError(f"{path.name} is not the name of a checkpoint")
    return int(found[2]), int(found[1])


def _sha256(path: Path, *, sync: bool = False) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
        if sync:
            os.fsync(file.fileno())
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _storage_error(path: Path, error: OSError) -> TrainerError:
    full = error.errno in {28, 122}  # ENOSPC, EDQUOT
    return TrainerError(
        FailureClass.CONFIG,
        Reason.STORAGE_FULL if full else Reason.STORAGE_NOT_WRITABLE,
        f"{path} cannot be written: {error}; "
        + ("enlarge the claim or keep fewer checkpoints" if full else "check the claim"),
    )
