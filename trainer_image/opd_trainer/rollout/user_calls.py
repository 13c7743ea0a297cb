"""Calling a function of the user's: within its time, and so that it can neither end a task of ours nor hold up the loop.

The time is that of the call itself: how long it waits for its turn says nothing about it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from opd_trainer.rollout.entrypoints import load_entrypoint

CALL_SECONDS = 60.0
#: Calls of a plain function at the same time: as many as asyncio's own threads.
THREADS = min(32, (os.cpu_count() or 1) + 4)

T = TypeVar("T")


class LateError(TimeoutError):
    """The call did not end in its time."""


class CallCancelledError(Exception):
    """The call was cancelled, and not by whoever waits for it."""


async def within(call: asyncio.Future[T], seconds: float) -> T:
    """Result of a call. Raises LateError, CallCancelledError, and what the call raises.

    CancelledError comes out of it only when the caller's own task is cancelled: no call can end a task by being cancelled.
    """
    try:
        await asyncio.wait({call}, timeout=seconds)
        if not call.done():
            raise LateError
        if call.cancelled():
            raise CallCancelledError("the call was cancelled")
        return call.result()
    finally:
        call.cancel()


class UserFunction:
    """A function that a field of the spec names, plain or async."""

    def __init__(self, path: str, value: str) -> None:
        """Raises TrainerError(Config) when it cannot be imported."""
        self._path = path
        self._function = load_entrypoint(path, value)
        self._async = inspect.iscoroutinefunction(self._function)
        # As many calls as threads, so none waits for a thread while its time runs.
        self._slots = asyncio.Semaphore(THREADS)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=self._path)

    async def __call__(self, *arguments: Any) -> Any:
        """Raises LateError, CallCancelledError, and what the function raises."""
        if self._async:
            return await within(asyncio.ensure_future(self._function(*arguments)), CALL_SECONDS)
        async with self._slots:
            call = self._threads.submit(self._function, *arguments)
            try:
                return await within(asyncio.wrap_future(call), CALL_SECONDS)
            finally:
                if not call.done():  # nothing ends a thread; so that its slot has one again, the next calls get others
                    self._threads.shutdown(wait=False)
                    self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=self._path)
