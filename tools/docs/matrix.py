"""Writes docs/failure-matrix.md: what was seen when the failures of the table were brought about.

Without arguments (`make matrix`): brings them about, those of opd_failures.on_cluster_rows on a real cluster (OPD_CLUSTER, by
default `e2e`; one that is not up is started and removed) and those of opd_failures.at_api on a real API server, keeps what was
seen in docs/failure-matrix.json and writes the page. Ends with 1 when a row is not answered as the table says, was not shown
at all, or was answered otherwise than in the last run. `--cluster` and `--api` run one of the two and keep the other's rows.
`--page` runs nothing and writes the page again; `--check` writes nothing either, and ends with 1 when the page is stale or a row
that was seen is not what the table says by now.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from opd_failures import FAILURES  # noqa: E402
from opd_failures.at_api import AT_API, AT_API_TEST  # noqa: E402
from opd_failures.live import RESULTS, Seen, differences  # noqa: E402
from opd_failures.on_cluster import ON_CLUSTER_TEST  # noqa: E402
from opd_failures.on_cluster_rows import ON_CLUSTER  # noqa: E402
from opd_failures.row import Failure, Step  # noqa: E402

PAGE = ROOT / "docs" / "failure-matrix.md"
KEPT = ROOT / "docs" / "failure-matrix.json"
COLUMNS = ("what happens", "shown on", "class", "reason", "condition", "message", "hint", "attempts", "end", "left")
#: Cells that two runs have in common; a message may name another node or another signal of the same fault.
STABLE = ("failure_class", "reason", "hint", "attempts", "teacher_restarts", "end", "left")
#: The rows of each place, and the test that brings them about.
CLUSTER_IDS = {name for group in ON_CLUSTER.values() for name in group}
PLACES = {"cluster": (CLUSTER_IDS, ON_CLUSTER_TEST), "API server": (set(AT_API), AT_API_TEST)}
HEAD = """\
# The failure matrix, as it was seen

<!-- Written by `make matrix`; `make check` fails when it is not what docs/failure-matrix.json and the table say. -->

Each row was brought about and watched; [failures.md](failures.md) says what has to follow, this page what was seen. Jobs ran with
`backoffLimit: 0`, so that one failure of the cluster ends them; one new attempt after a fault of ours, a stall or a teacher is made
whatever that limit is.

- **shown on** *cluster*: the embedded cluster with its real scheduler, kubelets, containerd, quota and admission, KubeRay and Ray,
  and the operator in its pod. The check's own findings come from the real trainer; elsewhere a stand-in of one file takes the
  trainer's place, and the fault is done to it from outside. *API server*: real API server, controllers and operator process;
  kubelet, KubeRay and trainer are played.
