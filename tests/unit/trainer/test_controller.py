"""The controller over in-memory parts on a virtual clock."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from controller_fakes import FakeEngine, FakeLearner, FakeScorer, Rig, sample_error, trainer_config
from virtual_time import run_virtual

from opd_api.vocabulary import FailureClass, Outcome, Reason
from opd_trainer.sample import SampleState


def test_a_synchronous_run_trains_every_step_on_its_own_weights(tmp_path: Path) -> None:
    async def main() -> None:
        rig = Rig(tmp_path / "run", engine=FakeEngine(latency=lambda call: 1.0 + call % 3))
        final = await rig.controller.run()
        assert final.outcome is Outcome.SUCCEEDED, final
        assert final.step == 4
        assert [step for step, _ in rig.log.steps] == [1, 2, 3, 4]
        for version, batch in enumerate(rig.learner.batches):
            assert {sample.start_version for sample in batch} == {version}
            assert len(batch) == 4
        assert rig.engine.updates == [1, 2, 3]
        assert final.result is not None and (Path(final.result.exported_model or "") / "model.txt").read_text() == "4"

    run_virtual(main())
