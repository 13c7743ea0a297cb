"""Where a run keeps its files. The attempt number in names is the fence between two attempts."""

from __future__ import annotations

from pathlib import PurePosixPath

#: Folder of downloaded hub models below the mount path.
HUB_FOLDER = "hf"
CONFIG_FILE = "/etc/opd/job.json"


def run_directory(mount_path: str, run_path: str, namespace: str, name: str, uid: str) -> str:
    """`<mountPath>/<runPath>/<namespace>/<name>-<uid8>`; uid may be a full UID or its first eight characters."""
    return str(PurePosixPath(mount_path) / run_path / namespace / f"{name}-{uid[:8]}")


def checkpoint_name(step: int, attempt: int) -> str:
    """`step-40.a2`: the checkpoint of step 40 that attempt 2 wrote."""
    return f"step-{step}.a{attempt}"


def weights_name(version: int, attempt: int) -> str:
    """`a2/v17`: published weights, version 17 of attempt 2."""
    return f"a{attempt}/v{version}"
