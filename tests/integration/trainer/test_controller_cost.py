"""What the controller costs, with fakes around it, as a ratio within one run."""

from __future__ import annotations

import time
from pathlib import Path

from controller_fakes import FakeEngine, Rig, trainer_config
from virtual_time import run_virtual

from opd_api.vocabulary import Outcome


def seconds_per_sample(directory: Path, batch: int) -> float:
    """CPU time of the controller and the fakes."""

    async def main() -> float:
        config = trainer_config(directory, training={"steps": 2, "promptsPerStep": batch})
        engine = FakeEngine(latency=lambda call: 1.0 + call % 97 / 10, concurrency=batch)
        rig = Rig(directory, config=config, engine=engine)
        started = time.process_time()
        assert (await rig.controller.run()).outcome is Outcome.SUCCEEDED
        assert rig.engine.most_in_flight == batch
        return (time.process_time() - started) / (2 * batch)

    return run_virtual(main())


def test_the_cost_of_a_sample_does_not_grow_with_the_number_in_flight(tmp_path: Path) -> None:
    seconds_per_sample(tmp_path / "warm", 100)
    few, many = seconds_per_sample(tmp_path / "few", 250), seconds_per_sample(tmp_path / "many", 5000)
    assert many < 5 * few, f"{few * 1e3:.2f} ms with 250 in flight, {many * 1e3:.2f} ms with 5000"
