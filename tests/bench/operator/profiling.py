"""Where the time of one pass goes: whole lives under cProfile, divided by the passes."""

from __future__ import annotations

import pstats
import sys
from pathlib import Path
from typing import Any

from operator_jobs import eventually
from played import Player
from processes import HERE, our_operator
from stage import Stage, job, paced

ROWS = 15


async def measure_profile(stage: Stage) -> dict[str, Any]:
    """The functions with the most time of their own, in microseconds a pass."""
    namespace = stage.namespace("profile")
    names = [f"profiled{number:02d}" for number in range(stage.sizes.profiled)]
    file = stage.logs / "operator.prof"
    command = (sys.executable, str(HERE / "profiled.py"), str(file))
    with our_operator(stage.kubeconfig, namespace, stage.logs / "profile.log", command) as ours:
        await eventually("ready", ours.ready, seconds=60)
        async with Player(stage.api, namespace).playing() as player:
            for name in names:
                player.lives[name].may_end.set()
            await paced(names, lambda name: stage.api.create(job(namespace, name)))
            await player.all("succeeded", names, seconds=300)
        await ours.rest(2.0)
        passes = await ours.value("opd_operator_reconcile_seconds_count")
        waited = await ours.value("opd_operator_reconcile_seconds_sum")
        calls = await ours.calls()
    return {
        "passes": passes,
        "passes_a_job": passes / len(names),
        "milliseconds_a_pass_with_waiting": 1000 * waited / passes,
        "calls_a_pass": (calls.writes + calls.reads) / passes,
        **table(file, passes),
    }


def table(file: Path, passes: float) -> dict[str, Any]:
    """Own time of all functions, and the first rows."""
    stats = pstats.Stats(str(file))
    rows = []
    for (path, _, function), (_, calls, own, cumulative, _) in stats.stats.items():  # type: ignore[attr-defined]
        rows.append((own, calls, cumulative, _place(path, function)))
    rows.sort(reverse=True)
    total = sum(own for own, *_ in rows)
    named = [
        {
            "where": where,
            "own_microseconds_a_pass": 1e6 * own / passes,
            "with_callees_microseconds_a_pass": 1e6 * cumulative / passes,
            "calls_a_pass": calls / passes,
            "share": own / total,
        }
        for own, calls, cumulative, where in rows[:ROWS]
    ]
    return {"own_milliseconds_a_pass": 1000 * total / passes, "rows": named}


def _place(path: str, function: str) -> str:
    """`package/file.py function`, without the folders of this machine."""
    if path == "~":
        return function.strip("<>")
    parts = Path(path).parts
    for root in ("site-packages", "operator", "crds", "lib"):
        if root in parts:
            parts = parts[len(parts) - parts[::-1].index(root) :]
            break
    return f"{'/'.join(parts[-2:])} {function}"
