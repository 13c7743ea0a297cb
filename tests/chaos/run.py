"""Random schedules against the operator on a real API server: `make chaos`, or `python tests/chaos/run.py --help`.

A round is one seed: twenty lives side by side, one operator (or two), one mood of the API server. Rounds overlap so that
twenty lives are always under way. What breaks an invariant is written to a file and played again with `make chaos SEED=n`.
The schedule of a seed never changes; the order in which things meet differs from run to run.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "chaos")]

from opd_chaos.campaign import Campaign, a_control_plane  # noqa: E402
from opd_chaos.schedule import LIVES  # noqa: E402

SCHEDULES = 2000


def main() -> int:
    """Exit code 0: no invariant was broken; 1: some were; 2: it took too long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seed", type=int, help="seed of the first round; with it alone, that round is played and no other"
    )
    parser.add_argument("--schedules", type=int, help=f"lives in all, {LIVES} a round; {SCHEDULES} without --seed")
    parser.add_argument("--lives", type=int, default=LIVES, help="lives in a round")
    parser.add_argument("--together", type=int, default=LIVES, help="lives side by side")
    parser.add_argument("--life", help="play only this life of the rounds, for example job07")
    parser.add_argument("--minutes", type=float, default=90.0, help="no new round begins after so many minutes")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "chaos", help="folder for failing schedules")
    # Whoever ends us wants the control plane ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1, 10**6)
    schedules = given.schedules or (given.lives if given.seed is not None else SCHEDULES)
    rounds = max(1, round(schedules / given.lives))
    print(f"seeds {seed} to {seed + rounds - 1}: {rounds} rounds of {given.lives} lives", flush=True)
    campaign = Campaign(
        range(seed, seed + rounds),
        given.together,
        given.minutes * 60,
        given.out,
        lives=given.lives,
        only_life=given.life,
    )
    logging.disable(logging.CRITICAL)  # operators that die leave thousands of lines
    with a_control_plane() as kubeconfig:
        started = time.monotonic()
        asyncio.run(campaign.run(kubeconfig))
    print(campaign.summary(time.monotonic() - started), flush=True)
    return 1 if campaign.broken else 0 if campaign.complete else 2


if __name__ == "__main__":
    sys.exit(main())
