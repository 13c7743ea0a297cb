"""How calls to the API server are repeated: few times each, and few in all.

A budget shared by all calls keeps an API server in trouble from being answered with a multiple of the usual load.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class RetryPolicy:
    """Attempts of one call and the waits between them, in seconds."""

    attempts: int = 5
    base_seconds: float = 0.1
    limit_seconds: float = 5.0

    def delay(self, failures: int, asked: float | None) -> float:
        """Seconds before the next attempt after that many failures; never less than the server asked for."""
        backoff = min(self.limit_seconds, self.base_seconds * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0)  # noqa: S311
        return max(backoff, asked or 0.0)


class RetryBudget:
    """Tokens for retries: every call earns a fraction of one, every retry costs one."""

    def __init__(self, *, capacity: float = 50.0, earned_per_call: float = 0.5) -> None:
        self._capacity = capacity
        self._earned = earned_per_call
        self._tokens = capacity

    def earn(self) -> None:
        """A call was made."""
        self._tokens = min(self._capacity, self._tokens + self._earned)

    def spend(self) -> bool:
        """Takes one token; False when there is none."""
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
