"""What the run knows about itself; written by the pumps, read by heartbeat, watchdog and drain server."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from opd_api.v1alpha1.status import CheckpointStatus, HeldOutReverseKl
from opd_api.vocabulary import TrainerPhase, TrainerTask
from opd_trainer.errors import Failure

#: Sample errors and message lengths are bounded by the progress document.
ERRORS_KEPT = 5
HELD_OUT = "eval_opd_reverse_kl"


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
    #: What the training waits for.
    task: TrainerTask | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    #: Held-out reverse KL in nats: before the first step, and of the newest evaluation.
    held_out_before: float | None = None
    held_out: float | None = None
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

    def note_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Remember the held-out reverse KL of the current step."""
        self.held_out = metrics.get(HELD_OUT)
        if self.step == 0:
            self.held_out_before = self.held_out

    @property
    def held_out_reverse_kl(self) -> HeldOutReverseKl | None:
        """For the result; None unless both ends of the run were evaluated."""
        if self.held_out_before is None or self.held_out is None:
            return None
        return HeldOutReverseKl(before=f"{self.held_out_before:.4g}", after=f"{self.held_out:.4g}")

    @property
    def told(self) -> dict[str, float]:
        """Numbers of the last step, and of the last evaluation: it comes first because heartbeats are bounded."""
        return {**({} if self.held_out is None else {HELD_OUT: self.held_out}), **self.metrics}

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
