"""Distributed checkpoints of what is trained. Another number of ranks may load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError

Trained = dict[str, tuple[nn.Module, torch.optim.Optimizer]]


def save(directory: Path, trained: Trained, schedule: dict[str, Any], *, adapters_only: bool) -> None:
    """Every rank writes its shards. Returns when the folder is complete."""
    content: dict[str, Any] = {"schedule": schedule}
    for name, (module, optimizer) in trained.items():
        options = StateDictOptions(ignore_frozen_params=adapters_only)
        content[name] = {"model": get_model_state_dict(module, options=options)}
        if optimizer.state:
            content[name]["optimizer"] = get_optimizer_state_dict(module, optimizer, options=options)
    dcp.save(content, checkpoint_id=directory)


def load(directory: Path, trained: Trained, schedule: dict[str, Any], *, adapters_only: bool) -> dict[str, Any]:
    """Restore modules and optimizers; of the schedule's entries those that the checkpoint has are returned.

    Raises TrainerError(Config) for another model's checkpoint.
    """
    stored = _stored(directory)
    content: dict[str, Any] = {
        "schedule": {key: value for key, value in schedule.items() if f"schedule.{key}" in stored}
    }
    options = StateDictOptions(ignore_frozen_params=adapters_only)
    for name, (module, optimizer) in trained.items():
        content[name] = {"model": get_model_state_dict(module, options=options)}
        # Before the first update there is no optimizer state to store; asking for it would make one.
        if any(key.startswith(f"{name}.optimizer.") for key in stored):
            content[name]["optimizer"] = get_optimizer_state_dict(module, optimizer, options=options)
    try:
        dcp.load(content, checkpoint_id=directory)
    except (dcp.api.CheckpointException, RuntimeError, ValueError) as error:
        raise TrainerError(
            FailureClass.CONFIG,
            Reason.CONFIG_ERROR,
            f"{directory} does not fit student.model (or student.lora, task.critic): {error}",
        ) from error
    for name, (module, optimizer) in trained.items():
        restored = StateDictOptions(strict=not adapters_only)
        set_model_state_dict(module, content[name]["model"], options=restored)
        if "optimizer" in content[name]:
            set_optimizer_state_dict(module, optimizer, content[name]["optimizer"], options=options)
    result: dict[str, Any] = content["schedule"]
    return result


def _stored(directory: Path) -> set[str]:
    try:
        return set(dcp.FileSystemReader(directory).read_metadata().state_dict_metadata)
    except (OSError, ValueError) as error:
        raise TrainerError(
            FailureClass.CONFIG, Reason.CONFIG_ERROR, f"{directory} is no learner checkpoint: {error}"
        ) from error
