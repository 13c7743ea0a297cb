"""Engines that take keys as arguments only are started without anybody seeing the keys."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opd_operator.children import bootstrap_engine
from opd_operator.children.engines import KEY_FOLDER, bootstrap_text

KEYS = {"OPD_TEACHER_API_KEY": "s3cret-api-key", "OPD_TEACHER_ADMIN_KEY": "s3cret-admin-key"}
#: Stands for an engine: logs all its settings as SGLang does, and shows what the node can see of it.
ENGINE = """
import logging, os, pathlib, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
config = sys.argv[sys.argv.index("--config") + 1] if "--config" in sys.argv else None
seen = pathlib.Path(config).read_text() if config else " ".join(sys.argv)
logging.getLogger("engine").info("server_args=%s", {"config": seen})
print("ARGV", sys.argv)
print("MODE", oct(os.stat(config).st_mode & 0o777) if config else "-")
print("KNOWS", "s3cret-api-key" in seen)
print("CMDLINE", pathlib.Path("/proc/self/cmdline").read_bytes().replace(b"\\0", b" "))
print("NAME", __name__, sys.modules["__main__"].__spec__.name)
"""


def start(tmp_path: Path, engine: str, *arguments: str) -> str:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(ENGINE)
    (tmp_path / "lmdeploy").mkdir()
    (tmp_path / "lmdeploy" / "__init__.py").touch()
    (tmp_path / "lmdeploy" / "__main__.py").write_text(ENGINE)
    text = bootstrap_text().replace(bootstrap_engine.KEY_FILE, str(tmp_path / "engine.yaml"))
    done = subprocess.run(
        [sys.executable, "-c", text, engine, *arguments],
        env={**os.environ, **KEYS, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_sglang_reads_its_keys_from_a_file_that_only_it_may_read(tmp_path: Path) -> None:
    said = start(tmp_path, "sglang", "--model-path", "m")
    assert "KNOWS True" in said
    assert "MODE 0o600" in said
    assert (
        f"ARGV ['{tmp_path}/sglang/launch_server.py', '--config', '{tmp_path}/engine.yaml', '--model-path', 'm']"
        in said
    )


@pytest.mark.parametrize("engine", ["sglang", "lmdeploy"])
def test_no_key_is_in_the_command_line_or_the_log(tmp_path: Path, engine: str) -> None:
    lines = start(tmp_path, engine, "m").splitlines()
    (command,) = [line for line in lines if line.startswith("CMDLINE")]
    (log,) = [line for line in lines if "server_args" in line]
    for key in KEYS.values():
        assert key not in command
        assert key not in log
    assert "***" in log


def test_lmdeploy_gets_its_key(tmp_path: Path) -> None:
    said = start(tmp_path, "lmdeploy", "m", "--tp", "2")
    assert "KNOWS True" in said
    assert "'serve', 'api_server', 'm', '--tp', '2', '--api-keys'" in said


def test_spawned_children_find_the_main_module(tmp_path: Path) -> None:
    assert "NAME __main__ sglang.launch_server" in start(tmp_path, "sglang")


def test_the_key_file_lies_in_the_folder_in_memory() -> None:
    assert Path(bootstrap_engine.KEY_FILE).parent == Path(KEY_FOLDER)
