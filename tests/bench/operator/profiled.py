"""Runs the operator under cProfile and writes the profile when it ends: `profiled.py FILE`. Started by profile.py."""

from __future__ import annotations

import cProfile
import sys
import time

from opd_operator.main import main


def run(file: str) -> None:
    """Processor time of the loop's thread; kopf's own thread, which reads watches, is not in it."""
    profile = cProfile.Profile(time.thread_time)
    profile.enable()
    try:
        main()
    finally:
        profile.disable()
        profile.dump_stats(file)


if __name__ == "__main__":
    run(sys.argv[1])