- **class** is of the first attempt; in brackets the table's, where no attempt had begun and the status names none.
- **attempts**: RayJobs made; **left**: Deployments, Services, RayJobs, RayClusters, unfinished Jobs, pods with accelerators.
"""


def bring_about(place: str, folder: Path) -> bool:
    """Run the test of a place. Returns whether it passed."""
    test = PLACES[place][1]
    started = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", test.split("[")[0]]
    passed = subprocess.run(command, cwd=ROOT, env={**os.environ, RESULTS: str(folder)}, check=False).returncode == 0
    print(f"{place}: {len(PLACES[place][0])} rows in {time.monotonic() - started:.0f} s", flush=True)
    return passed


def read(text: str) -> Seen:
    values = json.loads(text)
    return Seen(**{item.name: tuple(v) if isinstance(v := values[item.name], list) else v for item in fields(Seen)})


def kept() -> dict[tuple[str, str], Seen]:
    """Rows of the last run, by place and failure."""
    found = map(json.dumps, json.loads(KEPT.read_text())) if KEPT.exists() else ()
    return {(row.where, row.id): row for row in map(read, found)}


def missing(rows: dict[tuple[str, str], Seen]) -> list[str]:
    """Rows that nobody has seen yet."""
    wanted = [(place, name) for place, (names, _) in PLACES.items() for name in sorted(names)]
    return [f"{place}: {name} was not shown" for place, name in wanted if (place, name) not in rows]


def problems(rows: dict[tuple[str, str], Seen]) -> list[str]:
    """Rows that are not answered as the table says."""
    table = {failure.id: failure for failure in FAILURES}
    return [
        f"{place}: {name}: {what}"
        for (place, name), row in rows.items()
        for what in (differences(table[name], row) if name in table else ["is in no table"])
    ]


def changes(old: dict[tuple[str, str], Seen], new: dict[tuple[str, str], Seen]) -> list[str]:
    """Stable cells that were otherwise in the last run."""
    return [
        f"{place}: {name}: {cell} was {getattr(old[place, name], cell)!r}, is {getattr(row, cell)!r}"
        for (place, name), row in new.items()
        if (place, name) in old
        for cell in STABLE
        if getattr(old[place, name], cell) != getattr(row, cell)
    ]


def page(rows: dict[tuple[str, str], Seen]) -> str:
    """The whole page: the cluster's row of a failure, else the API server's."""
    shown = {
        failure.id: rows.get(("cluster", failure.id)) or rows.get(("API server", failure.id)) for failure in FAILURES
    }
    counts = {place: sum(row is not None and row.where == place for row in shown.values()) for place in PLACES}
    counted = ", ".join(f"{count} on the {place}" for place, count in counts.items())
    unseen = [f"`{name}`" for name, row in shown.items() if row is None]
    rest = f" By tests of their own only (failures.md names them): {', '.join(unseen)}." if unseen else ""
    parts = [HEAD, f"{len(FAILURES)} failures: {counted}.{rest}\n"]
    for step in Step:
        table = [_row(failure, row) for failure in FAILURES if failure.step is step and (row := shown[failure.id])]
        if table:
            head = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"
            parts.append("\n".join([f"## {step.value}\n", head, *table, ""]))
    return "\n".join(parts)


def _row(failure: Failure, row: Seen) -> str:
    known = failure.failure_class.value if failure.failure_class else "–"
    restarts = f", {row.teacher_restarts} restart of the teacher" if row.teacher_restarts else ""
    cells = (
        failure.fault,
        row.where,
        row.failure_class or (f"({known})" if failure.failure_class else known),
        f"`{row.reason}`",
        "<br>".join(row.told),
        row.message,
        row.hint or "–",
        f"{row.attempts}{restarts}",
        row.end,
        ", ".join(row.left) or "nothing",
    )
    return f"| {' | '.join(cell.replace('|', '¦').replace(chr(10), ' ') for cell in cells)} |"


def write(rows: dict[tuple[str, str], Seen]) -> None:
    order = {failure.id: number for number, failure in enumerate(FAILURES)}
    found = sorted(rows.values(), key=lambda row: (order.get(row.id, len(order)), row.where))
    KEPT.write_text(json.dumps([asdict(row) for row in found], indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(rows))


def main(argv: list[str] | None = None) -> int:
    """Returns 1 on a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="run and write nothing")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page again")
    parser.add_argument("--cluster", action="store_true", help="only the rows of the cluster")
    parser.add_argument("--api", action="store_true", help="only the rows of the API server")
    options = parser.parse_args(argv)
    old = kept()
    if options.check:
        wrong = problems(old) + ([] if PAGE.exists() and PAGE.read_text() == page(old) else [f"stale: {PAGE.name}"])
        if wrong:
            print("\n".join([*wrong, "run `make generate`, or `make matrix`, and commit the result"]), file=sys.stderr)
        return int(bool(wrong))
    if options.page:
        write(old)
        return 0
    both = options.cluster == options.api
    places = [place for place, one in (("cluster", options.cluster), ("API server", options.api)) if both or one]
    with tempfile.TemporaryDirectory() as folder:
        passed = [bring_about(place, Path(folder)) for place in places]
        new = {(row.where, row.id): row for row in (read(file.read_text()) for file in Path(folder).glob("*.json"))}
    rows = {key: row for key, row in old.items() if key[0] not in places} | new
    wrong = missing(rows) + problems(rows) + changes(old, new)
    write(rows)
    print("\n".join([f"written: {PAGE.name}, {len(new)} rows seen", *wrong]))
    return int(bool(wrong) or not all(passed))


if __name__ == "__main__":
    sys.exit(main())
