"""Calls of the learner group whose caller goes away, and the step that a checkpoint claims to be of."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from opd_testing import learner as testing
from opd_testing.configs import trainer_config

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError
from opd_trainer.learner.checkpoints import MANIFEST, check_step
from opd_trainer.learner.group import LearnerGroup
from opd_trainer.learner.packing import Layout
from opd_trainer.learner.rank import RankFacts


class SlowActor:
    """The Ray side of a rank whose every call takes a moment. Nobody can stop it."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, method: str) -> Any:
        return SlowMethod(self, method)


class SlowMethod:
    """One method of a `SlowActor`."""

    def __init__(self, actor: SlowActor, name: str) -> None:
        self._actor = actor
        self._name = name

    def remote(self, *arguments: Any) -> asyncio.Future[None]:
        self._actor.called.append(self._name)
        return asyncio.ensure_future(asyncio.sleep(0.05))


def slow_group(tmp_path: Path) -> tuple[LearnerGroup, SlowActor]:
    group = LearnerGroup(trainer_config(tmp_path), total_steps=1)
    group._actors = [SlowActor()]
    group._facts = RankFacts(Layout.PADDED, fused_head=True, parameters=1, steps=0)
    return group, group._actors[0]


async def given_up(call: Any, actor: SlowActor, method: str) -> None:
    """Cancel a call once it has reached the actor."""
    task = asyncio.create_task(call)
    while method not in actor.called:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


async def test_nothing_is_saved_or_published_after_a_step_whose_end_nobody_saw(tmp_path: Path) -> None:
    group, actor = slow_group(tmp_path)
    await given_up(group.step(testing.samples(2), 0), actor, "step")
    for call in (group.save, group.publish, group.export):
        with pytest.raises(TrainerError, match="belong to no step that is in the books") as caught:
            await call(tmp_path / "never")
        assert caught.value.failure.reason is Reason.LEARNER_FAILED
    assert actor.called == ["step"]


async def test_a_save_that_is_given_up_may_be_tried_again(tmp_path: Path) -> None:
    group, actor = slow_group(tmp_path)
    await given_up(group.save(tmp_path / "once"), actor, "save")
    await group.save(tmp_path / "again")
    assert actor.called == ["save", "save"]


async def test_a_step_that_is_given_up_before_it_reaches_the_ranks_spoils_nothing(tmp_path: Path) -> None:
    group, actor = slow_group(tmp_path)
    saving = asyncio.create_task(group.save(tmp_path / "checkpoint"))
    step = asyncio.create_task(group.step(testing.samples(2), 0))
    await asyncio.sleep(0.01)  # the step waits for its turn behind the save
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    await saving
    await group.publish(tmp_path / "weights")
    assert actor.called == ["save", "publish"]


@pytest.mark.parametrize("steps", [40, None])
def test_a_checkpoint_whose_halves_are_of_one_step_is_taken(tmp_path: Path, steps: int | None) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps({"step": 40}))
    check_step(tmp_path / "learner", steps)


def test_a_checkpoint_whose_weights_are_of_another_step_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps({"step": 40}))
    with pytest.raises(TrainerError, match=r"of step 40, but its weights have 41 steps .*remove the folder") as caught:
        check_step(tmp_path / "learner", 41)
    assert (caught.value.failure.failure_class, caught.value.failure.reason) == (
        FailureClass.CONFIG,
        Reason.CONFIG_ERROR,
    )
