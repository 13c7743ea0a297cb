"""Means over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor


class Meter:
    """Weighted sums by name; `reduce` makes means over all ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, name: str, value: Tensor | float, weight: float = 1.0) -> None:
        """A mean over `weight` things. Weight 0 counts for nothing, whatever the value is."""
        if weight <= 0:
            return
        entry = self._sums.setdefault(name, [0.0, 0.0])
        entry[0] += float(value) * weight
        entry[1] += weight

    def add_all(self, values: Mapping[str, Tensor], weight: float) -> None:
        """Several means over the same things."""
        for name, value in values.items():
            self.add(name, value, weight)

    def total(self, name: str, value: float) -> None:
        """Something that is summed and not averaged."""
        self._sums.setdefault(name, [0.0, 0.0])[0] += value

    def reduce(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """Means (totals where there is no weight) over all ranks. A collective of small objects."""
        gathered: list[dict[str, list[float]] | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, self._sums, group=group)
        merged: dict[str, list[float]] = {}
        for sums in gathered:
            for name, (value, weight) in (sums or {}).items():
                entry = merged.setdefault(name, [0.0, 0.0])
                entry[0] += value
                entry[1] += weight
        return {name: value / weight if weight else value for name, (value, weight) in merged.items()}
