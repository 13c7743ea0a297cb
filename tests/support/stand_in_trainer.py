#!/opt/venv/bin/python
"""Takes the place of `opd-trainer` in the pods of a job whose fault is the cluster's: it loads nothing and does what it is told.

Mounted first on PATH (opd_failures.on_cluster). The variable STAND_IN says what a command does in the first attempt, as JSON:
{"run": {"exit": 64}}. Whatever is not named there goes well, and so does every later attempt. A run that `holds` beats until
it is told otherwise by a file in /tmp: `mute` stops the heartbeats, `idle` stops the activity, `preempt` saves and ends.
"""

from __future__ import annotations

import http.server
import json
import os
import ssl
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOLD = Path("/tmp")
PID = TOLD / "stand-in.pid"
EXIT_CODES = {"Config": 64, "Data": 65, "Teacher": 69, "Internal": 70, "Infrastructure": 75}


def configuration() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("/etc/opd/job.json").read_text())
    return found


def ends(told: dict[str, Any]) -> None:
    """The ways to end or to last that any command may be told; returns when there is none of them."""
    if "says" in told:
        print(told["says"], file=sys.stderr, flush=True)
    if told.get("eats"):
        eat()
    if told.get("writes"):
        Path(told["writes"]).write_text("x")
    if told.get("lasts"):
        time.sleep(3600)
    if "exit" in told:
        sys.exit(told["exit"])


def eat() -> None:
    """Memory until the kernel says no."""
    eaten = []
    while True:
        eaten.append(b"x" * (1 << 24))


def step(told: dict[str, Any]) -> int:
    """A check or a probe: a document as the termination message."""
    ends(told)
    if told.get("mute"):
        return 0
    document = {"attempt": 1, "outcome": "Succeeded", **told.get("document", {})}
    Path("/dev/termination-log").write_text(json.dumps(document))
    return 0 if document["outcome"] == "Succeeded" else EXIT_CODES[document["failureClass"]]


def serve(told: dict[str, Any]) -> int:
    """A teacher that is healthy and knows nothing."""
    ends(told)

    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """The kubelet's probes are no news."""

    http.server.ThreadingHTTPServer(("", 30000), Healthy).serve_forever()
    return 0


def send(run: dict[str, Any], **documents: dict[str, Any]) -> None:
    """As the trainer does: a merge patch of the progress ConfigMap with the pod's own token."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    url = f"https://{host}:{port}/api/v1/namespaces/{run['namespace']}/configmaps/{run['progressConfigMap']}"
    body = json.dumps({"data": {key: json.dumps(value) for key, value in documents.items()}}).encode()
    headers = {
        "Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}",
        "Content-Type": "application/merge-patch+json",
    }
    request = urllib.request.Request(url, body, headers, method="PATCH")
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)).open(
        request, timeout=10
    ).close()


def train(told: dict[str, Any]) -> int:
    run = configuration()["run"]
    attempt = run["attempt"]
    told = told if attempt == 1 else {}
    PID.write_text(str(os.getpid()))
    sequence = 0

    def beat() -> None:
        nonlocal sequence
        sequence += 1
        activity = 1 if (TOLD / "idle").exists() else sequence
        send(run, progress={"attempt": attempt, "sequence": sequence, "phase": "Training", "step": 1, "totalSteps": 2, "activity": activity})  # fmt: skip

    if not told.get("mute"):
        beat()
    while told.get("holds") or told.get("mute"):
        time.sleep(1)
        if (TOLD / "preempt").exists():
            send(run, final={"attempt": attempt, "outcome": "Preempted", "message": "saved step 1", "step": 1})
            return 75
        if not told.get("mute") and not (TOLD / "mute").exists():
            beat()
    if "document" in told:
        send(run, final={"attempt": attempt, "step": 1, **told["document"]})
    if "says" in told or "exit" in told:
        ends(told)
    if told:
        return 0
    saved = {"step": 2, "path": f"/data/opd/{run['namespace']}/{run['name']}/checkpoints/step-2.a{attempt}"}
    send(run, final={"attempt": attempt, "outcome": "Succeeded", "step": 2, "checkpoint": saved})
    return 0


def drain(told: dict[str, Any]) -> int:
    """Nobody saves: a pod that is asked to go goes when its grace is over."""
    ends(told)
    return 0


COMMANDS = {"check": step, "probe": step, "serve": serve, "run": train, "drain": drain}

if __name__ == "__main__":
    name = sys.argv[1]
    sys.exit(COMMANDS[name](json.loads(os.environ.get("STAND_IN", "{}")).get(name, {})))
