"""Task rewards and filters."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rewards_for_tests

from opd_api.vocabulary import FailureClass
from opd_trainer.errors import SampleError, TrainerError
from opd_trainer.rollout import rewards as rewards_module
from opd_trainer.rollout import user_calls
from opd_trainer.rollout.filters import build_filter
from opd_trainer.rollout.rewards import MathVerify, build_reward, exact_match, last_boxed, needs_answer
from opd_trainer.sample import Sample


def sample(response: str, answer: Any, **record: Any) -> Sample:
    ids = np.array([1], dtype=np.int32)
    return Sample(0, 0, "math", ids, answer=answer, response_text=response, record=record)


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        ("42", "42", 1.0),
        (" 42. ", 42, 1.0),
        ("We add.\nParis", "paris", 1.0),
        ("so #### 7", "7", 1.0),
        ("The answer is: 7", "7", 1.0),
        (r"hence \boxed{\frac{1}{2}}.", r"\frac{1}{2}", 1.0),
        ("420", "42", 0.0),
        ("", "42", 0.0),
        ("43 then 42 then 43", "42", 0.0),
    ],
)
def test_exact_match(response: str, answer: Any, value: float) -> None:
    assert exact_match(response, answer) == value


def test_the_last_box_with_balanced_braces_counts() -> None:
    assert last_boxed(r"\boxed{1} and \boxed{a_{2}}") == "a_{2}"
    assert last_boxed(r"\boxed{open") is None
    assert last_boxed("none") is None


@pytest.fixture
async def math() -> AsyncIterator[MathVerify]:
    reward = MathVerify(workers=1, deadline=60.0)
    yield reward
    await reward.close()


async def test_math_verify_knows_equal_numbers_in_other_forms(math: MathVerify) -> None:
    assert await math(sample(r"so we get $\boxed{\frac{1}{2}}$", "0.5")) == 1.0
    assert await math(sample(r"so we get $\boxed{\frac{1}{3}}$", "0.5")) == 0.0


@pytest.fixture
def bare_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sympy, which takes a worker seconds to load."""
    monkeypatch.setattr(rewards_module, "_load_math_verify", rewards_for_tests.nothing)


@pytest.mark.usefixtures("bare_workers")
async def test_a_parser_that_hangs_costs_its_deadline_and_the_pool_recovers() -> None:
    reward = MathVerify(workers=1, deadline=60.0)
    assert await reward.run(rewards_for_tests.quick, "", "") == 0.25
    reward._deadline = 0.5
    assert await reward.run(rewards_for_tests.hang, "", "") == 0.0
    assert reward.timeouts == 1
    reward._deadline = 60.0
    assert await reward.run(rewards_for_tests.quick, "", "") == 0.25
    await reward.close()


@pytest.mark.usefixtures("bare_workers")
async def test_items_that_wait_behind_one_that_hangs_get_their_reward() -> None:
    reward = MathVerify(workers=1, deadline=2.0)
    assert await reward.run(rewards_for_tests.quick, "", "") == 0.25
    hanging = asyncio.create_task(reward.run(rewards_for_tests.hang, "", ""))
    await asyncio.sleep(1.0)  # they have a second left when the first one has none
    async with asyncio.timeout(60):
        assert await asyncio.gather(*(reward.run(rewards_for_tests.quick, "", "") for _ in range(5))) == [0.25] * 5
        assert await hanging == 0.0
    assert reward.timeouts == 1, "only the item that ran over its time"
    await reward.close()


@pytest.mark.usefixtures("bare_workers")
async def test_the_time_in_which_an_item_waits_for_a_worker_is_not_the_item_s() -> None:
    reward = MathVerify(workers=2, deadline=2.0)
    async with asyncio.timeout(60):
        values = await asyncio.gather(*(reward.run(rewards_for_tests.slow, "", "") for _ in range(12)))
    assert values == [0.5] * 12, "12 x 0.4 s on two workers are more than the 2 s that each of them has"
    await reward.close()


@pytest.mark.usefixtures("bare_workers")
async def test_an_item_whose_process_dies_is_tried_again_and_twice_is_enough(tmp_path: Path) -> None:
    reward = MathVerify(workers=1, deadline=60.0)
    async with asyncio.timeout(120):
        values = await asyncio.gather(
            reward.run(rewards_for_tests.die, "", str(tmp_path / "once")),
            reward.run(rewards_for_tests.quick, "", ""),
            reward.run(rewards_for_tests.die, "", ""),
            reward.run(rewards_for_tests.quick, "", ""),
        )
    assert values == [0.75, 0.25, 0.0, 0.25]
    await reward.close()


async def test_the_time_in_which_a_worker_starts_is_not_the_first_item_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards_module, "_load_math_verify", rewards_for_tests.load_slowly)
    reward = MathVerify(workers=1, deadline=1.0)
    assert await reward.run(rewards_for_tests.quick, "", "") == 0.25
    await reward.close()


@pytest.mark.usefixtures("bare_workers")
async def test_workers_that_do_not_start_end_the_run_instead_of_making_every_answer_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rewards_module, "_ignore_interrupts", rewards_for_tests.give_up)
    reward = MathVerify(workers=1, deadline=60.0)
    with pytest.raises(TrainerError, match="no worker process of math_verify came up") as error:
        await reward.run(rewards_for_tests.quick, "", "")
    assert error.value.failure.failure_class is FailureClass.INTERNAL


