"""The run directory: the fence between attempts, published weights, logs that survive the pod."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError
from opd_trainer.storage import RunDirectory, replace_directory, write_atomically


def published(directory: RunDirectory, *versions: int) -> None:
    for version in versions:
        directory.weights_of(version).mkdir(parents=True)


def test_only_a_higher_attempt_closes_the_fence(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path, 1), RunDirectory(tmp_path, 2)
    first.create()
    first.check_fence()
    second.create()
    second.check_fence()
    with pytest.raises(TrainerError, match="attempt 2 owns") as error:
        first.check_fence()
    assert (error.value.failure.failure_class, error.value.failure.reason) == (
        FailureClass.INFRASTRUCTURE,
        Reason.SUPERSEDED,
    )


def test_attempts_are_compared_as_numbers(tmp_path: Path) -> None:
    RunDirectory(tmp_path, 9).create()
    tenth = RunDirectory(tmp_path, 10)
    tenth.create()
    tenth.check_fence()


def test_the_last_two_versions_are_kept_and_earlier_attempts_go(tmp_path: Path) -> None:
    published(RunDirectory(tmp_path, 1), 1, 2)
    second = RunDirectory(tmp_path, 2)
    published(second, 8, 9, 10)
    second.prune_weights()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("weights/*/*")) == [
        "weights/a2/v10",
        "weights/a2/v9",
    ]
    assert not (tmp_path / "weights" / "a1").exists()


def test_versions_in_use_are_kept_however_old_they_are(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, 1)
    published(directory, 1, 2, 3, 4, 5)
    directory.prune_weights(in_use={2})
    assert sorted(path.name for path in tmp_path.glob("weights/a1/*")) == ["v2", "v4", "v5"]
    directory.prune_weights()
    assert sorted(path.name for path in tmp_path.glob("weights/a1/*")) == ["v4", "v5"]


def test_weights_go_with_the_export_and_the_mark_of_the_attempt_stays(tmp_path: Path) -> None:
    published(RunDirectory(tmp_path, 1), 1)
    second = RunDirectory(tmp_path, 2)
    published(second, 8, 9)
    second.drop_weights()
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["a2"]
    assert not list((tmp_path / "weights" / "a2").iterdir())
    with pytest.raises(TrainerError):
        RunDirectory(tmp_path, 1).check_fence()


@pytest.mark.skipif(os.geteuid() != 0, reason="without root a read-only folder is enough")
def test_a_claim_that_cannot_be_written_says_what_to_look_at(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainerError, match="check the claim, its access mode and runAsUser") as error:
        RunDirectory(tmp_path / "file" / "run", 1).create()
    assert error.value.failure.reason is Reason.STORAGE_NOT_WRITABLE


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    for name, text in (("new", "2"), ("target", "1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(text)
    replace_directory(tmp_path / "new", tmp_path / "target")
    assert (tmp_path / "target" / "file").read_text() == "2"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    write_atomically(path, "old")
    inode = path.stat().st_ino
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_ino != inode, "written beside and renamed, not in place"
    assert [item.name for item in tmp_path.iterdir()] == ["progress.json"]


def test_output_of_the_process_its_children_and_c_libraries_is_copied(tmp_path: Path) -> None:
    program = (
        "import os, subprocess, sys; from pathlib import Path; from opd_trainer.logs import Tee\n"
        f"tee = Tee(Path({str(tmp_path / 'logs' / 'trainer.log')!r}))\n"
        "print('from python')\n"
        "subprocess.run([sys.executable, '-c', 'print(\"from a child\")'], check=True)\n"
        "os.write(2, b'from c\\n')\n"
        "tee.close()\n"
        "print('after')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    log = (tmp_path / "logs" / "trainer.log").read_text()
    assert {"from python", "from a child", "from c"} <= set(log.splitlines())
    assert "after" not in log
    assert set(done.stdout.splitlines()) == {"from python", "from a child", "after"}
    assert done.stderr == "from c\n"


def test_an_attempt_appends_to_its_own_log(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from opd_trainer.logs import Tee\n"
        f"tee = Tee(Path({str(tmp_path / 'trainer.log')!r})); print(sys.argv[1]); tee.close()"
    )
    for word in ("first", "second"):
        subprocess.run([sys.executable, "-c", program, word], capture_output=True, timeout=60, check=True)
    assert (tmp_path / "trainer.log").read_text() == "first\nsecond\n"
