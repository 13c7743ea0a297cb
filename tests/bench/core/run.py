"""The OPD core against its published peers: a table, and failure when a bar of tests/bench/bars.yaml is missed.

Every measurement is a fresh process; runs of the contestants of a case are interleaved, so that a busy minute of the
machine falls on all of them. Where the threads of a run waited for a processor for more than a tenth of its time, wall time
and the spinning of waiting threads say nothing: then one thread is measured, by its processor time. `run.py --runs 3 --case
topk` for a shorter look.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml
from bars import Measurements, check, table, waiting_share

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[2]
_DEADLINE = 600
#: Share of a run's time that its threads may wait for a processor before wall time is no measure.
_TOO_BUSY = 0.1


def _names(cases: list[str] | None) -> dict[str, list[str]]:
    """Contestants per case, by asking the file that the measuring processes read."""
    listing = _python(
        ["-c", "import json, implementations as i; print(json.dumps({n: c.case for n, c in i.CONTESTANTS.items()}))"]
    )
    by_case: dict[str, list[str]] = defaultdict(list)
    for name, case in json.loads(listing).items():
        if not cases or case in cases:
            by_case[case].append(name)
    return by_case


def _python(arguments: list[str]) -> str:
    """Standard output of the bench environment's interpreter; our core and this folder are importable there."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_HERE), str(_ROOT / "trainer_image")]),
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [str(_ROOT / ".venv-bench/bin/python"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_DEADLINE,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def _run(names: list[str], runs: int, threads: int) -> Measurements:
    measured: Measurements = {name: [] for name in names}
    for turn in range(runs):
        for name in names:
            print(f"  run {turn + 1}/{runs} {name}", end="\r", file=sys.stderr, flush=True)
            output = _python([str(_HERE / "measure.py"), name, str(threads)])
            measured[name].append(json.loads(output.splitlines()[-1]))
    print(" " * 60, end="\r", file=sys.stderr)
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", action="append", help="topk, fused or gather; all when absent")
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    options = parser.parse_args()
    subprocess.run([str(_HERE / "setup.sh")], check=True)
    bars: dict[str, Any] = yaml.safe_load((_ROOT / "tests/bench/bars.yaml").read_text())["core"]
    everything: Measurements = {}
    missed: list[str] = []
    for case, names in _names(options.case).items():
        measured = _run(names, options.runs, options.threads)
        busy = waiting_share(measured) > _TOO_BUSY
        if busy:
            measured = _run(names, options.runs, 1)
        clock = "cpu_seconds" if busy else "seconds"
        everything |= measured
        print(table(case, measured))
        print("\njudged by processor time of one thread: the machine is busy" if busy else "\njudged by wall time")
        missed += check(case, measured, bars[case], clock)
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))
    verdict = "\n".join(f"MISSED {line}" for line in missed) or "all bars met"
    print(verdict)
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f}; median over {options.runs} runs")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
