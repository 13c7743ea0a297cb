"""Prompts with checkable answers out of nothing but a seed: a stand-in until the real data is there. Standard library only."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

Question = tuple[str, str]
_NAMES = ("Ada", "Bo", "Chen", "Dara", "Emil", "Fatima", "Goran", "Hana")
_THINGS = ("apples", "books", "coins", "tickets", "marbles", "stamps")


def proxy_lines(*, seed: int, count: int) -> Iterator[str]:
    """`count` JSON lines with prompt, answer and data_source; line i depends on the seed and i alone.

    Sources alternate, so any prefix holds all of them in equal shares and routing by data source can be tried.
    """
    sources = list(_SOURCES.items())
    for number in range(count):
        source, make = sources[number % len(sources)]
        question, answer = make(random.Random(f"{seed}/{number}"))  # noqa: S311 - a reproducible file, no secret
        record = {"prompt": question, "answer": answer, "data_source": source}
        yield json.dumps(record, ensure_ascii=False)


def _arithmetic(rng: random.Random) -> Question:
    a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 12)
    form, value = rng.choice(
        ((f"{a} + {b} * {c}", a + b * c), (f"({a} + {b}) * {c}", (a + b) * c), (f"{a * c} / {c} - {b}", a - b))
    )
    return f"Compute {form}. Put the result into \\boxed{{}}.", str(value)


def _story(rng: random.Random) -> Question:
    who, other = rng.sample(_NAMES, 2)
    thing = rng.choice(_THINGS)
    have, more, times = rng.randint(3, 60), rng.randint(2, 40), rng.randint(2, 6)
    question = (
        f"{who} has {have} {thing} and gets {more} more. {other} has {times} times as many as {who} has then. "
        f"How many {thing} do they have together? Put the result into \\boxed{{}}."
    )
    return question, str((have + more) * (times + 1))


_SOURCES: dict[str, Callable[[random.Random], Question]] = {"arithmetic": _arithmetic, "story": _story}
