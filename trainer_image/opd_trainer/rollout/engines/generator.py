"""Continuous batching over one model in a thread of its own: requests join between two steps, weights change between."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opd_trainer.interfaces import GenerateResult
from opd_trainer.rollout.engines.decoding import Batch, Decoder, Row, mergeable
from opd_trainer.sample import TokenSet, VersionSpan

log = logging.getLogger(__name__)

#: How long the first request of an idle engine waits for company, in seconds.
GATHER_SECONDS = 0.005
#: Steps between two looks at the queue while a batch runs: a join copies the cache.
JOIN_EVERY = 8
#: Padded prompt tokens of one prefill.
PREFILL_TOKENS = {"cpu": 4096, "cuda": 65_536}

LoadWeights = Callable[[Path], None]


@dataclass(slots=True)
class _Load:
    folder: Path
    version: int
    abort: bool
    done: Future[None]


class Generator:
    """Requests in, responses out. All model work happens in one thread."""

    def __init__(self, decoder: Decoder, load: LoadWeights, *, version: int, max_batch: int) -> None:
        self._decoder = decoder
        self._load_weights = load
        self._max_batch = max_batch
        self._prefill_tokens = PREFILL_TOKENS.get(decoder.model.device.type, 65_536)
        self.version = version
        self._waiting: deque[tuple[Row, Future[GenerateResult]]] = deque()
        self._running: dict[int, Future[GenerateResult]] = {}
        self._load: _Load | None = None
        self._stopping = False
        self._lock = threading.Condition()
        self._failure: BaseException | None = None
        self._progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)
        self._thread.start()

    def submit(self, row: Row) -> Future[GenerateResult]:
        """Queue a request. Raises RuntimeError when the thread has ended."""
        future: Future[GenerateResult] = Future()
        with self._lock:
            if self._stopping or self._failure is not None:
                raise RuntimeError(f"the generator has stopped: {self._failure!r}")
            self._waiting.append((row, future))
            self._lock.notify()
        return future

    def load(self, folder: Path, version: int, *, abort: bool) -> Future[None]:
        """Change weights once nothing runs; `abort` ends what runs and waits at once, with finish_reason "abort"."""
        future: Future[None] = Future()
        with self._lock:
            self._load = _Load(folder, version, abort, future)
            self._lock.notify()
        return future

    @property
    def alive(self) -> bool:
        """False when the thread ended."""
        return self._thread.is_alive()

    def stalled_seconds(self) -> float:
        """How long requests have waited without a step; 0 when there is nothing to do."""
        if not self._running and not self._waiting:
            return 0.0
        return time.monotonic() - self._progress

    def stop(self) -> None:
        """End the thread; what runs is aborted."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                batch: Batch | None = None
                while not self._stopping:
                    batch = self._round(batch)
        except BaseException as error:
            log.exception("the generator failed")
            self._failure = error
        finally:
            self._fail_all(self._failure)

    def _round(self, batch: Batch | None) -> Batch | None:
        """Change weights if asked to, let requests in, then a few steps."""
        if batch is None:
            self._wait_for_work()
        self._progress = time.monotonic()
        if self._load is not None and self._load.abort:
            self._abort(batch)
            batch = None
        if self._load is not None and batch is None:
            self._change_weights()
        if self._load is None and not self._stopping:
            batch = self._admit(batch)
        for _ in range(JOIN_EVERY):
            if batch is None or self._stopping or (self._load is not None and self._load.abort):
                break
            self._decoder.step(batch)
            self._progress = time.monotonic()
            batch = self._release(batch)
        return batch

    def _wait_for_work(self) -> None:
        with self._lock:
            while not self._waiting and self._load is None and not self._stopping:
                self._lock.wait()
            if self._load is not None or self._stopping:
                return
        deadline = time.monotonic() + GATHER_SECONDS
        with self._lock:
            while len(self._waiting) < self._max_batch and (left := deadline - time.monotonic()) > 0:
                self._lock.wait(left)

    def _admit(self, batch: Batch | None) -> Batch | None:
        """Prefill what waits, as far as the batch has room and its cache can be joined."""
        while batch is None or mergeable(batch.cache):
            rows = self._take(self._max_batch - (len(batch.rows) if batch else 0))
            if not rows:
                break
            fresh = self._release(self._decoder.prefill(rows))
            if fresh is not None:
                batch = self._decoder.join(batch, fresh)
        return batch

    def _take(self, room: int) -> list[Row]:
        """The oldest requests, at most `room`, whose padded prompts fit into one prefill."""
        rows: list[Row] = []
        longest = 0
        with self._lock:
            # Looked at under the lock: who asks after a load was asked for gets the new weights.
            while self._waiting and len(rows) < room and self._load is None:
                row, future = self._waiting[0]
                longest = max(longest, len(row.prompt))
                if rows and longest * (len(rows) + 1) > self._prefill_tokens:
                    break
                self._waiting.popleft()
                if future.cancelled():
                    continue
                self._running[id(row)] = future
                rows.append(row)
        return rows

    def _release(self, batch: Batch) -> Batch | None:
        """Answer the rows that ended and those nobody waits for any more."""
        gone = [row for row in batch.rows if row.finish_reason or self._running[id(row)].cancelled()]
        for row in gone:
            self._answer(row, self._running.pop(id(row)))
        return self._decoder.drop(batch, gone) if gone else batch

    def _answer(self, row: Row, future: Future[GenerateResult]) -> None:
        if future.set_running_or_notify_cancel():
            future.set_result(result_of(row, self.version))

    def _abort(self, batch: Batch | None) -> None:
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
        pairs = [(row, self._running.pop(id(row))) for row in batch.rows] if batch else []
        for row, future in [*pairs, *waiting]:
            row.finish_reason = row.finish_reason or "abort"
            self._answer(row, future)

    def _change_weights(self) -> None:
        with self._lock:
            load, self._load = self._load, None
        assert load is not None
        try:
            self._load_weights(load.folder)
        except Exception as error:
            load.done.set_exception(error)
        else:
            self.version = load.version
            load.done.set_result(None)

    def _fail_all(self, error: BaseException | None) -> None:
        """Nobody waits for ever on a thread that has ended."""
        reason = RuntimeError(f"the generator has stopped: {error!r}")
        with self._lock:
            futures: list[Future[Any]] = [*self._running.values(), *(future for _, future in self._waiting)]
            if self._load is not None:
                futures.append(self._load.done)
            self._running.clear()
            self._waiting.clear()
        for future in futures:
            if not future.done():
                future.set_exception(reason)


def result_of(row: Row, version: int) -> GenerateResult:
    """A finished or aborted row as arrays."""
    count = len(row.ids)
    topk = None
    if row.top_k:
        ids = np.stack(row.top_ids) if count else np.zeros((0, row.top_k), np.int32)
        values = np.stack(row.top_logprobs) if count else np.zeros((0, row.top_k), np.float32)
        topk = TokenSet(ids, values, np.isfinite(values))
    return GenerateResult(
        np.array(row.ids, dtype=np.int32),
        np.array(row.logprobs, dtype=np.float32),
        row.finish_reason,
        (VersionSpan(version, 0, count),) if count else (),
        topk,
    )
