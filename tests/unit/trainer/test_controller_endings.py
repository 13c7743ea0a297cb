"""How a run is stopped, resumed and saved; virtual clock."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from controller_fakes import FakeEngine, FakeLearner, Rig, resumed, trainer_config
from virtual_time import run_virtual

from opd_api.vocabulary import FailureClass, Outcome, Reason
from opd_trainer.controller.state import StopSource
from opd_trainer.errors import TrainerError
from opd_trainer.sample import Sample, SampleState


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
        config = trainer_config(tmp_path / "run", training={"steps": 9, "checkpoint": {"everySteps": 1}})
        rig = Rig(tmp_path / "run", config=config, learner=FakeLearner(seconds=500.0))
        asyncio.get_running_loop().call_later(600.0, rig.controller.request_stop, StopSource.DRAIN)
        final = await rig.controller.run()
        assert final.outcome is Outcome.PREEMPTED
        assert final.checkpoint is not None
        assert final.checkpoint.step == 1
        assert asyncio.get_running_loop().time() <= 600.0 + 60.0

    run_virtual(main())


def test_a_resumed_run_continues_step_numbers_and_repeats_no_prompt(tmp_path: Path) -> None:
    async def main() -> None:
        directory = tmp_path / "run"
        config = trainer_config(
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
        config = trainer_config(directory, training={"steps": 6, "promptsPerStep": 2, "checkpoint": {"everySteps": 2}})
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

        config = trainer_config(tmp_path / "run", training={"steps": 4, "checkpoint": {"everySteps": 1}})
        rig = Rig(tmp_path / "run", config=config, learner=SlowSave(), engine=FakeEngine(latency=lambda call: 5.0))
        assert (await rig.controller.run()).outcome is Outcome.SUCCEEDED
        assert rig.store.committed == [1, 2, 3, 4]
        assert asyncio.get_running_loop().time() == pytest.approx(4 * 5.0 + 4.0), "only the last save is waited for"

    run_virtual(main())


def test_a_resumed_run_remembers_the_held_out_number_before_the_first_step(tmp_path: Path) -> None:
    async def main() -> None:
        directory = tmp_path / "run"
        evaluation = {"everySteps": 10, "source": "held-out.jsonl", "samples": 1}
        config = trainer_config(directory, training={"steps": 4, "evaluation": evaluation})
        first = Rig(directory, config=config)
        first.controller._parts.evaluation_prompts = [prompt for prompt in [first.stream.encode(0)] if prompt]
        stop_after(first, 1)
        stopped = await first.controller.run()
        second = resumed(directory, first, f"step-{stopped.step}.a1")
        second.controller._parts.evaluation_prompts = [prompt for prompt in [second.stream.encode(0)] if prompt]
        final = await second.controller.run()
        assert final.result is not None
        assert final.result.held_out_reverse_kl is not None
        assert final.result.held_out_reverse_kl.before == "-0.5"
        assert [step for step, _ in second.log.evaluations] == [4]

    run_virtual(main())
