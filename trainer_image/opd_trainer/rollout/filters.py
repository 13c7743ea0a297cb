"""`task.filter`: a user's function that keeps or drops a completed group before any teacher sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError
from opd_trainer.rollout import user_calls
from opd_trainer.rollout.user_calls import LateError, UserFunction
from opd_trainer.sample import Sample

Filter = Callable[[list[Sample]], Awaitable[bool]]


def build_filter(value: str | None) -> Filter | None:
    """`function(samples: list[Sample]) -> bool`, plain or async. Raises TrainerError(Config) when it cannot be imported.

    The filter raises TrainerError(Data) when the function fails: a filter that guesses would bias the data.
    """
    if value is None:
        return None
    function = UserFunction("task.filter", value)

    async def keep(samples: list[Sample]) -> bool:
        try:
            return bool(await function(samples))
        except Exception as error:
            late = isinstance(error, LateError)
            what = f"took longer than {user_calls.CALL_SECONDS:g} s" if late else f"{type(error).__name__}: {error}"
            raise TrainerError(FailureClass.DATA, Reason.DATA_ERROR, f"task.filter {value} failed: {what}") from error

    return keep
