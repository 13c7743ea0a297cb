"""Task rewards: exact_match, math_verify, or a function of the user's.

math_verify parses untrusted text with sympy, which can run for ever, so it runs in worker processes with a deadline.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import multiprocessing
import re
import signal
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import Failure, SampleError
from opd_trainer.rollout.entrypoints import load_entrypoint
from opd_trainer.sample import Sample

logger = logging.getLogger(__name__)
#: math_verify's own limits, in seconds; the pool is rebuilt when a worker ignores them.
PARSE_SECONDS = 5
VERIFY_SECONDS = 5
DEADLINE_SECONDS = 30.0
ENTRYPOINT_SECONDS = 60.0
WORKERS = 2

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


class MathVerify:
    """The math_verify reward on a small process pool."""

    def __init__(self, *, workers: int = WORKERS, deadline: float = DEADLINE_SECONDS) -> None:
        self._workers = workers
        self._deadline = deadline
        self._pool: ProcessPoolExecutor | None = None
        self.timeouts = 0

    async def __call__(self, sample: Sample) -> float:
        """1.0 when the response contains the answer as a mathematical object, else 0.0; 0.0 as well past the deadline."""
        return await self.run(_math_verify, sample.response_text, str(_answer_of(sample)))

    async def run(self, function: Callable[[str, str], float], response: str, answer: str) -> float:
        """`function(response, answer)` in a worker, within the deadline."""
        if self._pool is None:
            context = multiprocessing.get_context("forkserver")
            self._pool = ProcessPoolExecutor(self._workers, mp_context=context, initializer=_ignore_interrupts)
        pool = self._pool
        try:
            return await asyncio.wait_for(
                asyncio.get_running_loop().run_in_executor(pool, function, response, answer), self._deadline
            )
        except (TimeoutError, BrokenProcessPool) as error:
            self.timeouts += 1
            logger.warning("math_verify gave no answer: %s; the sample gets reward 0", type(error).__name__)
            if self._pool is pool:  # its workers hang; others that wait for it come here too
                self._pool = None
                await asyncio.to_thread(_kill, pool)
            return 0.0

    async def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await asyncio.to_thread(_kill, pool)


def _kill(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(wait=True, cancel_futures=True)


class EntrypointReward:
    """A user's `function(response: str, answer: Any, record: dict) -> float`, plain or async."""

    def __init__(self, value: str) -> None:
        self._name = value
        self._function = load_entrypoint("task.reward", value)
        self._async = inspect.iscoroutinefunction(self._function)

    async def __call__(self, sample: Sample) -> float:
        """Raises SampleError when the function raises, takes too long or returns no finite number."""
        arguments = (sample.response_text, sample.answer, sample.record)
        try:
            call = self._function(*arguments) if self._async else asyncio.to_thread(self._function, *arguments)
            value = float(await asyncio.wait_for(call, ENTRYPOINT_SECONDS))
        except TimeoutError:
            raise _reward_error(f"{self._name} took longer than {ENTRYPOINT_SECONDS:.0f} s") from None
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
