"""A run without activity ends with class Stall and says what everything waited for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from controller_fakes import FakeEngine, FakeScorer, Rig
from virtual_time import run_virtual

from opd_api.vocabulary import FailureClass, Outcome, Reason
from opd_trainer.controller.state import RunState
from opd_trainer.errors import TrainerError
from opd_trainer.watchdog import StallWatchdog


def watchdog(
    state: RunState, directory: Path, *, seconds: float = 60.0, scorer: FakeScorer | None = None
) -> StallWatchdog:
    return StallWatchdog(
        state,
        seconds=seconds,
        unavailable=lambda: scorer.unavailable if scorer is not None else None,
        describe=lambda: {"groups_running": 3},
        dump_to=directory,
    )


def test_no_activity_ends_the_run_with_a_state_dump(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(TrainerError) as error:
            await watchdog(RunState(1), tmp_path).run()
        assert asyncio.get_running_loop().time() == pytest.approx(60.0, abs=1.0)
        failure = error.value.failure
        assert (failure.failure_class, failure.reason) == (FailureClass.STALL, Reason.STALLED)
        dump = (tmp_path / "stall-step-0.txt").read_text()
        assert str(tmp_path / "stall-step-0.txt") in failure.message
        assert '"groups_running": 3' in dump
        assert "most recent call first" in dump

    run_virtual(main())


def test_activity_starts_the_clock_anew(tmp_path: Path) -> None:
    async def main() -> None:
        state = RunState(1)
        asyncio.get_running_loop().call_later(50.0, state.activity.add)
        with pytest.raises(TrainerError):
            await watchdog(state, tmp_path).run()
        assert asyncio.get_running_loop().time() == pytest.approx(110.0, abs=2.0)

    run_virtual(main())


def test_the_clock_stands_still_while_a_teacher_is_unavailable(tmp_path: Path) -> None:
    async def main() -> None:
        state, scorer = RunState(1), FakeScorer()
        loop = asyncio.get_running_loop()
        loop.call_later(10.0, setattr, scorer, "unavailable", "teacher")
        loop.call_later(1010.0, setattr, scorer, "unavailable", None)
        with pytest.raises(TrainerError):
            await watchdog(state, tmp_path, scorer=scorer).run()
        assert loop.time() == pytest.approx(1060.0, abs=4.0)
        assert state.phase_changed.is_set(), "losing and finding a teacher is reported at once"

    run_virtual(main())


def test_a_stalled_controller_saves_what_it_has(tmp_path: Path) -> None:
    async def main() -> None:
        rig = Rig(tmp_path / "run", engine=FakeEngine(latency=lambda call: 1e9 if call >= 8 else 1.0))
        final = await rig.controller.run(watchdog(rig.state, tmp_path).run())
        assert (final.outcome, final.failure_class) == (Outcome.FAILED, FailureClass.STALL)
        assert final.checkpoint is not None
        assert final.checkpoint.step == 2

    run_virtual(main())
