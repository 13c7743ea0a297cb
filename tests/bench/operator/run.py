"""The operator on a real API server and etcd, on this machine: `python tests/bench/operator/run.py [CASE …]`.

apply     children of a job, beside a bare client with the same writes
lives     whole lives: latency of the next step and of the release, cost of idle jobs
happy     the writes of one job
cold      a start on thousands of ended jobs, beside a plain kopf operator
cycles    memory while thousands of jobs come and go
rayjobs   KubeRay's rate beside ours
profile   where the time of a pass goes
kwok      whole lives with pods on played nodes of kwok

Without a case: all of them, and docs/scale.md is written. Bars are in tests/bench/bars.yaml; the exit code is 1 when one is
missed or a case fails. Kubelet, KubeRay and the trainer are played, see played.py; everything else is real.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from apply import measure_apply  # noqa: E402
from bars import Verdict, judge  # noqa: E402
from cold import measure_cold  # noqa: E402
from cycles import measure_cycles  # noqa: E402
from kwok import measure_kwok  # noqa: E402
from lives import measure_happy, measure_lives  # noqa: E402
from operator_api import Api  # noqa: E402
from page import RESULTS, save, write_page  # noqa: E402
from profiling import measure_profile  # noqa: E402
from rayjobs import measure_ray_jobs  # noqa: E402
from stage import CONTROLLER_QPS, SMALL, Sizes, Stage  # noqa: E402

from opd_cluster import cluster as clusters  # noqa: E402

PREFIX = "bench-"
BARS = ROOT / "tests" / "bench" / "bars.yaml"
CASES: dict[str, Callable[[Stage], Awaitable[dict[str, Any]]]] = {
    "apply": measure_apply,
    "lives": measure_lives,
    "happy": measure_happy,
    "profile": measure_profile,
    "rayjobs": measure_ray_jobs,
    "cold": measure_cold,
    "cycles": measure_cycles,
    "kwok": measure_kwok,
}


async def run_case(case: str, stage: Stage, bars: dict[str, float], keep: bool) -> list[Verdict] | None:
    """One case and its verdicts; None when it broke."""
    began = time.perf_counter()
    try:
        measured = await CASES[case](stage)
    except Exception:
        traceback.print_exc()
        return None
    measured["took_seconds"] = time.perf_counter() - began
    save(case, measured, RESULTS if keep else stage.logs)
    print(f"{case}: {_words(measured)}", flush=True)
    verdicts = judge(case, measured, bars)
    print("".join(f"  {verdict}\n" for verdict in verdicts), end="", flush=True)
    return verdicts


def _words(measured: dict[str, Any]) -> str:
    plain = {key: value for key, value in measured.items() if isinstance(value, int | float)}
    return ", ".join(f"{key} {value:.4g}" for key, value in plain.items())


async def bench(cases: list[str], sizes: Sizes, cluster: str, logs: Path, keep: bool) -> int:
    """All cases on one control plane; the number of faults."""
    bars = yaml.safe_load(BARS.read_text())["operator"]
    clusters.sweep(PREFIX)
    # A scheduler for kwok's nodes only: elsewhere pods are played, and it would say that there is no node.
    layout = clusters.control_plane_up(cluster, scheduler=cases == ["kwok"], controller_qps=CONTROLLER_QPS)
    verdicts: list[Verdict] = []
    broken = []
    try:
        async with Api.connect(layout.kubeconfig) as api:
            for case in cases:
                found = await run_case(case, Stage(layout, api, sizes, logs), bars.get(case, {}), keep)
                if found is None:
                    broken.append(case)
                else:
                    verdicts += found
    finally:
        clusters.down(cluster, purge=True)
    print("\n".join(str(verdict) for verdict in verdicts))
    print("\n".join(f"{case}: BROKEN, logs in {logs}" for case in broken), end="")
    return len(broken) + sum(not verdict.reached for verdict in verdicts)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--small", action="store_true", help="small numbers, to see that it works: nothing is kept")
    parser.add_argument("--cluster", default=f"{PREFIX}{os.getpid()}", help="name of the control plane")
    # Whoever ends us wants the control plane ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = parser.parse_args()
    if unknown := set(chosen.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    cases = chosen.cases or list(CASES)
    logs = Path(tempfile.mkdtemp(prefix="opd-bench-"))
    keep = not chosen.small
    # kwok's pods need the scheduler, which the other cases must not have: a control plane of its own.
    faults = 0
    for group in ([case for case in cases if case != "kwok"], [case for case in cases if case == "kwok"]):
        if group:
            faults += asyncio.run(bench(group, SMALL if chosen.small else Sizes(), chosen.cluster, logs, keep))
    if keep:
        write_page()
    print("every bar was reached" if not faults else f"{faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
