"""Run pytest in both environments and end with one summed line: `N passed, N failed, N skipped`.

What the tiers start is built first: a test's deadline is for the test, not for the compiler of a fresh machine.
The unit tiers of both environments run side by side: what one prints comes when the other has ended.

`run_tests.py landing` is what `make test` runs (unit, integration, e2e marked smoke); `run_tests.py all` runs everything,
`run_tests.py unit` only the unit tier. A run that collects nothing, or breaks before it reports, counts as one failure.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
OPERATOR = ROOT / ".venv/bin/python"
TRAINER = ROOT / ".venv-trainer/bin/python"


@dataclass(frozen=True)
class Run:
    """One pytest process."""

    name: str
    python: Path
    paths: tuple[str, ...]
    #: Marker expression in the landing set; None takes every test.
    landing: str | None = "not long"
    #: More words for pytest. Unit tests share nothing, so they can run in several processes; clusters and servers are shared.
    options: tuple[str, ...] = ()


#: One more than processors: a test that waits leaves its processor to another, and a fork costs nothing.
FORKS = ("--processes", str(2 + (os.cpu_count() or 1)))
UNIT = (
    Run(
        "unit, operator environment",
        OPERATOR,
        (
            "tests/unit/api",
            "tests/unit/operator",
            "tests/unit/chart",
            "tests/unit/cli",
            "tests/unit/cluster",
            "tests/unit/dev",
            "tests/unit/docs",
        ),
    ),
    Run("unit, trainer environment", TRAINER, ("tests/unit/core", "tests/unit/trainer"), options=FORKS),
)
INTEGRATION = (
    Run("integration, operator environment", OPERATOR, ("tests/integration/cluster", "tests/integration/operator")),
    Run("integration, trainer environment", TRAINER, ("tests/integration/trainer",)),
)
E2E = (Run("e2e, whole cluster", OPERATOR, ("tests/e2e",), landing="smoke"),)


#: Words for `opd-cluster build`, by selection.
LANDING_NEEDS = "helm kubernetes pause coredns kube-router kuberay operator trainer trainer-sglang"
NEEDS = {"unit": "helm", "landing": LANDING_NEEDS, "all": f"{LANDING_NEEDS} kueue"}


@dataclass
class Tally:
    """Counts over all runs."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    lines: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Take over another's counts."""
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        self.lines += other.lines


def build(words: Sequence[str], tally: Tally) -> None:
    """Build programs and images into the cache. What cannot be built is one failure; tiers that need none of it still run."""
    started = time.monotonic()
    code = subprocess.run([OPERATOR.with_name("opd-cluster"), "build", *words], cwd=ROOT, check=False).returncode
    tally.failed += code != 0
    tally.lines.append(f"build: {'done' if code == 0 else 'failed'} in {time.monotonic() - started:.0f} s")


def side_by_side(runs: Sequence[Run], everything: bool, tally: Tally) -> None:
    """Runs that share nothing, at once. The last one is seen while it runs, the others when all have ended."""
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(len(runs)) as pool:
        files = [(Path(scratch) / str(index)).open("w+") for index in range(len(runs) - 1)]
        own = [Tally() for _ in runs]
        started = [
            pool.submit(execute, run, everything, its, file)
            for run, its, file in zip(runs, own, [*files, None], strict=True)
        ]
        wait(started)
        for run, file in zip(runs, files, strict=False):
            file.seek(0)
            print(f"\n=== {run.name}\n{file.read()}", flush=True)
            file.close()
        for done, its in zip(started, own, strict=True):
            done.result()  # what could not even start must not look green
            tally.add(its)


def execute(run: Run, everything: bool, tally: Tally, output: IO[str] | None = None) -> None:
    """Run one pytest process and add its counts. `output` takes what it prints; None: it is seen at once."""
    paths = [path for path in run.paths if (ROOT / path).is_dir()]
    if not paths:
        return
    started = time.monotonic()
    if output is None:
        print(f"\n=== {run.name}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        marker = [] if everything or run.landing is None else ["-m", run.landing]
        code = subprocess.run(
            [str(run.python), "-m", "pytest", "-q", f"--junitxml={report}", *marker, *run.options, *paths],
            cwd=ROOT,
            check=False,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
        ).returncode
        counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
        if report.exists():
            for suite in ElementTree.parse(report).getroot().iter("testsuite"):  # noqa: S314 - written by our own pytest
                for name in counts:
                    counts[name] += int(suite.get(name, 0))
    failed = counts["failures"] + counts["errors"]
    if code not in (0, 1) or (code == 1 and failed == 0):
        # Usage error, internal error, nothing collected, or killed: never green.
        failed += 1
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    tally.passed += passed
    tally.failed += failed
    tally.skipped += counts["skipped"]
    tally.lines.append(
        f"{run.name}: {passed} passed, {failed} failed, {counts['skipped']} skipped in {time.monotonic() - started:.0f} s"
    )


def main() -> int:
    selection = sys.argv[1] if len(sys.argv) > 1 else "landing"
    others = {"unit": (), "landing": (*INTEGRATION, *E2E), "all": (*INTEGRATION, *E2E)}.get(selection)
    if others is None:
        print(f"run_tests.py: write unit, landing or all, not '{selection}'", file=sys.stderr)
        return 64
    tally = Tally()
    build(NEEDS[selection].split(), tally)
    side_by_side(UNIT, selection == "all", tally)
    for run in others:
        execute(run, selection == "all", tally)
    print()
    print("\n".join(tally.lines))
    print(f"{tally.passed} passed, {tally.failed} failed, {tally.skipped} skipped", flush=True)
    return 1 if tally.failed or not tally.passed else 0


if __name__ == "__main__":
    sys.exit(main())
