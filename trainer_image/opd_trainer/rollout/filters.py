"""`task.filter`: a user's function that keeps or drops a completed group before any teacher sees it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError
from opd_trainer.rollout.entrypoints import load_entrypoint
from opd_trainer.sample import Sample

FILTER_SECONDS = 60.0
Filter = Callable[[list[Sample]], Awaitable[bool]]


def build_filter(value: str | None) -> Filter | None:
    """`function(samples: list[Sample]) -> bool`, plain or async. Raises TrainerError(Config) when it cannot be imported.

    The filter raises TrainerError(Data) when the function fails: a filter that guesses would bias the data.
    """
    if value is None:
        return None
    function = load_entrypoint("task.filter", value)
    is_async = inspect.iscoroutinefunction(function)

    async def keep(samples: list[Sample]) -> bool:
        try:
            call = function(samples) if is_async else asyncio.to_thread(function, samples)
            return bool(await asyncio.wait_for(call, FILTER_SECONDS))
        except Exception as error:
            raise TrainerError(
                FailureClass.DATA, Reason.DATA_ERROR, f"task.filter {value} failed: {type(error).__name__}: {error}"
            ) from error

    return keep
