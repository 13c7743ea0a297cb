"""Functions that run in worker processes, which import them by name."""

from __future__ import annotations

import os
import time
from pathlib import Path


def hang(response: str, answer: str) -> float:
    """A parser that never comes back."""
    time.sleep(3600)
    return 1.0


def nothing() -> None:
    """What a worker does before its first item, without the seconds that sympy takes."""


def load_slowly() -> None:
    """What a worker does before its first item on a busy machine."""
    time.sleep(1.5)


def give_up() -> None:
    """A worker that ends before it takes anything, as one for which there is no memory."""
    os._exit(1)


def quick(response: str, answer: str) -> float:
    """A parser that works."""
    return 0.25


def slow(response: str, answer: str) -> float:
    """A parser that takes its time, but less than it has."""
    time.sleep(0.4)
    return 0.5


def die(response: str, answer: str) -> float:
    """A parser that takes its process with it; only the first time when the answer is a file to be made."""
    if answer and Path(answer).exists():
        return 0.75
    if answer:
        Path(answer).touch()
    os._exit(1)
