"""A failure that cuts the pumps off while the ranks compute a step, which they finish all the same; virtual clock."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from controller_fakes import FakeEngine, FakeLearner, FakeScorer, Rig, resumed, trainer_config
from virtual_time import run_virtual

from opd_api.vocabulary import FailureClass, Outcome, Reason
from opd_trainer.controller.run import LAST_SAVE_SECONDS
from opd_trainer.errors import TrainerError
from opd_trainer.sample import SampleState

#: Rollouts and scores take a second each, so the third batch is being scored while the second one is trained.
STEP_SECONDS = 20.0


def losing_its_teacher(directory: Path, *, learner: FakeLearner) -> Rig:
    """An asynchronous run without checkpoints on the way whose teacher is lost in the middle of step 2."""
    lost = TrainerError(FailureClass.TEACHER, Reason.TEACHER_ERROR, "no replica for half an hour")
    scorer = FakeScorer(latency=lambda call: 1.0)
    scorer.faults = lambda sample: lost if sample.group_id >= 8 else None
    config = trainer_config(
        directory, rollout={"maxStaleness": 1}, training={"steps": 6, "checkpoint": {"everySteps": 100}}
    )
    return Rig(
        directory,
        config=config,
        prompts=24,
        engine=FakeEngine(latency=lambda call: 1.0),
        scorer=scorer,
        learner=learner,
    )


def updates_in(checkpoint: str) -> int:
    """Updates behind the weights of a checkpoint."""
    return int(json.loads((Path(checkpoint) / "learner" / "learner.json").read_text())["updates"])


def test_a_step_that_the_ranks_compute_while_the_run_fails_is_booked_before_the_checkpoint(tmp_path: Path) -> None:
    async def main() -> None:
        directory = tmp_path / "run"
        first = losing_its_teacher(directory, learner=FakeLearner(seconds=STEP_SECONDS))
        final = await first.controller.run()
        assert (final.outcome, final.reason) == (Outcome.FAILED, Reason.TEACHER_ERROR)
        assert final.checkpoint is not None
        assert final.step == final.checkpoint.step == updates_in(final.checkpoint.path) == 2
        first.controller.buffer.check()
        assert first.controller.buffer.exits[SampleState.CONSUMED] == 8

        second = resumed(directory, first, "step-2.a1", prompts=24)
        assert (await second.controller.run()).outcome is Outcome.SUCCEEDED
        used = Counter(first.consumed_prompts + second.consumed_prompts)
        assert used == Counter(f"prompt {row}" for row in range(24)), "one epoch: every prompt exactly once"

    run_virtual(main())


def test_a_step_that_outlasts_the_time_for_the_last_save_is_not_saved_under_the_step_before(tmp_path: Path) -> None:
    async def main() -> None:
        rig = losing_its_teacher(tmp_path / "run", learner=FakeLearner(seconds=1000.0))
        final = await rig.controller.run()
        assert (final.outcome, final.reason, final.step) == (Outcome.FAILED, Reason.TEACHER_ERROR, 1)
        assert rig.store.committed == []
        assert asyncio.get_running_loop().time() == pytest.approx(1000.0 + LAST_SAVE_SECONDS, abs=10.0)

    run_virtual(main())


@pytest.mark.parametrize("end", [ZeroDivisionError("boom"), asyncio.CancelledError()])
def test_a_step_that_fails_after_it_was_cut_off_is_not_booked_and_hides_no_reason(
    tmp_path: Path, end: BaseException
) -> None:
    async def main() -> None:
        learner = FakeLearner(seconds=STEP_SECONDS)
        learner.faults = lambda step: end if step == 1 else None
        final = await losing_its_teacher(tmp_path / "run", learner=learner).controller.run()
        assert (final.outcome, final.reason) == (Outcome.FAILED, Reason.TEACHER_ERROR)
        assert final.checkpoint is not None
        assert final.step == final.checkpoint.step == updates_in(final.checkpoint.path) == 1

    run_virtual(main())


def test_a_slow_step_that_the_watchdog_cuts_off_is_booked_too(tmp_path: Path) -> None:
    async def main() -> None:
        async def watch() -> None:
            await asyncio.sleep(1.5 * STEP_SECONDS)
            raise TrainerError(FailureClass.STALL, Reason.STALLED, "nothing moves")

        rig = Rig(tmp_path / "run", learner=FakeLearner(seconds=STEP_SECONDS))
        final = await rig.controller.run(watch())
        assert final.reason == Reason.STALLED
        assert final.checkpoint is not None
        assert final.step == final.checkpoint.step == updates_in(final.checkpoint.path) == 2

    run_virtual(main())
