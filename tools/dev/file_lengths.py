"""`make check`: no source file has more than 400 lines. A file that grows past it wants to be two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 400
SOURCES = ("*.py", "*.go", "*.sh", "*.tpl")


def too_long(root: Path = ROOT, limit: int = LIMIT) -> list[str]:
    """`path: lines` of the tracked and the new source files below `root` that are too long."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *SOURCES]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()
    counts = {name: (root / name).read_bytes().count(b"\n") for name in names if (root / name).is_file()}
    return [f"{name}: {count} lines" for name, count in sorted(counts.items()) if count > limit]


if __name__ == "__main__":
    found = too_long()
    for line in found:
        print(f"{line}, the limit is {LIMIT}", file=sys.stderr)
    sys.exit(1 if found else 0)
