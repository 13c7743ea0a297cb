"""`module:function` from the spec -> a callable."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError


def load_entrypoint(path: str, value: str) -> Callable[..., Any]:
    """The function named by `value`; `path` is the field of the spec. Raises TrainerError(Config, ConfigError)."""
    module_name, _, function_name = value.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise TrainerError(
            FailureClass.CONFIG,
            Reason.CONFIG_ERROR,
            f"{path}: {value} cannot be imported ({error}); put the module on PYTHONPATH of the trainer image",
        ) from error
    if not callable(function):
        raise TrainerError(FailureClass.CONFIG, Reason.CONFIG_ERROR, f"{path}: {value} is not callable")
    return function  # type: ignore[no-any-return]
