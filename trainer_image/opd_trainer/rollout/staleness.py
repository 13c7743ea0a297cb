"""How far rollouts may run ahead of training.

The formula is AReaL's: with `batch` groups a step and weights `version`, a group may start while

    min(concurrency - running, (max_staleness + version + 1) * batch - (accepted + running)) > 0.

Complete and running groups together so never exceed max_staleness + 1 batches, which is the invariant that lets
GroupBuffer.select keep every consumed sample's age within bounds without throwing anything away.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StalenessGate:
    """Counts accepted groups. `max_staleness` 0 is synchronous training."""

    batch: int
    max_staleness: int
    accepted: int = 0

    def capacity(self, *, version: int, running: int, free_slots: int) -> int:
        """Groups that may start now. `running` counts groups that are neither accepted nor gone; `free_slots` are groups
        for which the engines have room."""
        ahead = (self.max_staleness + version + 1) * self.batch - (self.accepted + running)
        return max(0, min(free_slots, ahead))

    def accept(self) -> None:
        """A group is complete and will be trained on."""
        self.accepted += 1

    def reseed(self, version: int) -> None:
        """After a resume every batch up to `version` counts as accepted; otherwise the gate would open for a burst."""
        self.accepted = version * self.batch

    @property
    def capacity_of_buffer(self) -> int:
        """Most groups that are complete or on their way at any moment: the bound of the buffer's memory."""
        return (self.max_staleness + 1) * self.batch
