"""Which processes live below this one."""

from __future__ import annotations

import os
from pathlib import Path


def descendants() -> set[int]:
    """Pids below this process, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text()
        except OSError:
            continue
        parent = int(stat.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(int(entry))
    found: set[int] = set()
    pending = [os.getpid()]
    while pending:
        for pid in children.get(pending.pop(), []):
            found.add(pid)
            pending.append(pid)
    return found
