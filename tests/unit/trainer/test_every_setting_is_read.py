"""Nothing that a user can set is without a reader: every leaf of TrainerConfig is read somewhere in the trainer."""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import opd_trainer
from opd_api.trainer_config import TrainerConfig

#: Read by the operator through status or by people, not by the trainer's code.
NOT_FOR_THE_TRAINER = {
    # The manifest has it for people and for the operator's names; the trainer reads run.directory.
    "run.uid8",
}


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        nested = [item for item in _flatten(field.annotation) if isinstance(item, type) and issubclass(item, BaseModel)]
        if nested:
            for item in nested:
                yield from leaves(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _flatten(annotation: Any) -> Iterator[Any]:
    yield annotation
    for argument in typing.get_args(annotation):
        yield from _flatten(argument)


def attributes_read() -> set[str]:
    """Names of all attributes that are loaded anywhere in the trainer."""
    names: set[str] = set()
    for path in Path(str(opd_trainer.__file__)).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
    return names


READ = attributes_read()


@pytest.mark.parametrize("leaf", sorted(set(leaves(TrainerConfig)) - NOT_FOR_THE_TRAINER))
def test_leaf_is_read(leaf: str) -> None:
    assert leaf.rpartition(".")[2] in READ, f"{leaf} can be set but nothing reads it"


def test_the_list_of_leaves_is_not_empty() -> None:
    assert {"training.checkpoint.keep_every_steps", "teachers.request_timeout_seconds", "run.attempt"} <= set(
        leaves(TrainerConfig)
    )
