"""`opd-trainer local` whose children are stubs: `local_with_stubs.py FILE DATA`, and `local_with_stubs.py WORD ...` for a child.

Environment: STUB_CHECK_CODE, STUB_TEACHER (ok | dead | deaf | taken), STUB_RUN_SECONDS, STUB_IGNORE_SIGTERM. Every child appends a
line to $STUB_JOURNAL.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from opd_api.progress import FinalDocument, ProgressDocument
from opd_api.trainer_config import TrainerConfig
from opd_api.v1alpha1.status import CheckpointStatus, FindingStatus
from opd_api.vocabulary import FailureClass, Outcome, TrainerPhase


def note(text: str) -> None:
    with Path(os.environ["STUB_JOURNAL"]).open("a") as journal:
        journal.write(json.dumps({"text": text, "argv": sys.argv, "time": time.monotonic(), "pid": os.getpid()}) + "\n")


def check(arguments: argparse.Namespace, word: str) -> int:
    note(word)
    code = int(os.environ.get("STUB_CHECK_CODE", "0")) if word == "check" else 0
    finding = FindingStatus(code="FieldNotFound", severity="Error", path="data.promptField", message="no such field")
    final = FinalDocument(
        attempt=1,
        outcome=Outcome.FAILED if code else Outcome.SUCCEEDED,
        failure_class=FailureClass.DATA if code else None,
        reason="FieldNotFound" if code else None,
        message="1 error" if code else "passed",
        findings=[finding] if code else [],
    )
    Path(arguments.termination_log).write_text(final.model_dump_json(by_alias=True))
    return code


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        allowed = self.headers["Authorization"] == f"Bearer {os.environ['OPD_TEACHER_API_KEY']}"
        self.send_response(200 if allowed and self.path == "/health_generate" else 401)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return None


def serve(arguments: argparse.Namespace) -> int:
    note("teacher")
    behaviour = os.environ.get("STUB_TEACHER", "ok")
    if behaviour == "taken" and len(Path(os.environ["STUB_JOURNAL"]).read_text().splitlines()) == 2:
        return 75  # the first of them finds its port taken
    if behaviour == "dead":
        print("CUDA out of memory", flush=True)
        return 3
    if behaviour == "deaf":
        time.sleep(600)
    signal.signal(signal.SIGTERM, lambda *_: (note("teacher ends"), os._exit(0)))
    HTTPServer(("127.0.0.1", arguments.port), Health).serve_forever()
    return 0


def run(arguments: argparse.Namespace) -> int:
    note("controller")
    config = TrainerConfig.model_validate_json(Path(arguments.config).read_text())
    directory = Path(config.run.directory)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: (stopped.append(number), note("stop heard")))
    checkpoint = CheckpointStatus(step=1, path=str(directory / "checkpoints" / "step-1.a1"))

    def progress(phase: TrainerPhase, sequence: int) -> None:
        document = ProgressDocument(attempt=config.run.attempt, sequence=sequence, phase=phase, step=1, total_steps=2)
        (directory / "progress.json").write_text(document.model_dump_json(by_alias=True))

    progress(TrainerPhase.TRAINING, 1)
    deadline = time.monotonic() + float(os.environ.get("STUB_RUN_SECONDS", "0"))
    while time.monotonic() < deadline and (not stopped or "STUB_IGNORE_SIGTERM" in os.environ):
        time.sleep(0.02)
    if not stopped:
        progress(TrainerPhase.EXPORTING, 2)
        while (
            Path(os.environ["STUB_JOURNAL"]).read_text().count("teacher ends") < 1 and time.monotonic() < deadline + 20
        ):
            time.sleep(0.02)
    note("controller ends")
    outcome = Outcome.PREEMPTED if stopped else Outcome.SUCCEEDED
    final = FinalDocument(attempt=config.run.attempt, outcome=outcome, step=1, checkpoint=checkpoint, message="stub")
    (directory / "final.json").write_text(final.model_dump_json(by_alias=True))
    return 75 if stopped else 0


def child(word: str) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("word")
    parser.add_argument("--config")
    parser.add_argument("--termination-log")
    parser.add_argument("--port", type=int)
    arguments, _ = parser.parse_known_args()
    return {"serve": serve, "run": run}.get(word, lambda a: check(a, word))(arguments)


def main() -> int:
    if sys.argv[1] in ("check", "probe", "serve", "run"):
        return child(sys.argv[1])
    from opd_trainer.local import plan, supervisor

    plan.OPD_TRAINER = supervisor.OPD_TRAINER = (sys.executable, __file__)  # type: ignore[assignment]
    return supervisor.run_local(sys.argv[1], data=sys.argv[2])


if __name__ == "__main__":
    sys.exit(main())
