"""One attempt from start to final document: start parts, pump, save, export, report."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from opd_api.progress import FinalDocument, ProgressDocument
from opd_api.trainer_config import TrainerConfig
from opd_api.v1alpha1 import OnUpdate
from opd_api.v1alpha1.status import CheckpointStatus, ResultStatus
from opd_api.vocabulary import FailureClass, Outcome, Reason, TrainerPhase
from opd_trainer.controller.admission import Admission
from opd_trainer.controller.checkpointing import LEARNER_FOLDER, Checkpointer, Store
from opd_trainer.controller.evaluation import Evaluator
from opd_trainer.controller.failures import FailureBook
from opd_trainer.controller.groups import Filter, GroupRunner, Observer, Reward, SampleRunner
from opd_trainer.controller.pumps import Pumps, StepLog
from opd_trainer.controller.state import RunState, StopSource
from opd_trainer.controller.weights import Publisher, WholeSteps
from opd_trainer.errors import Failure, TrainerError
from opd_trainer.interfaces import Learner, RolloutEngine, Scorer
from opd_trainer.rollout.buffer import GroupBuffer
from opd_trainer.rollout.data import Prompt, PromptStream
from opd_trainer.rollout.staleness import StalenessGate
from opd_trainer.sample import Sample
from opd_trainer.storage import RunDirectory, replace_directory

logger = logging.getLogger(__name__)
#: Part of the grace that is left for the final document.
GRACE_RESERVE_SECONDS = 5.0
#: How long parts may take to end after the run.
SHUTDOWN_SECONDS = 60.0
#: How long a failing run may try to save what it has.
LAST_SAVE_SECONDS = 120.0
#: The report of an unsuccessful end comes after the checkpoint and before the final document, which somebody waits for
#: when the run was asked to stop.
LAST_REPORT_SECONDS = {Outcome.PREEMPTED: 3.0, Outcome.FAILED: 30.0}
CONTROLLER_FORMAT = 1
TOKENIZER_FINGERPRINT = "tokenizer"


class Log(Observer, StepLog, Protocol):
    """Metrics and diagnostics together."""


@dataclass(slots=True)
class Parts:
    """Everything the controller works with; fakes in tests, `build.build_parts` in a run."""

    engine: RolloutEngine
    scorer: Scorer
    learner: Learner
    store: Store
    stream: PromptStream
    log: Log
    total_steps: int
    reward: Reward | None = None
    keep: Filter | None = None
    decode: Callable[[Sample], str] | None = None
    evaluation_prompts: list[Prompt] = field(default_factory=list)
    #: Checkpoint to start from, with its controller state.
    resume_from: Path | None = None
    resume_state: dict[str, Any] | None = None
    #: Written into checkpoints and compared at a resume.
    fingerprints: dict[str, str] = field(default_factory=dict)
    #: Writes summary and report for (outcome or Running, message); returns the report's path.
    report: Callable[[str, str], Coroutine[Any, Any, Path | None]] | None = None


class Controller:
    """The state machine of one attempt. `run` never raises: it returns the final document."""

    def __init__(self, config: TrainerConfig, parts: Parts, directory: RunDirectory, state: RunState) -> None:
        self._config = config
        self._parts = parts
        self._directory = directory
        self.state = state
        state.total_steps = parts.total_steps
        training, rollout = config.training, config.rollout
        gate = StalenessGate(batch=training.prompts_per_step, max_staleness=rollout.max_staleness)
        self.buffer = GroupBuffer(batch=training.prompts_per_step, group_size=rollout.samples_per_prompt, gate=gate)
        self._admission = Admission()
        self._learner = WholeSteps(parts.learner, buffer=self.buffer, state=state)
        self._publisher = Publisher(
            directory,
            learner=self._learner,
            engine=parts.engine,
            admission=self._admission,
            drain=rollout.on_update is OnUpdate.DRAIN,
        )
        self._checkpointer = Checkpointer(
            parts.store,
            learner=self._learner,
            directory=directory,
            state=state,
            snapshot=self._snapshot,
            every_steps=training.checkpoint.every_steps,
            background=training.checkpoint.async_,
            on_saved=self._report_running,
        )
        self._learner_started = False
        self._reporting: asyncio.Task[Path | None] | None = None
        self._result: ResultStatus | None = None
        self.pumps: Pumps | None = None

    # -- the run -----------------------------------------------------------------------------------------------------

    async def run(self, watch: Awaitable[None] | None = None) -> FinalDocument:
        """Run to the end. `watch` is a coroutine that raises when the run stalls."""
        work = asyncio.create_task(self._work(), name="work")
        stop = asyncio.create_task(self.state.stop.wait(), name="stop request")
        watching = asyncio.ensure_future(watch) if watch is not None else None
        try:
            await asyncio.wait({work, stop, *([watching] if watching else [])}, return_when=asyncio.FIRST_COMPLETED)
            if watching is not None and watching.done():
                watching.result()
            if not work.done() and stop.done():
                await self._grace(work)
            outcome = Outcome.PREEMPTED if work.cancelled() else await work
            return await self._ended(outcome, None)
        except TrainerError as error:
            return await self._failed(work, error.failure)
        except Exception as error:
            logger.exception("the run failed with an unknown error")
            text = f"{type(error).__name__}: {error}"
            return await self._failed(work, Failure(FailureClass.INTERNAL, Reason.INTERNAL_ERROR, text))
        finally:
            for task in (work, stop, *([watching] if watching else [])):
                task.cancel()
            await asyncio.gather(work, stop, *([watching] if watching else []), return_exceptions=True)
            await self._shutdown()

    async def _grace(self, work: asyncio.Task[Outcome]) -> None:
        """A stop was asked for: give the run its grace, then cut it off."""
        logger.info("stop requested by %s", self.state.stop_source)
        if self.state.phase is TrainerPhase.STARTING:
            work.cancel()  # nothing new could be saved
        else:
            if self.state.phase is TrainerPhase.TRAINING:
                self.state.set_phase(TrainerPhase.STOPPING)
            grace = max(1.0, self._config.lifecycle.preemption_grace_seconds - GRACE_RESERVE_SECONDS)
            await asyncio.wait({work}, timeout=grace)
            if not work.done():
                logger.warning("not saved within preemptionGraceSeconds; the last checkpoint stands")
                work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    async def _work(self) -> Outcome:
        await self._start()
        try:
            await self._pump()
            await self._checkpointer.save_now()
        except TrainerError as error:
            await self._save_what_there_is(error.failure)
            raise
        if self.state.step < self.state.total_steps:
            return Outcome.PREEMPTED
        await self._finish()
        return Outcome.SUCCEEDED

    async def _start(self) -> None:
        await asyncio.to_thread(self._directory.create)
        await asyncio.to_thread(self._directory.check_fence)
        self._resume()
        checkpoint = self._parts.resume_from
        await asyncio.gather(
            asyncio.to_thread(self._parts.engine.prepare),
            self._parts.scorer.start(),
            self._learner.start(checkpoint / LEARNER_FOLDER if checkpoint else None),
        )
        self._learner_started = True
        await self._publisher.start_engines(self.state.step)

    def _resume(self) -> None:
        saved = self._parts.resume_state
        if saved is None or self._parts.resume_from is None:
            return
        self.state.step = int(saved["step"])
        self.state.last_checkpoint = CheckpointStatus(step=self.state.step, path=str(self._parts.resume_from))
        self.state.held_out_before = saved.get("held_out_before")
        self._parts.stream.load_state_dict(saved["stream"])
        self.buffer.load_state_dict(saved["buffer"])
        self.buffer.gate.reseed(self.state.step)
        self._compare_fingerprints(saved["fingerprints"])
        logger.info("resumed from %s at step %d", self._parts.resume_from, self.state.step)

    def _compare_fingerprints(self, saved: dict[str, str]) -> None:
        for name, value in self._parts.fingerprints.items():
            before = saved.get(name)
            if before == value:
                continue
            if name == TOKENIZER_FINGERPRINT:
                raise TrainerError(
                    FailureClass.CONFIG,
                    Reason.TOKENIZER_MISMATCH,
                    f"the checkpoint was made with another tokenizer ({before}, now {value}); "
                    "set training.checkpoint.resume: never, or give the old tokenizer back",
                )
            logger.warning("the %s differs from the checkpoint's (%s, now %s)", name, before, value)

    async def _pump(self) -> None:
        runner = SampleRunner(
            self._config,
            engine=self._parts.engine,
            scorer=self._parts.scorer,
            reward=self._parts.reward,
            decode=self._parts.decode,
            admission=self._admission,
            state=self.state,
            observer=self._parts.log,
        )
        batch_samples = self.buffer.batch * self.buffer.group_size
        groups = GroupRunner(
            runner,
            buffer=self.buffer,
            keep=self._parts.keep,
            failures=FailureBook(
                max_fraction=self._config.data.max_failed_fraction,
                batch_samples=batch_samples,
            ),
            admission=self._admission,
            state=self.state,
            observer=self._parts.log,
        )
        self.pumps = Pumps(
            stream=self._parts.stream,
            buffer=self.buffer,
            groups=groups,
            engine=self._parts.engine,
            learner=self._learner,
            publisher=self._publisher,
            checkpointer=self._checkpointer,
            evaluator=self._evaluator(runner),
            admission=self._admission,
            state=self.state,
            log=self._parts.log,
        )
        if not self.state.stop.is_set():
            self.state.set_phase(TrainerPhase.TRAINING)
            await self.pumps.run()

    def _evaluator(self, runner: SampleRunner) -> Evaluator | None:
        evaluation = self._config.training.evaluation
        if evaluation is None:
            return None
        return Evaluator(
            runner,
            self._parts.evaluation_prompts,
            every_steps=evaluation.every_steps,
            concurrency=self._parts.engine.concurrency,
            state=self.state,
        )

    async def _finish(self) -> None:
        """Export and report. Teachers and engines are not needed any more."""
        self.state.set_phase(TrainerPhase.EXPORTING)
        await self._parts.scorer.stop()
        await self._parts.engine.stop()
        target = self._directory.export
        temporary = target.with_name(f"export.a{self._directory.attempt}.tmp")
        await asyncio.to_thread(shutil.rmtree, temporary, True)
        await self._learner.export(temporary)
        await asyncio.to_thread(self._directory.check_fence)
        await asyncio.to_thread(replace_directory, temporary, target)
        await asyncio.to_thread(self._directory.drop_weights)
        report = await self._report(Outcome.SUCCEEDED, self._story(Outcome.SUCCEEDED))
        checkpoint = self.state.last_checkpoint
        self._result = ResultStatus(
            checkpoint=checkpoint.path if checkpoint else None,
            exported_model=str(target),
            report=str(report) if report else None,
            held_out_reverse_kl=self.state.held_out_reverse_kl,
        )

    async def _report(self, outcome: str, message: str) -> Path | None:
        if self._parts.report is None:
            return None
        if self._reporting is not None:  # two at a time would write the same files
            await asyncio.wait({self._reporting})
        return await self._parts.report(outcome, message)

    def _report_running(self) -> None:
        """After a checkpoint, beside the training: drawing takes seconds. Every ending writes its own report."""
        busy = self._reporting is not None and not self._reporting.done()
        if self._parts.report is not None and self.state.phase is TrainerPhase.TRAINING and not busy:
            self._reporting = asyncio.create_task(self._parts.report("Running", ""), name="report")

    # -- endings -----------------------------------------------------------------------------------------------------

    async def _save_what_there_is(self, failure: Failure) -> None:
        """A failing run saves its steps when its learner still can: the next attempt loses less."""
        if failure.reason in (Reason.SUPERSEDED, Reason.LEARNER_FAILED):
            return
        try:
            async with asyncio.timeout(LAST_SAVE_SECONDS):
                await self._learner.book_what_was_cut_off()
                await self._checkpointer.save_now()
        except (TrainerError, OSError, TimeoutError) as error:
            logger.warning("could not save after the failure: %s", str(error) or type(error).__name__)

    async def _failed(self, work: asyncio.Task[Outcome], failure: Failure) -> FinalDocument:
        if not work.done():  # the watchdog: the run itself hangs
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            if self._learner_started:
                await self._save_what_there_is(failure)
        logger.error("failed: %s/%s: %s", failure.failure_class, failure.reason, failure.message)
        return await self._ended(Outcome.FAILED, failure)

    async def _ended(self, outcome: Outcome, failure: Failure | None) -> FinalDocument:
        final = self._document(outcome, failure)
        if outcome is not Outcome.SUCCEEDED and final.reason != Reason.SUPERSEDED:
            try:
                await asyncio.wait_for(self._report(outcome, final.message), LAST_REPORT_SECONDS[outcome])
            except TimeoutError:
                logger.warning("the report was not written in time")
        return final

    def _document(self, outcome: Outcome, failure: Failure | None) -> FinalDocument:
        reason = failure.reason if failure else Reason.PREEMPTED if outcome is Outcome.PREEMPTED else Reason.SUCCEEDED
        message = failure.message if failure else self._story(outcome)
        return FinalDocument(
            attempt=self.state.attempt,
            outcome=outcome,
            failure_class=failure.failure_class if failure else None,
            reason=reason,
            message=message[:1024],
            teacher=failure.teacher if failure else None,
            step=self.state.step,
            checkpoint=self.state.last_checkpoint,
            result=self._result if outcome is Outcome.SUCCEEDED else None,
        )

    def _story(self, outcome: Outcome) -> str:
        checkpoint = self.state.last_checkpoint
        saved = f"checkpoint of step {checkpoint.step}" if checkpoint else "no checkpoint"
        if outcome is Outcome.PREEMPTED:
            return f"stopped at step {self.state.step}/{self.state.total_steps} ({self.state.stop_source}), {saved}"
        return f"{self.state.step} steps, {saved}"

    async def _shutdown(self) -> None:
        stops = (self._parts.scorer.stop, self._parts.engine.stop, self._learner.stop)
        results = await asyncio.gather(
            *(asyncio.wait_for(stop(), SHUTDOWN_SECONDS) for stop in stops), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                logger.warning("a part did not end cleanly: %r", result)

    # -- documents ---------------------------------------------------------------------------------------------------

    def progress(self, sequence: int) -> ProgressDocument:
        """The heartbeat's document."""
        state = self.state
        unavailable = self._parts.scorer.unavailable if state.phase is TrainerPhase.TRAINING else None
        metrics = {name[:256]: value for name, value in list(state.told.items())[:32] if math.isfinite(value)}
        return ProgressDocument(
            attempt=state.attempt,
            sequence=sequence,
            phase=TrainerPhase.TEACHER_UNAVAILABLE if unavailable else state.phase,
            task=state.task if state.phase is TrainerPhase.TRAINING else None,
            step=state.step,
            total_steps=state.total_steps,
            activity=state.activity.value,
            metrics=metrics,
            last_checkpoint=state.last_checkpoint,
            weight_version=self._admission.version,
            estimated_remaining_seconds=state.remaining_seconds,
            unavailable_teacher=unavailable,
            sample_errors=list(state.sample_errors),
        )

    def _snapshot(self) -> dict[str, Any]:
        """Controller state of the current step; no await in here, so it is one consistent cut."""
        return {
            "format": CONTROLLER_FORMAT,
            "step": self.state.step,
            "version": self.state.step,
            "attempt": self.state.attempt,
            "held_out_before": self.state.held_out_before,
            "stream": self._parts.stream.state_dict(self.buffer.outstanding_tickets()),
            "buffer": self.buffer.state_dict(),
            "gate": {"accepted": self.buffer.gate.accepted},
            "fingerprints": self._parts.fingerprints,
        }

    def request_stop(self, source: StopSource) -> None:
        """Checkpoint and end; safe to call from the loop at any time."""
        self.state.request_stop(source)
