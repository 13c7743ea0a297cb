"""Many rounds, overlapping, with their progress on the screen."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from operator_player import NODE

from opd_chaos.clock import Clock
from opd_chaos.round import Result, Stage, only, play
from opd_chaos.schedule import LIVES, make_round
from opd_cluster import cluster

PREFIX = "chaos-"
#: Rounds under way; the stragglers of one leave their places to the next.
OVERLAP = 3


@contextmanager
def a_control_plane() -> Iterator[Path]:
    """API server, etcd and controllers of our own, and the one Node that pods are bound to; yields the kubeconfig."""
    name = f"{PREFIX}{os.getpid()}"
    cluster.sweep(PREFIX)
    layout = cluster.control_plane_up(name)
    try:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
        cluster.kubectl(layout, "apply", "-f", "-", input_text=json.dumps(node))
        yield layout.kubeconfig
    finally:
        cluster.down(name, purge=True)


class Campaign:
    """Plays the rounds of these seeds; see `run` and `summary`."""

    def __init__(
        self,
        seeds: Sequence[int],
        together: int,
        seconds: float,
        out: Path,
        *,
        lives: int = LIVES,
        only_life: str | None = None,
        say: Callable[[str], None] = lambda line: print(line, flush=True),
    ) -> None:
        self._seeds, self._together, self._seconds, self._out = seeds, together, seconds, out
        self._lives, self._only_life, self._say = lives, only_life, say
        self.results: list[Result] = []
        self._started = 0.0
        self._clock: Clock | None = None

    @property
    def broken(self) -> list[Result]:
        """Rounds in which an invariant was broken."""
        return [result for result in self.results if result.violations]

    @property
    def complete(self) -> bool:
        """Every round was played."""
        return len(self.results) == len(self._seeds)

    async def run(self, kubeconfig: Path) -> None:
        """Plays until all is played or the time is over."""
        self._started = time.monotonic()
        queue = iter(self._seeds)
        async with Stage.set_up(kubeconfig, self._together) as stage, asyncio.TaskGroup() as group:
            self._clock = stage.observer.clock
            for _ in range(min(OVERLAP, len(self._seeds))):
                group.create_task(self._play(stage, queue))

    async def _play(self, stage: Stage, queue: Iterator[int]) -> None:
        for seed in queue:
            if time.monotonic() - self._started > self._seconds:
                return
            plan = make_round(seed, self._lives)
            if self._only_life:
                plan = only(plan, self._only_life)
            result = await play(stage, plan)
            self.results.append(result)
            self._tell(result)
            if result.violations:
                path = result.write(self._out, plan)
                for violation in result.violations:
                    self._say(
                        f"  BROKEN {violation.rule}: {violation.job} {violation.message[:600]} (version {violation.version})"
                    )
                self._say(f"  schedule and record: {path}; again: {result.replay}")
            result.stories.clear()

    def _tell(self, result: Result) -> None:
        done = sum(item.lives for item in self.results)
        total = len(self._seeds) * result.lives
        spent = time.monotonic() - self._started
        left = spent / done * (total - done)
        had = self._clock.seconds / max(spent, 0.1) if self._clock else 1.0
        phases = ", ".join(f"{phase} {count}" for phase, count in sorted(result.phases.items()))
        self._say(
            f"{done} of {total} schedules, {len(self.broken)} rounds broken, {60 * done / spent:.1f}/min, "
            f"{left / 60:.0f} min left, {100 * had:.0f} % of the machine | seed {result.seed}: {result.seconds:.0f} s, {result.operators} operators, "
            f"{result.kills} kill -9, {result.calls} calls, {sum(result.faults.values())} faults | {phases}"
        )

    def summary(self, seconds: float) -> str:
        """One paragraph of figures."""
        faults: Counter[str] = Counter()
        phases: Counter[str] = Counter()
        for result in self.results:
            faults += result.faults
            phases += result.phases
        killed = sum(result.lives for result in self.results if result.kills)
        rules = Counter(violation.rule for result in self.results for violation in result.violations)
        return (
            f"{sum(result.lives for result in self.results)} schedules in {seconds / 60:.1f} min, {killed} of them with "
            f"{sum(result.kills for result in self.results)} real kill -9; {sum(item.operators for item in self.results)} operators, "
            f"{sum(item.calls for item in self.results)} calls, faults {dict(faults)}; ends {dict(phases)}; "
            f"{len(self.broken)} rounds broken {dict(rules)}: seeds {[item.seed for item in self.broken]}"
        )
