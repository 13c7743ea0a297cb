"""`opd-trainer run`: the process around the controller. Heartbeats start first, the final document is written last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from opd_api.progress import HEARTBEAT_SECONDS, FinalDocument, ProgressDocument
from opd_api.trainer_config import TrainerConfig
from opd_api.vocabulary import EXIT_CODE_OF_CLASS, ExitCode, FailureClass, Outcome, Port, Reason, TrainerPhase
from opd_trainer.build import build_parts
from opd_trainer.controller import Controller
from opd_trainer.controller.state import RunState, StopSource
from opd_trainer.drain import DrainServer
from opd_trainer.errors import Failure, TrainerError
from opd_trainer.logs import TRAINER_LOG, Tee, configure_logging
from opd_trainer.metrics import PrometheusMetrics
from opd_trainer.progress import ConfigMapSink, FileSink, Heartbeat, Sink
from opd_trainer.ray_runtime import in_cluster, stop_ray
from opd_trainer.storage import RunDirectory
from opd_trainer.watchdog import StallWatchdog

logger = logging.getLogger(__name__)
#: A file costs nothing, and a person looks at the terminal.
LOCAL_HEARTBEAT_SECONDS = 1.0


def load_config(path: str) -> TrainerConfig:
    """Raises TrainerError(Config) when the file is missing or does not fit."""
    try:
        return TrainerConfig.model_validate_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise TrainerError(FailureClass.CONFIG, Reason.CONFIG_ERROR, f"{path}: {error}") from error


def exit_code_of(final: FinalDocument) -> int:
    """The exit code that says the same as the document."""
    if final.outcome is Outcome.SUCCEEDED:
        return ExitCode.OK
    if final.outcome is Outcome.PREEMPTED or final.failure_class is None:
        return ExitCode.INFRASTRUCTURE
    return EXIT_CODE_OF_CLASS.get(final.failure_class, ExitCode.INTERNAL)


def run_command(config_path: str, *, metrics_port: int | None = None, drain_port: int | None = None) -> int:
    """Returns the exit code; see vocabulary.ExitCode."""
    configure_logging()
    try:
        config = load_config(config_path)
    except TrainerError as error:
        logger.error("%s", error)
        return ExitCode.CONFIG
    directory = RunDirectory(Path(config.run.directory), config.run.attempt)
    tee: Tee | None = None
    with contextlib.suppress(OSError):  # an unwritable claim is reported by the run itself, in a document
        tee = Tee(directory.logs / TRAINER_LOG)
    cluster = in_cluster(config)
    process = Process(
        config,
        directory,
        metrics_port=metrics_port if metrics_port is not None else (Port.METRICS if cluster else 0),
        drain_port=drain_port if drain_port is not None else (Port.DRAIN if cluster else 0),
    )
    # asyncio.run would wait for executor threads at the end, also for one that hangs in a library.
    final = asyncio.new_event_loop().run_until_complete(process.main())
    code = exit_code_of(final)
    logger.info("%s at step %d: %s (exit code %d)", final.outcome, final.step, final.message, code)
    if tee is not None:
        tee.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is saved and said; a thread of a library that hangs must not hold the process (and its accelerators).
    os._exit(code)


class Process:
    """Sink, heartbeat, servers, signals and the controller of one attempt."""

    def __init__(self, config: TrainerConfig, directory: RunDirectory, *, metrics_port: int, drain_port: int) -> None:
        self._config = config
        self._directory = directory
        self._metrics_port = metrics_port
        self._drain_port = drain_port
        self._prometheus = PrometheusMetrics()
        self._controller: Controller | None = None
        self._closers: list[Callable[[], None]] = []

    async def main(self) -> FinalDocument:
        """Run to the end; the final document is written when this returns."""
        state = RunState(self._config.run.attempt)
        self._listen(state)
        sink = self._sink()
        seconds = HEARTBEAT_SECONDS if isinstance(sink, ConfigMapSink) else LOCAL_HEARTBEAT_SECONDS
        heartbeat = Heartbeat(sink, state, lambda sequence: self._progress(state, sequence), seconds=seconds)
        drain = await self._start_servers(state)
        beating = asyncio.create_task(heartbeat.run(), name="heartbeat")
        try:
            final = await self._run(state)
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
        state.set_phase(TrainerPhase.FINISHED)
        if not await heartbeat.finish(final):
            logger.error("the final document could not be written; the exit code has to do")
        state.saved.set()
        await asyncio.to_thread(stop_ray)
        if drain is not None:
            await drain.close()
        for close in self._closers:
            close()
        await sink.close()
        return final

    @staticmethod
    def _listen(state: RunState) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, state.request_stop, StopSource.SIGNAL)

    def _sink(self) -> Sink:
        run = self._config.run
        if run.progress_config_map is not None:
            return ConfigMapSink.in_cluster(run.namespace, run.progress_config_map)
        self._directory.root.mkdir(parents=True, exist_ok=True)
        return FileSink(self._directory.root)

    async def _start_servers(self, state: RunState) -> DrainServer | None:
        if self._metrics_port:
            try:
                self._closers.append(self._prometheus.serve(self._metrics_port))
            except OSError as error:
                logger.warning("no metrics: port %d cannot be opened: %s", self._metrics_port, error)
        if not self._drain_port:
            return None
        drain = DrainServer(state, grace_seconds=self._config.lifecycle.preemption_grace_seconds, port=self._drain_port)
        try:
            await drain.start()
        except OSError as error:
            logger.warning("no drain server: port %d cannot be opened: %s", self._drain_port, error)
            return None
        return drain

    def _progress(self, state: RunState, sequence: int) -> ProgressDocument:
        if self._controller is not None:
            return self._controller.progress(sequence)
        return ProgressDocument(attempt=state.attempt, sequence=sequence, phase=state.phase)

    async def _run(self, state: RunState) -> FinalDocument:
        build = asyncio.create_task(build_parts(self._config, self._directory, state, self._prometheus), name="build")
        stop = asyncio.create_task(state.stop.wait(), name="stop request")
        await asyncio.wait({build, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not build.done():
            build.cancel()
            return self._early(state, None, "stopped before anything was loaded")
        try:
            built = build.result()
        except TrainerError as error:
            return self._early(state, error.failure, error.failure.message)
        except Exception as error:
            logger.exception("the parts cannot be built")
            text = f"{type(error).__name__}: {error}"
            return self._early(state, Failure(FailureClass.INTERNAL, Reason.INTERNAL_ERROR, text), text)
        self._listen(state)  # libraries that were loaded since may have put handlers of their own in our place
        controller = self._controller = Controller(self._config, built.parts, self._directory, state)
        watchdog = StallWatchdog(
            state,
            seconds=self._config.lifecycle.stall_timeout_seconds,
            unavailable=lambda: built.parts.scorer.unavailable,
            describe=lambda: controller.pumps.describe() if controller.pumps is not None else {"phase": state.phase},
            dump_to=self._directory.logs,
        )
        try:
            return await controller.run(watchdog.run())
        finally:
            await built.close()

    @staticmethod
    def _early(state: RunState, failure: Failure | None, message: str) -> FinalDocument:
        """The final document of a run that had no controller yet."""
        return FinalDocument(
            attempt=state.attempt,
            outcome=Outcome.FAILED if failure else Outcome.PREEMPTED,
            failure_class=failure.failure_class if failure else None,
            reason=failure.reason if failure else Reason.PREEMPTED,
            message=message[:1024],
            teacher=failure.teacher if failure else None,
        )
