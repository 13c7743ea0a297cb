"""Small requests share a forward pass: a bounded queue in front of one scoring thread."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from opd_trainer.teachers.scoring import ScoreRows, ScoreTask

Score = Callable[[Sequence[ScoreTask]], list[ScoreRows]]


class QueueFullError(Exception):
    """More requests wait than the queue holds; the client shall try later (503)."""


@dataclass(slots=True)
class _Waiting:
    task: ScoreTask
    done: asyncio.Future[ScoreRows]
    since: float = field(default_factory=time.monotonic)


class Batcher:
    """Takes what waits when the model is free: at most `max_tokens` padded tokens, neighbours of similar length.

    A request that is larger than `max_tokens` goes alone. Requests whose client went away are skipped.
    """

    def __init__(self, score: Score, *, max_tokens: int, max_waiting: int) -> None:
        self._score = score
        self._max_tokens = max_tokens
        self._max_waiting = max_waiting
        self._waiting: deque[_Waiting] = deque()
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="score")
        self._loop_task: asyncio.Task[None] | None = None
        self._running: list[_Waiting] = []
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self) -> None:
        """Start the loop in the running event loop."""
        self._loop_task = asyncio.create_task(self._run(), name="batcher")

    @property
    def waiting(self) -> int:
        """Requests that no forward pass has taken yet."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """True when nothing waits and nothing runs."""
        return not self._waiting and not self._running

    @property
    def alive(self) -> bool:
        """False when the loop ended: the server must not call itself healthy."""
        return self._loop_task is not None and not self._loop_task.done()

    async def submit(self, task: ScoreTask) -> ScoreRows:
        """Wait for the scores of one task. Raises QueueFullError, or what the model raised."""
        if len(self._waiting) >= self._max_waiting:
            raise QueueFullError(f"{len(self._waiting)} requests wait already")
        entry = _Waiting(task, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._idle.clear()
        self._wake.set()
        return await entry.done

    async def drain(self, seconds: float) -> None:
        """Wait until nothing waits or runs, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)

    async def stop(self) -> None:
        """End the loop; waiting requests are cancelled."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        for entry in [*self._waiting, *self._running]:
            entry.done.cancel()
        self._waiting.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _take(self) -> list[_Waiting]:
        """The oldest request and those that fit beside it, nearest in length first."""
        entries = [entry for entry in self._waiting if not entry.done.done()]
        if not entries:
            self._waiting.clear()
            return []
        first, rest = entries[0], entries[1:]
        rest.sort(key=lambda entry: abs(len(entry.task.ids) - len(first.task.ids)))
        batch, longest = [first], len(first.task.ids)
        for entry in rest:
            grown = max(longest, len(entry.task.ids))
            if grown * (len(batch) + 1) > self._max_tokens:
                break
            batch.append(entry)
            longest = grown
        chosen = {id(entry) for entry in batch}
        self._waiting = deque(entry for entry in entries if id(entry) not in chosen)
        return batch

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                self._running = self._take()
                if not self._running:
                    continue
                try:
                    results = await loop.run_in_executor(
                        self._thread, self._score, [entry.task for entry in self._running]
                    )
                except Exception as error:
                    for entry in self._running:
                        if not entry.done.done():
                            entry.done.set_exception(error)
                else:
                    for entry, rows in zip(self._running, results, strict=True):
                        if not entry.done.done():
                            entry.done.set_result(rows)
                self._running = []
            self._idle.set()
