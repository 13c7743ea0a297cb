"""Task rewards and filters."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rewards_for_tests

from opd_api.vocabulary import FailureClass
from opd_trainer.errors import SampleError, TrainerError
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


async def test_a_parser_that_hangs_costs_its_deadline_and_the_pool_recovers() -> None:
    reward = MathVerify(workers=1, deadline=60.0)
    assert await reward.run(rewards_for_tests.quick, "", "") == 0.25
    reward._deadline = 0.5
    assert await reward.run(rewards_for_tests.hang, "", "") == 0.0
    assert reward.timeouts == 1
    reward._deadline = 60.0
    assert await reward.run(rewards_for_tests.quick, "", "") == 0.25
    await reward.close()


async def test_a_sample_without_an_answer_fails_as_data(math: MathVerify) -> None:
    with pytest.raises(SampleError, match=r"data\.answerField") as error:
        await math(sample("1", None))
    assert error.value.failure.failure_class is FailureClass.DATA


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"user_code_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "def length(response, answer, record): return len(response) * record['factor']\n"
        "async def later(response, answer, record): return 0.5\n"
        "def bad(response, answer, record): raise KeyError('x')\n"
        "def nan(response, answer, record): return float('nan')\n"
        "def keep(samples): return samples[0].reward == 1.0\n"
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


@pytest.mark.parametrize(("function", "message"), [("bad", "raised KeyError"), ("nan", "returned nan")])
async def test_a_user_s_reward_that_fails_costs_the_sample(module: str, function: str, message: str) -> None:
    reward = build_reward(f"{module}:{function}")
    assert reward is not None
    with pytest.raises(SampleError, match=message):
        await reward(sample("abc", None))


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


def test_no_reward_and_no_filter_are_nothing() -> None:
    assert build_reward("none") is None
    assert build_filter(None) is None
    assert needs_answer("exact_match")
    assert not needs_answer("none")
