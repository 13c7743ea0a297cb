"""The frame of the report: who ran what with which versions, and how it stands."""

from __future__ import annotations

import asyncio
import json
import logging
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from opd_api.trainer_config import TrainerConfig
from opd_api.vocabulary import Reason
from opd_trainer.controller.state import RunState
from opd_trainer.report.records import SUMMARY_FILE, FailureRecord, RunSummary
from opd_trainer.runlog import RunLog
from opd_trainer.storage import RunDirectory, write_atomically

logger = logging.getLogger(__name__)
PACKAGES = ("opd", "torch", "transformers", "ray", "sglang", "datasets", "peft")
FAILURES_KEPT = 50
#: Outcome in the summary before there is one.
RUNNING = "Running"


def versions(device: str) -> dict[str, str]:
    """Package or program -> version; what is not installed is left out."""
    found = {"python": platform.python_version(), "device": device}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


class RunReporter:
    """Writes summary.json and the HTML report. A report that cannot be written never ends a run."""

    def __init__(
        self,
        config: TrainerConfig,
        directory: RunDirectory,
        state: RunState,
        log: RunLog,
        *,
        render: Callable[[Path], Path] | None,
    ) -> None:
        self._config = config
        self._directory = directory
        self._state = state
        self._log = log
        self._render = render
        self._path = directory.root / "logs" / SUMMARY_FILE
        self._before = self._earlier()
        self._started = self._before.started if self._before is not None else time.time()

    def _earlier(self) -> RunSummary | None:
        """The summary of the attempts before, for its failures and the start of the run."""
        try:
            return RunSummary.from_document(json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s cannot be read and is written anew: %s", self._path, error)
            return None

    async def __call__(self, outcome: str, message: str) -> Path | None:
        """Returns the report's path, None when there is none."""
        summary = self._summary(outcome, message)
        try:
            return await asyncio.to_thread(self._write, summary)
        except Exception:
            logger.exception("the report could not be written")
            return None

    def _write(self, summary: RunSummary) -> Path | None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, summary.to_json())
        return self._render(self._directory.root) if self._render is not None else None

    def _summary(self, outcome: str, message: str) -> RunSummary:
        state, run = self._state, self._config.run
        earlier = [f for f in self._before.failures if f.attempt != run.attempt] if self._before is not None else []
        if self._before is not None and self._before.attempt != run.attempt:
            earlier += _attempt_failure(self._before)
        checkpoint = state.last_checkpoint
        summary = RunSummary(
            name=run.name,
            namespace=run.namespace,
            attempt=run.attempt,
            started=self._started,
            updated=time.time(),
            step=state.step,
            total_steps=state.total_steps,
            outcome=outcome,
            message=message,
            checkpoint=checkpoint.path if checkpoint else None,
            exported_model=str(self._directory.export) if self._directory.export.exists() else None,
            configuration=self._config.model_dump(mode="json", by_alias=True),
            versions=versions(self._config.device.value),
            sample_states={name.value: count for name, count in self._log.states.items()},
        )
        return replace(summary, failures=[*earlier, *self._log.failures()][-FAILURES_KEPT:])


def _attempt_failure(summary: RunSummary) -> list[FailureRecord]:
    """How the attempt before ended, unless it was asked to stop. One that is still running was killed."""
    reasons = {"Failed": Reason.ATTEMPT_FAILED, RUNNING: Reason.NO_FINAL_DOCUMENT}
    if summary.outcome not in reasons:
        return []
    reason = reasons[summary.outcome]
    return [
        FailureRecord(
            time=summary.updated,
            attempt=summary.attempt,
            step=summary.step,
            failure_class="Attempt",
            reason=reason.value,
            message=summary.message or reason.explanation,
        )
    ]