@pytest.mark.usefixtures("bare_workers")
async def test_an_item_that_nobody_waits_for_any_more_takes_no_time_from_the_next() -> None:
    reward = MathVerify(workers=1, deadline=2.0)
    assert await reward.run(rewards_for_tests.quick, "", "") == 0.25
    given_up = asyncio.create_task(reward.run(rewards_for_tests.hang, "", ""))
    await asyncio.sleep(0.2)
    given_up.cancel()
    async with asyncio.timeout(60):
        assert await reward.run(rewards_for_tests.quick, "", "") == 0.25
    assert given_up.cancelled()
    await reward.close()


async def test_a_sample_without_an_answer_fails_as_data(math: MathVerify) -> None:
    with pytest.raises(SampleError, match=r"data\.answerField") as error:
        await math(sample("1", None))
    assert error.value.failure.failure_class is FailureClass.DATA


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"user_code_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "import asyncio, time\n"
        "def length(response, answer, record): return len(response) * record['factor']\n"
        "async def later(response, answer, record): return 0.5\n"
        "def slow(response, answer, record): time.sleep(0.4); return 0.5\n"
        "def hang(response, answer, record): time.sleep(5 if answer else 0); return 0.5\n"
        "def network(response, answer, record): raise TimeoutError('no answer from the judge')\n"
        "async def cancelled(response, answer, record): raise asyncio.CancelledError\n"
        "def bad(response, answer, record): raise KeyError('x')\n"
        "def nan(response, answer, record): return float('nan')\n"
        "def keep(samples): return samples[0].reward == 1.0\n"
        "def keep_slowly(samples): time.sleep(0.4); return True\n"
        "def broken(samples): raise RuntimeError('boom')\n"
        "constant = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name  # type: ignore[misc]
    sys.modules.pop(name, None)


async def test_a_user_s_reward_gets_response_answer_and_record(module: str) -> None:
    reward = build_reward(f"{module}:length")
    assert reward is not None
    assert await reward(sample("abc", None, factor=2)) == 6.0
    later = build_reward(f"{module}:later")
    assert later is not None
    assert await later(sample("abc", None)) == 0.5


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("bad", "raised KeyError"),
        ("nan", "returned nan"),
        ("cancelled", "was cancelled"),
        ("network", "raised TimeoutError: no answer"),
    ],
)
async def test_a_user_s_reward_that_fails_costs_the_sample(module: str, function: str, message: str) -> None:
    reward = build_reward(f"{module}:{function}")
    assert reward is not None
    with pytest.raises(SampleError, match=message):
        await reward(sample("abc", None))


async def test_the_time_in_which_a_user_s_reward_waits_for_a_thread_is_not_its_own(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_calls, "CALL_SECONDS", 1.0)
    reward = build_reward(f"{module}:slow")
    assert reward is not None
    values = await asyncio.gather(*(reward(sample("abc", None)) for _ in range(100)))
    assert values == [0.5] * 100


async def test_user_s_rewards_that_hang_leave_the_others_their_threads(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_calls, "CALL_SECONDS", 0.5)
    monkeypatch.setattr(user_calls, "THREADS", 2)
    reward = build_reward(f"{module}:hang")
    assert reward is not None
    stuck = [asyncio.create_task(reward(sample("abc", "hang"))) for _ in range(4)]
    async with asyncio.timeout(4):
        assert await asyncio.gather(*(reward(sample("abc", "")) for _ in range(4))) == [0.5] * 4
    for failed in await asyncio.gather(*stuck, return_exceptions=True):
        assert "took longer than" in str(failed)


@pytest.mark.parametrize("value", ["no_such_module:function", "{module}:absent", "{module}:constant"])
def test_an_entry_point_that_cannot_be_used_is_a_configuration_error(module: str, value: str) -> None:
    with pytest.raises(TrainerError, match=r"task\.reward") as error:
        build_reward(value.format(module=module))
    assert error.value.failure.failure_class is FailureClass.CONFIG


async def test_a_filter_keeps_or_drops_and_a_broken_one_ends_the_run(module: str) -> None:
    keep = build_filter(f"{module}:keep")
    assert keep is not None
    good = sample("a", None)
    good.reward = 1.0
    assert await keep([good])
    assert not await keep([sample("a", None)])
    broken = build_filter(f"{module}:broken")
    assert broken is not None
    with pytest.raises(TrainerError, match="boom") as error:
        await broken([good])
    assert error.value.failure.failure_class is FailureClass.DATA


async def test_the_time_in_which_a_filter_waits_for_a_thread_is_not_its_own(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_calls, "CALL_SECONDS", 1.0)
    keep = build_filter(f"{module}:keep_slowly")
    assert keep is not None
    assert await asyncio.gather(*(keep([sample("a", None)]) for _ in range(100))) == [True] * 100


async def test_a_filter_that_hangs_ends_the_run_with_its_name(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_calls, "CALL_SECONDS", 0.1)
    keep = build_filter(f"{module}:keep_slowly")
    assert keep is not None
    with pytest.raises(TrainerError, match="keep_slowly failed: took longer than") as error:
        await keep([sample("a", None)])
    assert error.value.failure.failure_class is FailureClass.DATA


def test_no_reward_and_no_filter_are_nothing() -> None:
    assert build_reward("none") is None
    assert build_filter(None) is None
    assert needs_answer("exact_match")
    assert not needs_answer("none")
