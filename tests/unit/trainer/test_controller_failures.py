"""What the controller does with samples that fail or are filtered, and with parts that break; virtual clock."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from controller_fakes import FakeEngine, FakeLearner, FakeScorer, Rig, sample_error, trainer_config
from virtual_time import run_virtual

from opd_api.vocabulary import FailureClass, Outcome, Reason
from opd_trainer.controller.state import StopSource
from opd_trainer.errors import TrainerError
from opd_trainer.sample import Sample, SampleState


def test_failed_samples_are_replaced_and_counted(tmp_path: Path) -> None:
    async def main() -> None:
        config = trainer_config(tmp_path / "run", data={"maxFailedFraction": 0.5}, training={"steps": 5})
        engine = FakeEngine()
        engine.faults = lambda call: sample_error() if call % 7 == 3 else None
        rig = Rig(tmp_path / "run", config=config, engine=engine)
        final = await rig.controller.run()
        assert final.outcome is Outcome.SUCCEEDED
        assert [len(batch) for batch in rig.learner.batches] == [4] * 5
        exits = rig.controller.buffer.exits
        assert exits[SampleState.FAILED] == rig.log.counts["failed"] > 0
        assert rig.controller.buffer.issued == exits[SampleState.CONSUMED] + exits[SampleState.FAILED]
        assert "Data/DataError: bad sample" in rig.state.sample_errors

    run_virtual(main())


def test_a_failed_sample_of_a_group_is_replaced_by_another_of_the_same_prompt(tmp_path: Path) -> None:
    async def main() -> None:
        config = trainer_config(
            tmp_path / "run",
            rollout={"samplesPerPrompt": 4},
            data={"maxFailedFraction": 0.5},
            training={"steps": 2, "promptsPerStep": 2},
        )
        engine = FakeEngine()
        engine.faults = lambda call: sample_error() if call in (1, 5) else None
        rig = Rig(tmp_path / "run", config=config, engine=engine)
        assert (await rig.controller.run()).outcome is Outcome.SUCCEEDED
        for batch in rig.learner.batches:
            assert Counter(Counter(s.prompt_text for s in batch).values()) == {4: 2}
        assert rig.controller.buffer.exits[SampleState.FAILED] == 2
        assert rig.controller.buffer.exits[SampleState.FILTERED] == 0

    run_virtual(main())


def test_a_prompt_whose_samples_all_fail_is_not_asked_again(tmp_path: Path) -> None:
    async def main() -> None:
        config = trainer_config(
            tmp_path / "run",
            rollout={"samplesPerPrompt": 2},
            data={"maxFailedFraction": 0.5, "shuffle": False},
            training={"steps": 3, "promptsPerStep": 2},
        )
        scorer = FakeScorer()
        scorer.faults = lambda sample: sample_error() if sample.prompt_text == "prompt 1" else None
        rig = Rig(tmp_path / "run", config=config, scorer=scorer, prompts=20)
        assert (await rig.controller.run()).outcome is Outcome.SUCCEEDED
        assert "prompt 1" not in rig.consumed_prompts
        assert rig.controller.buffer.exits[SampleState.FAILED] == 2

    run_virtual(main())


@pytest.mark.parametrize("failure_class", [FailureClass.DATA, FailureClass.TEACHER])
def test_too_many_failed_samples_end_the_run_with_their_class(tmp_path: Path, failure_class: FailureClass) -> None:
    async def main() -> None:
        scorer = FakeScorer()
        scorer.faults = lambda sample: sample_error(failure_class) if sample.sample_id % 3 == 0 else None
        config = trainer_config(tmp_path / "run", training={"steps": 50, "promptsPerStep": 4})
        rig = Rig(tmp_path / "run", config=config, scorer=scorer)
        final = await rig.controller.run()
        assert final.outcome is Outcome.FAILED
        assert (final.failure_class, final.reason) == (failure_class, Reason.FAILED_FRACTION_EXCEEDED)
        assert final.teacher == ("teacher" if failure_class is FailureClass.TEACHER else None)
        assert "data.maxFailedFraction is 0.05" in final.message
        assert rig.engine.stopped
        assert rig.learner.stopped

    run_virtual(main())


def test_an_empty_response_fails_before_the_teacher_is_asked(tmp_path: Path) -> None:
    async def main() -> None:
        engine = FakeEngine()
        engine.length = 0
        rig = Rig(tmp_path / "run", engine=engine)
        final = await rig.controller.run()
        assert final.failure_class is FailureClass.DATA
        assert rig.scorer.calls == 0

    run_virtual(main())


def test_an_engine_that_cannot_be_kept_ends_the_run_after_saving(tmp_path: Path) -> None:
    async def main() -> None:
        engine = FakeEngine()
        lost = TrainerError(FailureClass.INFRASTRUCTURE, Reason.ENGINE_FAILED, "three restarts")
        engine.faults = lambda call: lost if call == 9 else None
        rig = Rig(tmp_path / "run", engine=engine)
        final = await rig.controller.run()
        assert (final.outcome, final.failure_class) == (Outcome.FAILED, FailureClass.INFRASTRUCTURE)
        assert final.step == 2
        assert final.checkpoint is not None
        assert final.checkpoint.step == 2, "the steps that were made are saved for the next attempt"

    run_virtual(main())


def test_an_unknown_exception_is_internal(tmp_path: Path) -> None:
    async def main() -> None:
        learner = FakeLearner()
        learner.faults = lambda step: ZeroDivisionError("boom") if step == 1 else None
        final = await Rig(tmp_path / "run", learner=learner).controller.run()
        assert (final.failure_class, final.reason) == (FailureClass.INTERNAL, Reason.INTERNAL_ERROR)
        assert "ZeroDivisionError: boom" in final.message

    run_virtual(main())


def test_a_higher_attempt_stops_this_one_before_it_writes(tmp_path: Path) -> None:
    async def main() -> None:
        rig = Rig(tmp_path / "run")

        def take_over(step: int) -> Exception | None:
            if step == 1:
                (tmp_path / "run" / "weights" / "a2").mkdir()
            return None

        rig.learner.faults = take_over
        final = await rig.controller.run()
        assert (final.failure_class, final.reason) == (FailureClass.INFRASTRUCTURE, Reason.SUPERSEDED)
        assert rig.store.committed == []
        assert not (tmp_path / "run" / "weights" / "a1" / "v2").exists()

    run_virtual(main())


def test_a_filter_sees_rewards_and_saves_teacher_calls(tmp_path: Path) -> None:
    async def main() -> None:
        config = trainer_config(
            tmp_path / "run",
            rollout={"samplesPerPrompt": 2},
            data={"shuffle": False},
            training={"steps": 2, "promptsPerStep": 2},
        )

        async def reward(sample: Sample) -> float:
            return float(sample.prompt_text in ("prompt 1", "prompt 4"))

        async def keep(samples: list[Sample]) -> bool:
            assert all(sample.teacher is None for sample in samples)
            return all(sample.reward == 0.0 for sample in samples)

        rig = Rig(tmp_path / "run", config=config, reward=reward, keep=keep)
        assert (await rig.controller.run()).outcome is Outcome.SUCCEEDED
        assert not {"prompt 1", "prompt 4"} & set(rig.consumed_prompts)
        assert rig.scorer.calls == 8, "filtered groups never reach the teacher"
        assert rig.controller.buffer.exits[SampleState.FILTERED] == 4

    run_virtual(main())


def test_a_filter_that_refuses_everything_is_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        async def keep(samples: list[Sample]) -> bool:
            return False

        final = await Rig(tmp_path / "run", keep=keep).controller.run()
        assert final.failure_class is FailureClass.DATA
        assert "task.filter refused the last" in final.message

    run_virtual(main())


def test_reward_and_teacher_run_at_the_same_time(tmp_path: Path) -> None:
    async def main() -> None:
        async def reward(sample: Sample) -> float:
            await asyncio.sleep(3.0)
            return 1.0

        config = trainer_config(tmp_path / "run", training={"steps": 1})
        rig = Rig(tmp_path / "run", config=config, reward=reward, scorer=FakeScorer(latency=lambda call: 3.0))
        await rig.controller.run()
        assert asyncio.get_running_loop().time() == pytest.approx(3.0)
        assert rig.log.steps[0][1]["reward"] == 1.0

    run_virtual(main())


def test_engines_that_serve_other_weights_than_the_learner_s_end_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        learner = FakeLearner()
        learner.metrics = {"mismatch_abs": 3.0}
        final = await Rig(tmp_path / "run", learner=learner).controller.run()
        assert (final.failure_class, final.reason) == (FailureClass.INTERNAL, Reason.ENGINE_FAILED)
        assert "differ by 3.00 nats" in final.message

    run_virtual(main())


async def cancelled_by_nobody(sample: Sample) -> float:
    """As a future of an executor that was shut down, or a connection pool that was closed under a request."""
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    return float(await future)


@pytest.mark.parametrize("group", [1, 2])
def test_a_group_that_ends_cancelled_though_nobody_asked_ends_the_run_at_once(tmp_path: Path, group: int) -> None:
    async def main() -> None:
        config = trainer_config(tmp_path / "run", rollout={"samplesPerPrompt": group})
        rig = Rig(tmp_path / "run", config=config, reward=cancelled_by_nobody)
        async with asyncio.timeout(1000):
            final = await rig.controller.run()
        assert (final.outcome, final.failure_class) == (Outcome.FAILED, FailureClass.INTERNAL)
        assert "group 0 was cancelled" in final.message

    run_virtual(main())


def test_an_evaluation_that_ends_cancelled_though_nobody_asked_is_no_preemption(tmp_path: Path) -> None:
    async def main() -> None:
        evaluation = {"everySteps": 2, "source": "held-out.jsonl", "samples": 1}
        config = trainer_config(tmp_path / "run", training={"evaluation": evaluation})

        async def reward(sample: Sample) -> float:
            return 0.0 if sample.sample_id >= 0 else await cancelled_by_nobody(sample)

        rig = Rig(tmp_path / "run", config=config, reward=reward)
        prompt = rig.stream.encode(0)
        assert prompt is not None
        rig.controller._parts.evaluation_prompts = [prompt]
        async with asyncio.timeout(1000):
            final = await rig.controller.run()
        assert (final.outcome, final.failure_class) == (Outcome.FAILED, FailureClass.INTERNAL)
        assert "evaluation was cancelled" in final.message

    run_virtual(main())


def test_a_run_that_is_stopped_cancels_its_groups_without_a_failure(tmp_path: Path) -> None:
    async def main() -> None:
        rig = Rig(tmp_path / "run", engine=FakeEngine(latency=lambda call: 5.0 if call < 4 else 1e6))
        loop = asyncio.get_running_loop()
        loop.call_later(20.0, rig.controller.request_stop, StopSource.SIGNAL)
        final = await rig.controller.run()
        assert (final.outcome, final.step) == (Outcome.PREEMPTED, 1)

    run_virtual(main())
