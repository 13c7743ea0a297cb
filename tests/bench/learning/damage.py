"""`damage.py DATA`: DATA/models/noisier, a student with more noise than the quickstart's, which heals in more steps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from recipe import NOISE, ROOT, Folders


def main() -> None:
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "examples/quickstart/prepare.py")
    assert spec is not None
    assert spec.loader is not None
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    quickstart.NOISE = NOISE
    folders = Folders(Path(sys.argv[1]))
    quickstart.once(folders.student_of("noisier"), quickstart.make_student, folders.teacher)


if __name__ == "__main__":
    main()
