"""Fifty random schedules, as `make chaos` plays two thousand: a fixed seed and one that nobody has seen before."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opd_chaos.campaign import Campaign

FIXED_SEED = 1003
LIVES = 25


@pytest.fixture
def quiet() -> Iterator[None]:
    """Operators that are cut off in the middle leave thousands of lines."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(900)
async def test_fifty_random_schedules_break_no_invariant(
    control_plane: Any, played_node: None, tmp_path: Path, quiet: None
) -> None:
    seeds = [FIXED_SEED, random.SystemRandom().randrange(10**6, 10**9) * 20 + 1]
    print(f"seeds {seeds}")
    campaign = Campaign(seeds, together=20, seconds=600, out=tmp_path, lives=LIVES)
    await campaign.run(control_plane.kubeconfig)
    assert campaign.complete
    assert sum(result.lives for result in campaign.results) == 50
    told = [violation for result in campaign.broken for violation in result.violations]
    assert not told, f"again: {[result.replay for result in campaign.broken]}: {told}"
