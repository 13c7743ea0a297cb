"""Numbers that the controller tells: held-out evaluations, heartbeats and seconds; virtual clock."""

from __future__ import annotations

import asyncio
from pathlib import Path

from controller_fakes import FakeEngine, FakeLearner, Rig, trainer_config
from virtual_time import run_virtual

from opd_api.v1alpha1.status import HeldOutReverseKl
from opd_api.vocabulary import Outcome, TrainerTask
from opd_trainer.controller.batch_metrics import rounded_seconds


def test_evaluation_runs_before_the_first_step_in_between_and_at_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        evaluation = {"everySteps": 2, "source": "held-out.jsonl", "samples": 3}
        config = trainer_config(tmp_path / "run", training={"steps": 4, "evaluation": evaluation})
        rig = Rig(tmp_path / "run", config=config)
        prompts = [rig.stream.encode(ticket) for ticket in range(3)]
        rig.controller._parts.evaluation_prompts = [prompt for prompt in prompts if prompt is not None]
        final = await rig.controller.run()
        assert final.outcome is Outcome.SUCCEEDED
        assert [step for step, _ in rig.log.evaluations] == [0, 2, 4]
        values = [metrics["eval_opd_reverse_kl"] for _, metrics in rig.log.evaluations]
        assert values == [-0.5, -2.5, -4.5], "each evaluation uses the weights of its step"
        assert rig.controller.buffer.issued == 16, "held-out samples are outside the books"
        assert final.result is not None
        assert final.result.held_out_reverse_kl == HeldOutReverseKl(before="-0.5", after="-4.5")
        assert rig.controller.progress(1).metrics["eval_opd_reverse_kl"] == -4.5

    run_virtual(main())


def test_a_run_without_evaluation_has_no_held_out_number(tmp_path: Path) -> None:
    async def main() -> None:
        rig = Rig(tmp_path / "run")
        final = await rig.controller.run()
        assert final.result is not None
        assert final.result.held_out_reverse_kl is None
        assert "eval_opd_reverse_kl" not in rig.controller.progress(1).metrics

    run_virtual(main())


def test_a_heartbeat_says_what_the_training_waits_for(tmp_path: Path) -> None:
    async def main() -> None:
        rig = Rig(tmp_path / "run", engine=FakeEngine(latency=lambda _: 10.0), learner=FakeLearner(seconds=10.0))
        seen: list[TrainerTask | None] = []

        async def look() -> None:
            while True:
                await asyncio.sleep(5.0)
                seen.append(rig.controller.progress(1).task)

        looking = asyncio.create_task(look())
        await rig.controller.run()
        looking.cancel()
        assert {TrainerTask.ROLLOUT, TrainerTask.TRAIN} <= set(seen)
        assert rig.controller.progress(1).task is None, "after the training"

    run_virtual(main())


def test_seconds_of_a_step_are_written_without_the_noise_of_the_clock() -> None:
    metrics = {"seconds_checkpoint": 2.6429997888044454e-06, "forward_seconds": 12.345678901, "loss": 1.23456789e-06}
    assert rounded_seconds(metrics) == {"seconds_checkpoint": 0.0, "forward_seconds": 12.3457, "loss": 1.23456789e-06}
