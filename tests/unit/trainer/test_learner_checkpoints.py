"""Checkpoints: complete or invisible, ordered by attempt and step, fenced, pruned."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError
from opd_trainer.learner.checkpoints import CheckpointStore


def write(store: CheckpointStore, step: int, text: str = "weights") -> Path:
    path = store.begin(step)
    (path / "learner").mkdir()
    (path / "learner" / "__0_0.distcp").write_text(text * 100)
    return store.commit(path, {"step": step, "cursor": step * 3})


def test_a_committed_checkpoint_is_found_with_its_controller_state(tmp_path: Path) -> None:
    final = write(CheckpointStore(tmp_path, 2), 40)
    assert final.name == "step-40.a2"
    found = CheckpointStore(tmp_path, 3).latest()
    assert found is not None
    assert (found.path, found.step, found.attempt) == (final, 40, 2)
    assert found.controller_state == {"step": 40, "cursor": 120}


def test_the_highest_attempt_wins_over_the_highest_step(tmp_path: Path) -> None:
    write(CheckpointStore(tmp_path, 1), 100)
    write(CheckpointStore(tmp_path, 2, keep_last=5), 60)
    write(CheckpointStore(tmp_path, 2, keep_last=5), 80)
    found = CheckpointStore(tmp_path, 3).latest()
    assert found is not None
    assert found.path.name == "step-80.a2"


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "no manifest", "bad json", "remove controller"])
def test_a_broken_checkpoint_is_skipped_loudly(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path, 1)
    write(store, 20)
    newest = write(store, 40)
    shard = newest / "learner" / "__0_0.distcp"
    if damage == "truncate":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "flip":
        shard.write_text(shard.read_text().replace("w", "v", 1))
    elif damage == "remove":
        shard.unlink()
    elif damage == "no manifest":
        (newest / "manifest.json").unlink()
    elif damage == "bad json":
        (newest / "manifest.json").write_text("{")
    else:
        (newest / "controller.json").unlink()
    found = store.latest()
    assert found is not None
    assert found.step == 20
    assert "step-40.a1 is skipped" in caplog.text


def test_a_process_killed_in_the_middle_of_a_write_leaves_nothing_that_counts(tmp_path: Path) -> None:
    write(CheckpointStore(tmp_path, 1), 20)
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom opd_trainer.learner.checkpoints import CheckpointStore\n"
        f"store = CheckpointStore(Path({str(tmp_path)!r}), 1)\npath = store.begin(40)\n"
        "(path / 'shard').write_text('half')\nprint('written', flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    store = CheckpointStore(tmp_path, 2)
    found = store.latest()
    assert found is not None
    assert found.step == 20
    write(store, 21)
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


def test_old_checkpoints_are_pruned_but_multiples_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1, keep_last=2, keep_every_steps=50)
    for step in (25, 50, 75, 100, 110, 120):
        write(store, step)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step-50.a1", "step-100.a1", "step-110.a1", "step-120.a1"}


@pytest.mark.parametrize("mark", ["weights/a3", "checkpoints/step-1.a3", "checkpoints/step-1.a3.tmp"])
def test_a_superseded_attempt_cannot_commit(tmp_path: Path, mark: str) -> None:
    store = CheckpointStore(tmp_path, 2)
    path = store.begin(40)
    (path / "shard").write_text("x")
    (tmp_path / mark).mkdir(parents=True)
    with pytest.raises(TrainerError, match="attempt 3 owns") as caught:
        store.commit(path, {})
    assert caught.value.failure.failure_class is FailureClass.INFRASTRUCTURE
    assert caught.value.failure.reason is Reason.SUPERSEDED
    assert not (tmp_path / "checkpoints" / "step-40.a2").exists()
    with pytest.raises(TrainerError, match="attempt 3 owns"):
        store.begin(41)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1)
    write(store, 40, "old")
    final = write(store, 40, "new")
    assert (final / "learner" / "__0_0.distcp").read_text().startswith("new")
    assert set(json.loads((final / "manifest.json").read_text())["files"]) == {
        "learner/__0_0.distcp",
        "controller.json",
    }


def test_resume_follows_the_setting(tmp_path: Path) -> None:
    elsewhere = write(CheckpointStore(tmp_path / "other", 1), 7)
    store = CheckpointStore(tmp_path / "run", 1)
    assert store.resume("auto") is None
    started = store.resume(str(elsewhere))
    assert started is not None
    assert started.step == 7
    write(store, 9)
    own = CheckpointStore(tmp_path / "run", 2).resume(str(elsewhere))
    assert own is not None
    assert own.step == 9
    assert store.resume("never") is None
    with pytest.raises(TrainerError, match=r"training\.checkpoint\.resume") as caught:
        CheckpointStore(tmp_path / "empty", 1).resume(str(tmp_path / "nothing"))
    assert caught.value.failure.failure_class is FailureClass.CONFIG
