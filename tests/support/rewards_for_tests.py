"""Functions that run in worker processes, which import them by name."""

from __future__ import annotations

import time


def hang(response: str, answer: str) -> float:
    """A parser that never comes back."""
    time.sleep(3600)
    return 1.0


def quick(response: str, answer: str) -> float:
    """A parser that works."""
    return 0.25
