"""The steps of `opd run`: rules -> input check -> teachers -> readiness gate -> probe -> controller -> report."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

from pydantic import ValidationError

from opd_api.progress import FINAL_KEY, PROGRESS_KEY, FinalDocument, ProgressDocument
from opd_api.vocabulary import EXIT_CODE_OF_CLASS, ExitCode, FailureClass, Outcome, Reason, TrainerPhase
from opd_trainer.errors import TrainerError
from opd_trainer.local import processes
from opd_trainer.local.plan import (
    API_KEY_ENV,
    OPD_TRAINER,
    LocalJob,
    TeacherProcess,
    config_error,
    on_port,
    plan,
    teacher_process,
)
from opd_trainer.local.processes import Child
from opd_trainer.local.rules import check_rules
from opd_trainer.local.view import View
from opd_trainer.storage import write_atomically

POLL_SECONDS = 0.2
TEACHER_STOP_SECONDS = 10.0
#: Beyond preemptionGraceSeconds, for the final document and the end of Ray.
STOP_RESERVE_SECONDS = 30.0
CHECK_SECONDS = 1800.0
PROBE_SECONDS = 600.0
#: Ports that other programs may take between the choice and the start.
PORT_RACES = 3


class Interrupted(Exception):
    """Ctrl-C or SIGTERM before the controller ran."""


class Supervisor:
    """Owns the children of one local run."""

    def __init__(self, job: LocalJob, view: View) -> None:
        self._job = job
        self._view = view
        self._attempt = job.next_attempt()
        self._logs = job.directory / "logs" / f"attempt-{self._attempt}"
        self._api_key = secrets.token_urlsafe(32)
        self._teachers: list[tuple[TeacherProcess, Child]] = []
        self._controller: Child | None = None
        self._interrupts = 0
        self._port_races = 0

    # -- signals -----------------------------------------------------------------------------------------------------

    def install_signals(self) -> None:
        """First Ctrl-C: save and stop. Second: stop now."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._controller is not None and self._controller.returncode() is None:
            self._controller.signal(signal.SIGTERM if self._interrupts == 1 else signal.SIGKILL)
            if self._interrupts == 1:
                self._view.say("saving a checkpoint; press Ctrl-C again to stop without it")

    def _pause(self) -> None:
        time.sleep(POLL_SECONDS)
        if self._interrupts and self._controller is None:
            raise Interrupted

    # -- steps -------------------------------------------------------------------------------------------------------

    def run(self) -> FinalDocument:
        """All steps. Raises TrainerError and Interrupted; leaves no process."""
        try:
            self._check_inputs()
            self._start_teachers()
            self._wait_for_teachers()
            self._probe_teachers()
            return self._train()
        finally:
            self._stop_teachers()
            if self._controller is not None:
                self._controller.stop(TEACHER_STOP_SECONDS)
            left = processes.kill_descendants()
            if left:
                self._view.say(f"processes {sorted(left)} did not end")

    def _write_config(self, name: str, teachers: list[TeacherProcess]) -> Path:
        config = self._job.trainer_config(self._attempt, teachers)
        path = self._job.configs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, config.to_json())
        return path

    def _environment(self) -> dict[str, str]:
        return {
            **self._job.environment,
            API_KEY_ENV: self._api_key,
            "PYTHONUNBUFFERED": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def _check_inputs(self) -> None:
        if not self._job.spec.preflight.enabled:
            return
        self._view.phase("checking inputs")
        config = self._write_config(f"check.a{self._attempt}.json", self._planned_teachers())
        self._run_step("check", config, CHECK_SECONDS)

    def _planned_teachers(self) -> list[TeacherProcess]:
        """Replicas with free ports; the ports may be taken by others until the start, which then tries again."""
        wanted = [(teacher, replica) for teacher in self._job.served_teachers() for replica in range(teacher.replicas)]
        try:
            ports = processes.free_ports(len(wanted))
        except OSError as error:
            raise TrainerError(FailureClass.INFRASTRUCTURE, Reason.PLACEMENT_FAILED, str(error)) from error
        device, keys = self._job.spec.runtime.device, self._job.configs
        return [
            teacher_process(teacher, replica, port, device=device, api_key=self._api_key, keys=keys)
            for (teacher, replica), port in zip(wanted, ports, strict=True)
        ]

    def _start_teachers(self) -> None:
        planned = self._planned_teachers()
        if planned:
            self._view.phase(f"starting {len(planned)} teacher server{'s' if len(planned) > 1 else ''}")
        for process in planned:
            self._teachers.append((process, self._start_teacher(process)))

    def _start_teacher(self, process: TeacherProcess) -> Child:
        if process.key_file is not None:
            descriptor = os.open(process.key_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"api-key: {self._api_key}\n")
        environment = {**self._environment(), **process.environment}
        return Child(
            process.name, process.command, log=self._logs / f"teacher-{process.name}.log", environment=environment
        )

    def _wait_for_teachers(self) -> None:
        """The gate: the controller is not started before every replica answers a real score."""
        started = time.monotonic()
        deadline = self._job.spec.lifecycle.teacher_ready_deadline_seconds
        waiting = {process.name for process, _ in self._teachers}
        while waiting:
            for index, (process, child) in enumerate(self._teachers):
                if process.name not in waiting:
                    continue
                if self._ready(process):
                    waiting.discard(process.name)
                    self._view.say(f"teacher {process.name} answers after {time.monotonic() - started:.0f} s")
                    continue
                self._must_live(index)
                if time.monotonic() - started > min(deadline, process.startup_seconds):
                    raise self._teacher_error(process, child, "does not answer in time")
            if waiting:
                self._pause()

    def _must_live(self, index: int) -> None:
        """A server that lost the race for its port gets another one; any other end ends the run."""
        process, child = self._teachers[index]
        code = child.returncode()
        if code == ExitCode.INFRASTRUCTURE and self._port_races < PORT_RACES:
            self._port_races += 1
            (port,) = processes.free_ports(1)
            moved = on_port(process, port)
            self._teachers[index] = (moved, self._start_teacher(moved))
        elif code is not None:
            raise self._teacher_error(process, child, f"ended with exit code {code}")

    @staticmethod
    def _teacher_error(process: TeacherProcess, child: Child, what: str) -> TrainerError:
        return TrainerError(
            FailureClass.TEACHER,
            Reason.TEACHER_NOT_READY,
            f"teacher {process.name} {what}; its log {child.log} ends with:\n{child.tail()}",
            teacher=process.teacher,
        )

    def _ready(self, process: TeacherProcess) -> bool:
        request = urllib.request.Request(  # noqa: S310 - loopback
            f"{process.url}/health_generate", headers={"Authorization": f"Bearer {self._api_key}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=25) as response:  # noqa: S310
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _probe_teachers(self) -> None:
        served = [process for process, _ in self._teachers]
        if self._job.spec.preflight.enabled:
            self._view.phase("probing teachers")
            config = self._write_config(f"probe.a{self._attempt}.json", served)
            self._run_step("probe", config, PROBE_SECONDS)

    def _run_step(self, word: str, config: Path, seconds: float) -> None:
        """A subcommand in a child; its failure ends the run with its own exit code and last words."""
        termination = self._logs / f"{word}.termination.json"
        command = (*OPD_TRAINER, word, "--config", str(config), "--termination-log", str(termination))
        child = Child(word, command, log=self._logs / f"{word}.log", environment=self._environment())
        deadline = time.monotonic() + seconds
        try:
            while (code := child.returncode()) is None:
                self._pause()
                if time.monotonic() > deadline:
                    raise TrainerError(
                        FailureClass.DEADLINE, Reason.DEADLINE_EXCEEDED, f"{word} took longer than {seconds:.0f} s"
                    )
        finally:
            child.stop(TEACHER_STOP_SECONDS)
        final = _read_final(termination)
        if code != ExitCode.OK:
            raise StepFailed(word, code, final, child)
        for finding in final.findings if final is not None else []:
            self._view.say(f"{finding.severity} {finding.code} {finding.path}: {finding.message}")

    def _train(self) -> FinalDocument:
        config = self._write_config(f"job.a{self._attempt}.json", [process for process, _ in self._teachers])
        for key in (PROGRESS_KEY, FINAL_KEY):
            (self._job.directory / f"{key}.json").unlink(missing_ok=True)
        if self._attempt > 1:
            self._view.may_resume()
        self._view.phase("starting the student")
        self._controller = Child(
            "controller",
            (*OPD_TRAINER, "run", "--config", str(config)),
            log=self._logs / "controller.log",
            environment=self._environment(),
        )
        if self._interrupts:
            self._controller.signal(signal.SIGTERM)
        self._follow(self._controller)
        final = _read_final(self._job.directory / f"{FINAL_KEY}.json")
        if final is not None:
            return final
        raise TrainerError(
            FailureClass.INTERNAL,
            Reason.NO_FINAL_DOCUMENT,
            f"the controller ended (exit code {self._controller.returncode()}) without saying how; "
            f"its log {self._controller.log} ends with:\n{self._controller.tail()}",
        )

    def _follow(self, controller: Child) -> None:
        """Show progress until the controller ends; release the teachers when they are not needed any more."""
        grace = self._job.spec.lifecycle.preemption_grace_seconds + STOP_RESERVE_SECONDS
        interrupted_at: float | None = None
        while controller.returncode() is None:
            time.sleep(POLL_SECONDS)
            document = _read_progress(self._job.directory / f"{PROGRESS_KEY}.json")
            if document is not None:
                self._view.progress(document)
                if document.phase in (TrainerPhase.EXPORTING, TrainerPhase.FINISHED):
                    self._stop_teachers()
            if self._interrupts and interrupted_at is None:
                interrupted_at = time.monotonic()
            if interrupted_at is not None and time.monotonic() - interrupted_at > grace:
                controller.signal(signal.SIGKILL)
        document = _read_progress(self._job.directory / f"{PROGRESS_KEY}.json")
        if document is not None:
            self._view.progress(document)

    def _stop_teachers(self) -> None:
        for _, child in self._teachers:
            child.signal(signal.SIGTERM)
        for process, child in self._teachers:
            child.stop(TEACHER_STOP_SECONDS)
            if process.key_file is not None:
                process.key_file.unlink(missing_ok=True)
        self._teachers.clear()


class StepFailed(TrainerError):
    """Check or probe found an error; their own document says which."""

    def __init__(self, word: str, code: int, final: FinalDocument | None, child: Child) -> None:
        if final is not None:
            details = "".join(f"\n  {f.severity} {f.code} {f.path}: {f.message}" for f in final.findings)
            message = f"{word}: {final.message}{details}"
            failure_class = final.failure_class or FailureClass.INTERNAL
            reason = Reason(final.reason) if final.reason in set(Reason) else Reason.CHECK_FAILED
            super().__init__(failure_class, reason, message, teacher=final.teacher)
        else:
            message = f"{word} ended with exit code {code}; its log {child.log} ends with:\n{child.tail()}"
            super().__init__(FailureClass.INTERNAL, Reason.CHECK_FAILED, message)
        self.code = code


def _read_progress(path: Path) -> ProgressDocument | None:
    try:
        return ProgressDocument.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError):  # not there yet
        return None


def _read_final(path: Path) -> FinalDocument | None:
    try:
        return FinalDocument.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


@contextlib.contextmanager
def _only_one(directory: Path) -> Iterator[TextIO]:
    """Two supervisors on one run directory would overwrite each other."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise config_error(f"another opd run works in {directory}") from error
        yield lock


def _must_exist(job: LocalJob) -> None:
    """A mistyped --data would become an empty folder in which nothing is found."""
    if not job.data.is_dir():
        raise config_error(
            f"--data: the folder {job.data} does not exist. It stands for the claim ({job.spec.storage.mount_path} in the "
            f"manifest): write --data with the folder that holds models and prompts, or make it: mkdir -p {job.data}"
        )


def _start_anew(directory: Path) -> None:
    """--fresh: the old run is kept aside, once."""
    previous = directory.with_name(f"{directory.name}.previous")
    if any(entry.name != ".lock" for entry in directory.iterdir()):
        shutil.rmtree(previous, ignore_errors=True)
        previous.mkdir()
        for entry in directory.iterdir():
            if entry.name != ".lock":
                entry.rename(previous / entry.name)


def run_local(file: str, *, data: str = "opd-data", fresh: bool = False) -> int:
    """Run a manifest on this machine. Returns the exit code: 0 succeeded, 75 stopped (run again to resume), else the class's."""
    view = View()
    try:
        check_rules(Path(file), view)
        job = plan(Path(file), Path(data))
        _must_exist(job)
        with _only_one(job.directory):
            if fresh:
                _start_anew(job.directory)
            done = _read_final(job.directory / f"{FINAL_KEY}.json")
            if done is not None and done.outcome is Outcome.SUCCEEDED:
                view.say("this run succeeded already; --fresh starts it anew")
                return view.end(done, job.directory)
            return _supervise(job, view)
    except TrainerError as error:
        view.fail(error.failure)
        return EXIT_CODE_OF_CLASS.get(error.failure.failure_class, ExitCode.INTERNAL)
    except Interrupted:
        view.say("stopped before training; nothing is running any more")
        return ExitCode.INFRASTRUCTURE
    finally:
        view.close()


def _supervise(job: LocalJob, view: View) -> int:
    processes.adopt_orphans()
    supervisor = Supervisor(job, view)
    supervisor.install_signals()
    view.say(f"run directory {job.directory}")
    return view.end(supervisor.run(), job.directory)
