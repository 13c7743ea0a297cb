"""Tests in forks report what tests in one process report, and a fork that dies is a failure of what it ran."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[2] / "support"
PLAIN = """
import pytest

@pytest.fixture(scope="module")
def once(tmp_path_factory):
    yield tmp_path_factory.mktemp("once")
    print("module torn down")

@pytest.mark.parametrize("number", range(5))
def test_passes(once, number, capfd):
    print("seen by nobody")
    assert capfd.readouterr().out == "seen by nobody\\n"

def test_fails(once):
    print("words of the test")
    assert 1 == 2

@pytest.mark.skip(reason="not today")
def test_is_skipped(): ...

@pytest.fixture
def broken():
    raise OSError("no room")

def test_cannot_start(broken): ...
"""
DEADLY = """
import os

def test_before(): ...

def test_dies():
    os.kill(os.getpid(), 9)

def test_after(): ...
"""
DEAF = """
import signal, time

def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(50)
"""


def outcomes(folder: Path, processes: int, *options: str) -> tuple[int, dict[str, str], str]:
    """Exit code, outcome of every test, and what pytest printed."""
    report = folder / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "forked", f"--processes={processes}", f"--rootdir={folder}",
         f"--junitxml={report}", "-p", "no:cacheprovider", *options, str(folder)],
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        timeout=60,
    )  # fmt: skip
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[f"{case.get('classname')}.{case.get('name')}"] = kinds[0] if kinds else "passed"
    return done.returncode, found, done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        (tmp_path / f"test_plain{number}.py").write_text(PLAIN)
    return tmp_path


def test_forks_report_what_one_process_reports(folder: Path) -> None:
    code, found, printed = outcomes(folder, 3)
    assert (code, found) == outcomes(folder, 1)[:2]
    assert len(found) == 24
    assert "words of the test" in printed
    assert "3 failed, 15 passed, 3 skipped, 3 errors" in printed


def test_a_fork_that_dies_fails_its_test_and_the_rest_of_its_module(folder: Path) -> None:
    (folder / "test_deadly.py").write_text(DEADLY)
    code, found, printed = outcomes(folder, 2)
    assert code == 1
    assert found["test_deadly.test_before"] == "passed"
    assert found["test_deadly.test_dies"] == found["test_deadly.test_after"] == "failure"
    assert "the process that ran this test ended with -9" in printed
    assert sum(outcome == "passed" for outcome in found.values()) == 16, "the other fork takes what is left"


def test_a_fork_that_hears_no_time_limit_is_killed(folder: Path) -> None:
    (folder / "test_deaf.py").write_text(DEAF)
    code, found, printed = outcomes(folder, 2, "--timeout=1")
    assert code == 1
    assert found["test_deaf.test_hangs"] == "failure"
    assert "the process that ran this test ended with -9" in printed
    assert sum(outcome == "passed" for outcome in found.values()) == 15
