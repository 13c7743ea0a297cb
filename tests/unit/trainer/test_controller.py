"""The controller over in-memory parts on a virtual clock."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from controller_fakes import FakeEngine, FakeLearner, FakeScorer, Rig, sample_error, trainer_config
from virtual_time import run_virtual

from opd_api.trainer_config import TrainerConfig
from opd_api.vocabulary import FailureClass, Outcome, Reason, TrainerPhase
from opd_trainer.controller.state import RunState, StopSource
from opd_trainer.errors import TrainerError
from opd_trainer.sample import Sample, SampleState


def config_for(directory: Path, *, attempt: int = 1, **sections: dict[str, Any]) -> TrainerConfig:
    return trainer_config(directory, attempt=attempt, **sections)


# -- synchronous and asynchronous ------------------------------------------------------------------------------------


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
        assert final.result is not None
        assert (Path(final.result.exported_model or "") / "model.txt").read_text() == "4"

    run_virtual(main())


def test_every_prompt_of_an_epoch_is_used_once(tmp_path: Path) -> None:
    async def main() -> None:
        config = config_for(tmp_path / "run", training={"steps": 5, "promptsPerStep": 2})
        rig = Rig(tmp_path / "run", config=config, prompts=10, engine=FakeEngine(latency=lambda call: 1.0 + call % 4))
        await rig.controller.run()
        assert Counter(rig.consumed_prompts) == Counter(f"prompt {row}" for row in range(10))

    run_virtual(main())


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_an_asynchronous_run_never_trains_on_samples_that_are_too_old(tmp_path: Path, max_staleness: int) -> None:
    async def main() -> None:
        config = config_for(
            tmp_path / "run", rollout={"maxStaleness": max_staleness, "onUpdate": "abort"}, training={"steps": 12}
        )
        latency = [1.0, 1.0, 9.0, 1.0, 2.0, 25.0, 1.0]
        rig = Rig(
            tmp_path / "run",
            config=config,
            engine=FakeEngine(latency=lambda call: latency[call % 7], concurrency=6),
            learner=FakeLearner(seconds=2.0),
        )
        final = await rig.controller.run()
        assert final.outcome is Outcome.SUCCEEDED, final
        ages = [version - sample.start_version for version, batch in enumerate(rig.learner.batches) for sample in batch]
        assert max(ages) <= max_staleness
        assert max(ages) >= 1, "nothing ran ahead: the run was not asynchronous"

    run_virtual(main())


def simulated_seconds(directory: Path, max_staleness: int, *, on_update: str = "drain") -> float:
    """Time of 20 steps whose rollout takes about as long as training."""

    async def main() -> float:
        config = config_for(
            directory,
            rollout={"maxStaleness": max_staleness, "onUpdate": on_update, "partialRollout": on_update == "abort"},
            training={"steps": 20, "promptsPerStep": 8},
        )
        rig = Rig(
            directory,
            config=config,
            engine=FakeEngine(latency=lambda call: 8.0 + (call * 7 % 5), concurrency=8),
            learner=FakeLearner(seconds=10.0),
            scorer=FakeScorer(latency=lambda call: 0.5),
        )
        final = await rig.controller.run()
        assert final.outcome is Outcome.SUCCEEDED, final
        return asyncio.get_running_loop().time()

    return run_virtual(main())


def test_asynchronous_training_hides_rollouts_behind_training(tmp_path: Path) -> None:
    synchronous = simulated_seconds(tmp_path / "sync", 0)
    asynchronous = simulated_seconds(tmp_path / "async", 1)
    assert synchronous / asynchronous >= 1.6, f"synchronous {synchronous:.0f} s, asynchronous {asynchronous:.0f} s"


def test_teacher_time_is_hidden_behind_rollouts(tmp_path: Path) -> None:
    """Bar: a synchronous step takes at most 1.15 x max(generate + train, teacher)."""

    async def main() -> None:
        batch, teacher_slots = 32, 4
        generate = [2.0 + 28.0 * index / (batch - 1) for index in range(batch)]  # a long tail up to 30 s
        teacher, train = 3.0, 10.0
        scorer = FakeScorer(latency=lambda call: teacher, concurrency=teacher_slots)
        rig = Rig(
            tmp_path / "run",
            config=config_for(tmp_path / "run", training={"steps": 5, "promptsPerStep": batch}),
            engine=FakeEngine(latency=lambda call: generate[call % batch], concurrency=batch),
            scorer=scorer,
            learner=FakeLearner(seconds=train),
        )
        final = await rig.controller.run()
        assert final.outcome is Outcome.SUCCEEDED
        step = asyncio.get_running_loop().time() / 5
        teacher_busy = batch * teacher / teacher_slots
        bound = max(max(generate) + train, teacher_busy)
        assert step <= 1.15 * bound, f"a step took {step:.1f} s, the bound is 1.15 x {bound:.1f} s"
        assert step < max(generate) + teacher_busy + train, "the teacher waited for the whole batch"

    run_virtual(main())


def test_the_fleet_s_concurrency_is_not_exceeded(tmp_path: Path) -> None:
    async def main() -> None:
        config = config_for(
            tmp_path / "run", rollout={"samplesPerPrompt": 2}, training={"steps": 2, "promptsPerStep": 8}
        )
        rig = Rig(tmp_path / "run", config=config, engine=FakeEngine(latency=lambda call: 1.0, concurrency=6))
        await rig.controller.run()
        assert rig.engine.most_in_flight == 6

    run_virtual(main())


def test_a_group_larger_than_the_fleet_still_runs(tmp_path: Path) -> None:
    async def main() -> None:
        config = config_for(
            tmp_path / "run", rollout={"samplesPerPrompt": 8}, training={"steps": 1, "promptsPerStep": 2}
        )
        rig = Rig(tmp_path / "run", config=config, engine=FakeEngine(latency=lambda call: 1.0, concurrency=4))
        assert (await rig.controller.run()).outcome is Outcome.SUCCEEDED

    run_virtual(main())


# -- weight updates in flight ----------------------------------------------------------------------------------------


def async_config(directory: Path, **rollout: Any) -> TrainerConfig:
    options = {"maxStaleness": 2, "maxResponseTokens": 8, **rollout}
    return config_for(directory, rollout=options, training={"steps": 6, "promptsPerStep": 2})


def test_drain_lets_running_rollouts_finish_on_their_weights(tmp_path: Path) -> None:
    async def main() -> None:
        rig = Rig(
            tmp_path / "run",
            config=async_config(tmp_path / "run", onUpdate="drain"),
            engine=FakeEngine(latency=lambda call: 1.0 + call % 5),
        )
        assert (await rig.controller.run()).outcome is Outcome.SUCCEEDED
        for batch in rig.learner.batches:
            assert all(len(sample.version_spans) == 1 for sample in batch)
        assert rig.log.counts["discarded"] == 0

    run_virtual(main())


def test_abort_starts_unfinished_responses_anew(tmp_path: Path) -> None:
    async def main() -> None:
        rig = Rig(
            tmp_path / "run",
            config=async_config(tmp_path / "run", onUpdate="abort"),
            engine=FakeEngine(latency=lambda call: 1.0 + call % 5),
        )
        assert (await rig.controller.run()).outcome is Outcome.SUCCEEDED
        samples = [sample for batch in rig.learner.batches for sample in batch]
        assert all(len(sample.version_spans) == 1 and sample.response_length == 4 for sample in samples)
        assert all(sample.version_spans[0].version == sample.start_version for sample in samples)
        assert rig.log.counts["discarded"] > 0

    run_virtual(main())


def test_partial_rollouts_continue_on_new_weights_with_their_spans(tmp_path: Path) -> None:
    async def main() -> None:
        rig = Rig(
            tmp_path / "run",
            config=async_config(tmp_path / "run", onUpdate="abort", partialRollout=True),
            engine=FakeEngine(latency=lambda call: 1.0 + call % 5),
        )
        assert (await rig.controller.run()).outcome is Outcome.SUCCEEDED
        samples = [sample for batch in rig.learner.batches for sample in batch]
        mixed = [sample for sample in samples if len(sample.version_spans) > 1]
        assert mixed, "no response crossed a weight update"
        assert rig.log.counts["discarded"] == 0
        for sample in samples:
            assert sample.response_length <= 8
            assert sample.version_spans[0].start == 0
            assert sample.version_spans[-1].end == sample.response_length
            assert sample.rollout_logprobs is not None
            assert sample.response_ids is not None
            for span in sample.version_spans:  # the fakes' tokens and log-probabilities name their version
                assert set(sample.rollout_logprobs[span.start : span.end]) == {-1.0 - span.version}
                assert set(sample.response_ids[span.start : span.end]) == {65 + span.version}

    run_virtual(main())


# -- failures --------------------------------------------------------------------------------------------------------


def test_failed_samples_are_replaced_and_counted(tmp_path: Path) -> None:
    async def main() -> None:
        config = config_for(tmp_path / "run", data={"maxFailedFraction": 0.5}, training={"steps": 5})
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
        config = config_for(
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
        config = config_for(
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
        config = config_for(tmp_path / "run", training={"steps": 50, "promptsPerStep": 4})
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


# -- reward and filter -----------------------------------------------------------------------------------------------


def test_a_filter_sees_rewards_and_saves_teacher_calls(tmp_path: Path) -> None:
    async def main() -> None:
        config = config_for(
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

        config = config_for(tmp_path / "run", training={"steps": 1})
        rig = Rig(tmp_path / "run", config=config, reward=reward, scorer=FakeScorer(latency=lambda call: 3.0))
        await rig.controller.run()
        assert asyncio.get_running_loop().time() == pytest.approx(3.0)
        assert rig.log.steps[0][1]["reward"] == 1.0

    run_virtual(main())


# -- stop, resume, stall ---------------------------------------------------------------------------------------------


def stop_after(rig: Rig, steps: int) -> None:
    """Ask for a stop in the middle of step `steps` (0-based)."""

    def ask(step: int) -> Exception | None:
        if step == steps:
            rig.controller.request_stop(StopSource.ANNOTATION)
        return None

    rig.learner.faults = ask


def test_a_stop_saves_the_running_step_and_ends_preempted(tmp_path: Path) -> None:
    async def main() -> None:
        rig = Rig(tmp_path / "run", learner=FakeLearner(seconds=5.0))
        stop_after(rig, 1)
        final = await rig.controller.run()
        assert (final.outcome, final.reason) == (Outcome.PREEMPTED, Reason.PREEMPTED)
        assert final.failure_class is None
        assert final.step == 2
        assert final.checkpoint is not None
        assert final.checkpoint.step == 2
        assert rig.engine.updates == [1], "weights nobody will use are not published"

    run_virtual(main())


def test_a_stop_while_rollouts_run_does_not_wait_for_them(tmp_path: Path) -> None:
    async def main() -> None:
        rig = Rig(tmp_path / "run", engine=FakeEngine(latency=lambda call: 1000.0 if call >= 4 else 1.0))
        asyncio.get_running_loop().call_later(50.0, rig.controller.request_stop, StopSource.SIGNAL)
        final = await rig.controller.run()
        assert final.outcome is Outcome.PREEMPTED
        assert final.checkpoint is not None
        assert final.checkpoint.step == 1
        assert asyncio.get_running_loop().time() == pytest.approx(50.0)

    run_virtual(main())


def test_a_step_longer_than_the_grace_is_cut_off_and_the_last_checkpoint_stands(tmp_path: Path) -> None:
    async def main() -> None:
        config = config_for(tmp_path / "run", training={"steps": 9, "checkpoint": {"everySteps": 1}})
        rig = Rig(tmp_path / "run", config=config, learner=FakeLearner(seconds=500.0))
        asyncio.get_running_loop().call_later(600.0, rig.controller.request_stop, StopSource.DRAIN)
        final = await rig.controller.run()
        assert final.outcome is Outcome.PREEMPTED
        assert final.checkpoint is not None
        assert final.checkpoint.step == 1
        assert asyncio.get_running_loop().time() <= 600.0 + 60.0

    run_virtual(main())


def resumed(directory: Path, first: Rig, checkpoint: str, **options: Any) -> Rig:
    """The next attempt, from a checkpoint of the first one."""
    path = directory / "checkpoints" / checkpoint
    state = json.loads((path / "controller.json").read_text())
    sections = first.config.model_dump(by_alias=True, mode="json")
    config = TrainerConfig.model_validate({**sections, "run": {**sections["run"], "attempt": 2}})
    return Rig(directory, config=config, resume_from=path, resume_state=state, **options)


def test_a_resumed_run_continues_step_numbers_and_repeats_no_prompt(tmp_path: Path) -> None:
    async def main() -> None:
        directory = tmp_path / "run"
        config = config_for(
            directory, rollout={"maxStaleness": 2}, training={"steps": 10, "checkpoint": {"everySteps": 3}}
        )
        engine = FakeEngine(latency=lambda call: 1.0 + call % 4)
        first = Rig(directory, config=config, prompts=40, engine=engine, learner=FakeLearner(seconds=1.0))
        stop_after(first, 4)
        assert (await first.controller.run()).step == 5
        second = resumed(directory, first, "step-5.a1", prompts=40, engine=FakeEngine(latency=lambda call: 1.0))
        second.learner.updates = 0
        final = await second.controller.run()
        assert final.outcome is Outcome.SUCCEEDED, final
        assert [step for step, _ in second.log.steps] == [6, 7, 8, 9, 10]
        used = Counter(first.consumed_prompts + second.consumed_prompts)
        assert used == Counter(f"prompt {row}" for row in range(40)), "one epoch: every prompt exactly once"
        assert second.controller.buffer.exits[SampleState.CONSUMED] == 40
        ages = [
            version - sample.start_version
            for version, batch in enumerate(second.learner.batches, start=5)
            for sample in batch
        ]
        assert max(ages) <= 2

    run_virtual(main())


def test_a_crash_between_checkpoints_repeats_the_lost_steps_only(tmp_path: Path) -> None:
    async def main() -> None:
        directory = tmp_path / "run"
        config = config_for(directory, training={"steps": 6, "promptsPerStep": 2, "checkpoint": {"everySteps": 2}})
        first = Rig(directory, config=config, prompts=12)
        dead = TrainerError(FailureClass.INFRASTRUCTURE, Reason.LEARNER_FAILED, "rank 0 died")
        first.learner.faults = lambda step: dead if step == 3 else None
        assert (await first.controller.run()).reason == Reason.LEARNER_FAILED
        assert first.store.committed == [2]
        second = resumed(directory, first, "step-2.a1", prompts=12)
        final = await second.controller.run()
        assert final.outcome is Outcome.SUCCEEDED, final
        kept = first.consumed_prompts[:4]  # what the checkpoint knows of
        assert Counter(kept + second.consumed_prompts) == Counter(f"prompt {row}" for row in range(12))

    run_virtual(main())


def test_another_tokenizer_than_the_checkpoint_s_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        directory = tmp_path / "run"
        first = Rig(directory, fingerprints={"tokenizer": "aaaa"})
        stop_after(first, 1)
        await first.controller.run()
        second = resumed(directory, first, "step-2.a1", fingerprints={"tokenizer": "bbbb"})
        final = await second.controller.run()
        assert (final.failure_class, final.reason) == (FailureClass.CONFIG, Reason.TOKENIZER_MISMATCH)

    run_virtual(main())


def test_checkpoints_are_written_in_the_background_of_rollouts_and_before_the_next_update(tmp_path: Path) -> None:
    async def main() -> None:
        class SlowSave(FakeLearner):
            saving = False

            async def save(self, directory: Path) -> None:
                self.saving = True
                await asyncio.sleep(4.0)
                await super().save(directory)
                self.saving = False

            async def step(self, samples: list[Sample], step: int) -> Any:
                assert not self.saving, "weights changed under a checkpoint"
                return await super().step(samples, step)

        config = config_for(tmp_path / "run", training={"steps": 4, "checkpoint": {"everySteps": 1}})
        rig = Rig(tmp_path / "run", config=config, learner=SlowSave(), engine=FakeEngine(latency=lambda call: 5.0))
        assert (await rig.controller.run()).outcome is Outcome.SUCCEEDED
        assert rig.store.committed == [1, 2, 3, 4]
        assert asyncio.get_running_loop().time() == pytest.approx(4 * 5.0 + 4.0), "only the last save is waited for"

    run_virtual(main())


def test_phases_are_reported_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        rig = Rig(tmp_path / "run")
        seen: list[TrainerPhase] = []
        real = RunState.set_phase

        def record(state: RunState, phase: TrainerPhase) -> None:
            seen.append(phase)
            real(state, phase)

        monkeypatch.setattr(RunState, "set_phase", record)
        await rig.controller.run()
        assert seen == [TrainerPhase.TRAINING, TrainerPhase.EXPORTING]

    run_virtual(main())


def test_progress_names_the_teacher_that_samples_wait_for(tmp_path: Path) -> None:
    async def main() -> None:
        rig = Rig(tmp_path / "run", scorer=FakeScorer(latency=lambda call: 1.0))
        run = asyncio.create_task(rig.controller.run())
        await asyncio.sleep(0.5)
        assert rig.controller.progress(1).phase is TrainerPhase.TRAINING
        rig.scorer.unavailable = "teacher"
        document = rig.controller.progress(2)
        assert document.phase is TrainerPhase.TEACHER_UNAVAILABLE
        assert document.unavailable_teacher == "teacher"
        rig.scorer.unavailable = None
        assert (await run).outcome is Outcome.SUCCEEDED

    run_virtual(main())


def test_evaluation_runs_before_the_first_step_in_between_and_at_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        evaluation = {"everySteps": 2, "source": "held-out.jsonl", "samples": 3}
        config = config_for(tmp_path / "run", training={"steps": 4, "evaluation": evaluation})
        rig = Rig(tmp_path / "run", config=config)
        prompts = [rig.stream.encode(ticket) for ticket in range(3)]
        rig.controller._parts.evaluation_prompts = [prompt for prompt in prompts if prompt is not None]
        assert (await rig.controller.run()).outcome is Outcome.SUCCEEDED
        assert [step for step, _ in rig.log.evaluations] == [0, 2, 4]
        values = [metrics["eval_opd_reverse_kl"] for _, metrics in rig.log.evaluations]
        assert values == [-0.5, -2.5, -4.5], "each evaluation uses the weights of its step"
        assert rig.controller.buffer.issued == 16, "held-out samples are outside the books"

    run_virtual(main())


def test_drawing_the_report_does_not_hold_up_training(tmp_path: Path) -> None:
    async def main() -> None:
        written: list[str] = []

        async def report(outcome: str, message: str) -> Path:
            await asyncio.sleep(7.0)
            written.append(outcome)
            return tmp_path / "index.html"

        config = config_for(tmp_path / "run", training={"steps": 6, "checkpoint": {"everySteps": 1}})
        rig = Rig(tmp_path / "run", config=config, learner=FakeLearner(seconds=5.0), report=report)
        finished: list[float] = []
        rig.log.step = lambda *_: finished.append(asyncio.get_running_loop().time())  # type: ignore[method-assign]
        final = await rig.controller.run()
        assert finished == [5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
        assert written[0] == "Running"
        assert written[-1] == "Succeeded"
        assert final.result is not None
        assert final.result.report == str(tmp_path / "index.html")

    run_virtual(main())


def seconds_per_sample(directory: Path, batch: int) -> float:
    """CPU time of the controller and the fakes."""

    async def main() -> float:
        config = config_for(directory, training={"steps": 2, "promptsPerStep": batch})
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


def test_engines_that_serve_other_weights_than_the_learner_s_end_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        learner = FakeLearner()
        learner.metrics = {"mismatch_abs": 3.0}
        final = await Rig(tmp_path / "run", learner=learner).controller.run()
        assert (final.failure_class, final.reason) == (FailureClass.INTERNAL, Reason.ENGINE_FAILED)
        assert "differ by 3.00 nats" in final.message

    run_virtual(main())


@pytest.mark.parametrize(
    ("sections", "top_k"),
    [
        ({}, 0),
        ({"diagnostics": {"topkStats": True, "topkStatsK": 6}}, 6),
        ({"distillation": {"signal": "loss", "tokenSelection": "student_topk", "topK": 4}}, 4),
        (
            {
                "distillation": {"signal": "loss", "tokenSelection": "student_topk", "topK": 4},
                "diagnostics": {"topkStats": True, "topkStatsK": 6},
            },
            4,
        ),
        ({"distillation": {"signal": "loss", "tokenSelection": "teacher_topk", "topK": 4}}, 0),
    ],
)
def test_the_engine_returns_as_many_tokens_as_selection_or_diagnostics_need(
    tmp_path: Path, sections: dict[str, Any], top_k: int
) -> None:
    async def main() -> None:
        rig = Rig(tmp_path / "run", config=config_for(tmp_path / "run", **sections))
        await rig.controller.run()
        assert rig.engine.top_k == top_k

    run_virtual(main())
