"""Task rewards: exact_match, math_verify, or a function of the user's.

math_verify parses untrusted text with sympy, which can run for ever, so it runs in worker processes with a deadline.
Deadlines are of the work itself: how long an item waits for its turn says nothing about it.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import re
import signal
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import Failure, SampleError, TrainerError
from opd_trainer.rollout import user_calls
from opd_trainer.rollout.user_calls import CallCancelledError, LateError, UserFunction, within
from opd_trainer.sample import Sample

logger = logging.getLogger(__name__)
#: math_verify's own limits, in seconds; a worker that ignores them is killed at the deadline.
PARSE_SECONDS = 5
VERIFY_SECONDS = 5
DEADLINE_SECONDS = 30.0
WORKERS = 2
#: How long a worker may take to come up with sympy loaded, and how often it is tried.
START_SECONDS = 120.0
START_TRIES = 2
#: An item under which this many workers died is the one that kills them.
ITEM_TRIES = 2

T = TypeVar("T")
Reward = Callable[[Sample], Awaitable[float]]
_MARKERS = re.compile(r"(?:####|\banswer\s*(?:is)?\s*:)", re.IGNORECASE)


def exact_match(response: str, answer: Any) -> float:
    """1.0 when the answer equals the whole response, its last line, what follows the last `####` or `Answer:`, or the
    last \\boxed{...}; white space at the ends, a final full stop and case are ignored."""
    wanted = _plain(str(answer))
    lines = [line for line in response.splitlines() if line.strip()]
    candidates = [response, lines[-1] if lines else "", _MARKERS.split(response)[-1], last_boxed(response) or ""]
    return float(any(_plain(candidate) == wanted for candidate in candidates))


def _plain(text: str) -> str:
    return text.strip().removesuffix(".").strip().casefold()


def last_boxed(text: str) -> str | None:
    """Content of the last \\boxed{...} with balanced braces."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for position in range(begin - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return None


def _ignore_interrupts() -> None:
    # Ctrl-C reaches the whole process group; the controller decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _math_verify(response: str, answer: str) -> float:
    """Runs in a worker: math_verify's time limits use SIGALRM and so need a main thread."""
    from math_verify import parse, verify

    gold = parse(answer if "\\boxed" in answer or "$" in answer else f"${answer}$", parsing_timeout=PARSE_SECONDS)
    given = parse(response, parsing_timeout=PARSE_SECONDS)
    return float(bool(verify(gold, given, timeout_seconds=VERIFY_SECONDS)))


def _load_math_verify() -> None:
    """Runs in a worker before its first item: importing sympy takes seconds, which are not the item's."""
    import math_verify  # noqa: F401


class _WorkerLostError(Exception):
    """The worker died, or was ended, before its item was done."""


class _Worker:
    """One process that has one item at a time: an item that hangs or kills it costs no other item anything."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def run(self, function: Callable[[str, str], float], response: str, answer: str, seconds: float) -> float:
        """Raises LateError `seconds` after the process took the item, _WorkerLostError, or TrainerError(Internal)."""
        if self._pool is None:
            await self._start()
        return await self._call(seconds, function, response, answer)

    async def _start(self) -> None:
        """Have a process that waits for an item."""
        for _ in range(START_TRIES):
            try:
                return await self._call(START_SECONDS, _load_math_verify)
            except (LateError, _WorkerLostError) as error:
                logger.warning("a worker of math_verify did not start: %r", error)
        raise TrainerError(
            FailureClass.INTERNAL,
            Reason.INTERNAL_ERROR,
            f"no worker process of math_verify came up in {START_TRIES} tries; give the trainer more memory (ray.head)",
        )

    async def _call(self, seconds: float, function: Callable[..., T], *arguments: str) -> T:
        if self._pool is None:
            context = multiprocessing.get_context("forkserver")
            self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_ignore_interrupts)
        try:
            return await within(asyncio.wrap_future(self._pool.submit(function, *arguments)), seconds)
        except (BrokenProcessPool, CallCancelledError) as error:
            self.end()
            raise _WorkerLostError(str(error)) from error
        except (LateError, asyncio.CancelledError):  # the process still works on it: the next item gets another one
            self.end()
            raise

    def end(self, *, wait: bool = False) -> None:
        """Kill the process; `wait` until it is gone."""
        if self._pool is None:
            return
        pool, self._pool = self._pool, None
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(wait=wait, cancel_futures=True)


class MathVerify:
    """The math_verify reward on a few worker processes."""

    def __init__(self, *, workers: int = WORKERS, deadline: float = DEADLINE_SECONDS) -> None:
        self._deadline = deadline
        self._workers = [_Worker() for _ in range(workers)]
        # The last one back goes first: a process that runs is taken before another one is started.
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._idle.put_nowait(worker)
        self.timeouts = 0

    async def __call__(self, sample: Sample) -> float:
        """1.0 when the response contains the answer as a mathematical object, else 0.0; 0.0 as well past the deadline."""
        return await self.run(_math_verify, sample.response_text, str(_answer_of(sample)))

    async def run(self, function: Callable[[str, str], float], response: str, answer: str) -> float:
        """`function(response, answer)` in a worker, within the deadline, which begins when a worker takes it.

        0.0 past the deadline, and when the worker died under it twice. Raises TrainerError(Internal) when no worker starts.
        """
        worker = await self._idle.get()
        try:
            for _ in range(ITEM_TRIES):
                try:
                    return await worker.run(function, response, answer, self._deadline)
                except _WorkerLostError as error:
                    fault = f"its process died ({error})"
                except TimeoutError:
                    fault = f"it took longer than {self._deadline:g} s"
                    break
            self.timeouts += 1
            logger.warning("math_verify gave no answer: %s; the sample gets reward 0", fault)
            return 0.0
        finally:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        """End the workers."""
        await asyncio.gather(*(asyncio.to_thread(worker.end, wait=True) for worker in self._workers))


class EntrypointReward:
    """A user's `function(response: str, answer: Any, record: dict) -> float`, plain or async."""

    def __init__(self, value: str) -> None:
        self._name = value
        self._function = UserFunction("task.reward", value)

    async def __call__(self, sample: Sample) -> float:
        """Raises SampleError when the function raises, takes too long or returns no finite number."""
        try:
            value = float(await self._function(sample.response_text, sample.answer, sample.record))
        except LateError:
            raise _reward_error(f"{self._name} took longer than {user_calls.CALL_SECONDS:g} s") from None
        except CallCancelledError:
            raise _reward_error(f"{self._name} was cancelled by something that it waited for") from None
        except Exception as error:
            raise _reward_error(f"{self._name} raised {type(error).__name__}: {error}") from error
        if value != value or value in (float("inf"), float("-inf")):
            raise _reward_error(f"{self._name} returned {value}")
        return value


async def _exact_match(sample: Sample) -> float:
    return exact_match(sample.response_text, _answer_of(sample))


def _answer_of(sample: Sample) -> Any:
    if sample.answer is None:
        raise _reward_error("the sample has no reference answer (data.answerField)")
    return sample.answer


def _reward_error(message: str) -> SampleError:
    return SampleError(Failure(FailureClass.DATA, Reason.DATA_ERROR, message))


def build_reward(value: str) -> Reward | None:
    """`task.reward` -> a reward; None for `none`. Raises TrainerError(Config) for an entry point that cannot be imported."""
    if value == "none":
        return None
    if value == "exact_match":
        return _exact_match
    if value == "math_verify":
        return MathVerify()
    return EntrypointReward(value)


def needs_answer(value: str) -> bool:
    """Whether the data must have data.answerField."""
    return value in ("exact_match", "math_verify")
