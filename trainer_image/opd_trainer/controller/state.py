"""What the run knows about itself; written by the pumps, read by heartbeat, watchdog and drain server."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from opd_api.v1alpha1.status import CheckpointStatus
from opd_api.vocabulary import TrainerPhase
from opd_trainer.errors import Failure

#: Sample errors and message lengths are bounded by the progress document.
ERRORS_KEPT = 5


class StopSource(StrEnum):
    """Who asked for the stop."""

    SIGNAL = "signal"
    ANNOTATION = "annotation"
    DRAIN = "drain"


class Activity:
    """Grows while work is done: samples generated and scored, micro-batches, bytes of checkpoints and downloads."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int = 1) -> None:
        self.value += amount


@dataclass(slots=True)
class RunState:
    """Mutable state of one attempt. One event loop touches it."""

    attempt: int
    total_steps: int = 0
    step: int = 0
    phase: TrainerPhase = TrainerPhase.STARTING
    metrics: dict[str, float] = field(default_factory=dict)
    last_checkpoint: CheckpointStatus | None = None
    activity: Activity = field(default_factory=Activity)
    #: Samples that were issued and whose rollout has not ended, and who wants to know when that falls.
    rolling: int = 0
    on_room: Callable[[], None] | None = None
    sample_errors: deque[str] = field(default_factory=lambda: deque(maxlen=ERRORS_KEPT))
    #: Seconds of the last steps, for the estimate of the remaining time.
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    stop_source: StopSource | None = None
    #: Set on every change of phase; the heartbeat then reports at once.
    phase_changed: asyncio.Event = field(default_factory=asyncio.Event)
    #: Set when nothing more will be written: the drain server answers "saved".
    saved: asyncio.Event = field(default_factory=asyncio.Event)

    def request_stop(self, source: StopSource) -> None:
        """Ask for a checkpoint and the outcome Preempted; further requests change nothing."""
        if self.stop_source is None:
            self.stop_source = source
            self.stop.set()

    def set_phase(self, phase: TrainerPhase) -> None:
        """Enter a phase and let the heartbeat say so."""
        if phase is not self.phase:
            self.phase = phase
            self.phase_changed.set()

    def rollout_ended(self) -> None:
        """One sample left the engines."""
        self.rolling -= 1
        if self.on_room is not None:
            self.on_room()

    def note_error(self, failure: Failure) -> None:
        """Remember a sample's failure for the progress document."""
        text = f"{failure.failure_class}/{failure.reason}: {failure.message}"
        self.sample_errors.append(text[:1024])

    @property
    def remaining_seconds(self) -> int | None:
        """Estimate from the last steps; None before the first."""
        if not self.step_seconds:
            return None
        mean = sum(self.step_seconds) / len(self.step_seconds)
        return max(0, round(mean * (self.total_steps - self.step)))
