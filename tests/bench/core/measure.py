"""Measure one contestant once, in this process: `measure.py NAME` prints one line of JSON.

Peak is VmHWM after the run minus RSS before it, with malloc handing every large buffer back
(MALLOC_MMAP_THRESHOLD_=65536, set by run.py): freed heap would otherwise hide an allocation.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from implementations import CONTESTANTS, Problem

_SMALL = Problem(batch=1, length=8, vocabulary=512, size=4, hidden=16)


def _status(field: str) -> float:
    """A memory field of this process, MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def _waited() -> float:
    """Seconds that threads of this process stood ready without a processor: field 2 of schedstat, proc(5)."""
    return sum(int(file.read_text().split()[1]) for file in Path("/proc/self/task").glob("*/schedstat")) / 1e9


def measure(name: str, threads: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    contestant = CONTESTANTS[name]
    # A small run first: imports, thread pools and lazily loaded kernels are nobody's memory.
    contestant.prepare(_SMALL)().backward()
    forward = contestant.prepare(Problem())
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _status("VmRSS")
    waited = _waited()
    cpu, start = time.process_time(), time.perf_counter()
    loss = forward()
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    return {
        "loss": loss.item(),
        "forward_seconds": middle - start,
        "backward_seconds": end - middle,
        "seconds": end - start,
        "cpu_seconds": time.process_time() - cpu,
        "waited_seconds": _waited() - waited,
        "peak_mib": _status("VmHWM") - before,
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
