"""Which of several complaints about one dead rank is told."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from opd_testing.configs import trainer_config
from ray.exceptions import ActorDiedError

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import Failure, TrainerError
from opd_trainer.learner import group as group_module
from opd_trainer.learner.group import LearnerGroup

LOST = Failure(FailureClass.INFRASTRUCTURE, Reason.LEARNER_FAILED, "rank 0 (cpu): RuntimeError: gloo: reset by peer")
NO_MODEL = Failure(FailureClass.CONFIG, Reason.MODEL_NOT_FOUND, "nowhere is no model")


async def answer(value: Any, seconds: float) -> Any:
    await asyncio.sleep(seconds)
    if isinstance(value, Exception):
        raise value
    return value


async def told(tmp_path: Path, *answers: tuple[Any, float]) -> TrainerError | None:
    group = LearnerGroup(trainer_config(tmp_path), total_steps=1)
    tasks = {rank: asyncio.ensure_future(answer(*given)) for rank, given in enumerate(answers)}
    return await group._wait("step", 60.0, tasks)


@pytest.mark.parametrize("delay", [0.0, 0.05])
async def test_a_rank_that_died_is_named_though_its_peers_complain_first(tmp_path: Path, delay: float) -> None:
    failure = await told(tmp_path, (LOST, 0.0), ("done", 0.01), (ActorDiedError(), delay))
    assert failure is not None
    assert "rank 2 died" in str(failure)


async def test_a_complaint_stands_when_nobody_is_found_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "_BLAME_SECONDS", 0.05)
    failure = await told(tmp_path, (LOST, 0.0), ("late", 30.0))
    assert failure is not None
    assert "reset by peer" in str(failure)


async def test_a_failure_that_explains_itself_is_told_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    failure = await told(tmp_path, (NO_MODEL, 0.0), ("late", 30.0))
    assert failure is not None
    assert failure.failure.reason is Reason.MODEL_NOT_FOUND
    assert time.monotonic() - began < group_module._BLAME_SECONDS
