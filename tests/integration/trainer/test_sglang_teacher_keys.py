"""The teacher container as the operator writes it, with the real SGLang: it serves, asks for its key, and shows no key."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from opd_testing.tiny_models import write_model

from opd_api.v1alpha1 import OPDJobSpec
from opd_operator.children import JobContext
from opd_operator.children.bootstrap_engine import KEY_FILE
from opd_operator.children.engines import engine
from opd_operator.settings import Settings

API_KEY = "s3cret-api-key"
ADMIN_KEY = "s3cret-admin-key"
START_SECONDS = 480
STAND_IN = Path(__file__).parents[2] / "support" / "sgl_kernel_standin"

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Server:
    """A running teacher."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def status(self, path: str, key: str | None = None, body: bytes | None = None) -> int:
        request = urllib.request.Request(self.url + path, data=body, headers={"Content-Type": "application/json"})
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("teacher")
    model = write_model(folder / "model")
    spec = OPDJobSpec.model_validate(
        {
            "runtime": {"device": "cpu"},
            "student": {"model": {"source": str(model)}},
            "teachers": [{"name": "big", "model": {"source": str(model)}, "args": ["--max-running-requests", "4"]}],
            "data": {"source": "/data/prompts.jsonl"},
            "training": {"steps": 1},
        }
    )
    job = JobContext("math", "team", "0123abcd-0", spec, Settings())
    container = engine(job, spec.teachers[0], "keys")
    port = free_port()
    argv = [*container.command, *container.args, "--host", "127.0.0.1", "--port", str(port)]
    argv = [word.replace(KEY_FILE, str(folder / "engine.yaml")) for word in argv]
    plain = {item["name"]: item["value"] for item in container.env if "value" in item}
    keys = {"OPD_TEACHER_API_KEY": API_KEY, "OPD_TEACHER_ADMIN_KEY": ADMIN_KEY}
    environment = {**os.environ, **plain, **keys, "PYTHONPATH": str(STAND_IN), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(argv, env=environment, stdout=file, stderr=file, start_new_session=True)
    found = Server(f"http://127.0.0.1:{port}", log, process)
    try:
        deadline = time.monotonic() + START_SECONDS
        while found.status("/health_generate") != 200:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield found
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def test_scores_need_the_key(server: Server) -> None:
    body = b'{"input_ids": [2, 5, 6, 7], "sampling_params": {"max_new_tokens": 0}, "return_logprob": true}'
    assert server.status("/generate", None, body) == 401
    assert server.status("/generate", "wrong", body) == 401
    assert server.status("/generate", API_KEY, body) == 200


def test_administration_needs_the_other_key(server: Server) -> None:
    assert server.status("/flush_cache", API_KEY, b"{}") in (401, 403)
    assert server.status("/flush_cache", ADMIN_KEY, b"{}") == 200


def test_health_and_metrics_need_none(server: Server) -> None:
    assert server.status("/health") == 200
    assert server.status("/metrics") == 200


def test_no_key_is_in_the_log(server: Server) -> None:
    text = server.log.read_text()
    assert "server_args" in text
    assert API_KEY not in text
    assert ADMIN_KEY not in text


def test_no_key_is_in_any_command_line(server: Server) -> None:
    session = os.getsid(server.process.pid)
    seen = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.getsid(int(entry.name)) != session:
                continue
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it ended while we looked
        seen += 1
        assert API_KEY.encode() not in command
        assert ADMIN_KEY.encode() not in command
    assert seen >= 2
