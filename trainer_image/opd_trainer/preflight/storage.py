"""Whether the claim can be written and has room for what a run leaves on it."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from opd_api.trainer_config import TrainerConfig
from opd_api.v1alpha1 import Dtype
from opd_api.vocabulary import Reason
from opd_trainer.preflight.report import Report, error
from opd_trainer.storage import WEIGHTS_KEPT

PATH = "spec.storage.claimName"
EXPORT_BYTES = {Dtype.FP32: 4, Dtype.BF16: 2, Dtype.FP16: 2}
#: fp32 parameters and the two moments of Adam.
CHECKPOINT_BYTES = 12
#: Optimizer state of adapters is small beside everything else.
LORA_SHARE = 0.05


def check_writable(config: TrainerConfig, report: Report) -> bool:
    """Write, sync, rename and delete a file where the run will live."""
    directory = Path(config.run.directory)
    probe = directory / f".check-{uuid.uuid4().hex}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as file:
            file.write(b"opd")
            file.flush()
            os.fsync(file.fileno())
        renamed = probe.rename(probe.with_suffix(".renamed"))
        renamed.unlink()
    except OSError as problem:
        message = (
            f"{directory} cannot be written as user {os.getuid()}: {problem.strerror or problem}."
            " Check the claim's access mode, its permissions and runtime.securityContext (runAsUser, fsGroup)"
        )
        report.add([error(Reason.STORAGE_NOT_WRITABLE, PATH, message)])
        return False
    report.say(f"        ok  {PATH}: {directory} can be written")
    return True


def bytes_needed(config: TrainerConfig, parameters: int) -> int:
    """Checkpoints kept plus the one being written, published weights likewise, and the export."""
    share = LORA_SHARE if config.student.lora else 1.0
    checkpoints = (config.training.checkpoint.keep_last + 1) * CHECKPOINT_BYTES * share
    weights = (WEIGHTS_KEPT + 1) * EXPORT_BYTES[config.student.model.dtype]
    return int(parameters * (checkpoints + weights + EXPORT_BYTES[config.student.model.dtype]))


def check_space(config: TrainerConfig, parameters: int, report: Report) -> None:
    """Compare with what the file system says is free."""
    needed, free = bytes_needed(config, parameters), shutil.disk_usage(config.run.directory).free
    text = (
        f"{needed / 1e9:.1f} GB are needed for {config.training.checkpoint.keep_last} checkpoints, weights and export"
    )
    if free < needed:
        message = f"{text}; {free / 1e9:.1f} GB are free. Use a larger claim or a smaller checkpoint.keepLast"
        report.add([error(Reason.STORAGE_FULL, PATH, message)])
    else:
        report.say(f"        ok  {PATH}: {text}, {free / 1e9:.1f} GB are free")
