"""The controller over in-memory parts on a virtual clock."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from controller_fakes import FakeEngine, FakeLearner, FakeScorer, Rig, trainer_config
from virtual_time import run_virtual

from opd_api.trainer_config import TrainerConfig
from opd_api.vocabulary import Outcome, TrainerPhase
from opd_trainer.controller.state import RunState
from opd_trainer.interfaces import StepResult
from opd_trainer.sample import Sample


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
        assert not list((tmp_path / "run" / "weights").glob("*/v*")), (
            "as large as the export, and nobody loads them again"
        )

    run_virtual(main())


def test_every_prompt_of_an_epoch_is_used_once(tmp_path: Path) -> None:
    async def main() -> None:
        config = trainer_config(tmp_path / "run", training={"steps": 5, "promptsPerStep": 2})
        rig = Rig(tmp_path / "run", config=config, prompts=10, engine=FakeEngine(latency=lambda call: 1.0 + call % 4))
        await rig.controller.run()
        assert Counter(rig.consumed_prompts) == Counter(f"prompt {row}" for row in range(10))

    run_virtual(main())


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_an_asynchronous_run_never_trains_on_samples_that_are_too_old(tmp_path: Path, max_staleness: int) -> None:
    async def main() -> None:
        config = trainer_config(
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
        config = trainer_config(
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
            config=trainer_config(tmp_path / "run", training={"steps": 5, "promptsPerStep": batch}),
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
        config = trainer_config(
            tmp_path / "run", rollout={"samplesPerPrompt": 2}, training={"steps": 2, "promptsPerStep": 8}
        )
        rig = Rig(tmp_path / "run", config=config, engine=FakeEngine(latency=lambda call: 1.0, concurrency=6))
        await rig.controller.run()
        assert rig.engine.most_in_flight == 6

    run_virtual(main())


def test_a_group_larger_than_the_fleet_still_runs(tmp_path: Path) -> None:
    async def main() -> None:
        config = trainer_config(
            tmp_path / "run", rollout={"samplesPerPrompt": 8}, training={"steps": 1, "promptsPerStep": 2}
        )
        rig = Rig(tmp_path / "run", config=config, engine=FakeEngine(latency=lambda call: 1.0, concurrency=4))
        assert (await rig.controller.run()).outcome is Outcome.SUCCEEDED

    run_virtual(main())


def async_config(directory: Path, **rollout: Any) -> TrainerConfig:
    options = {"maxStaleness": 2, "maxResponseTokens": 8, **rollout}
    return trainer_config(directory, rollout=options, training={"steps": 6, "promptsPerStep": 2})


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


def test_drawing_the_report_does_not_hold_up_training(tmp_path: Path) -> None:
    async def main() -> None:
        written: list[str] = []

        async def report(outcome: str, message: str) -> Path:
            await asyncio.sleep(7.0)
            written.append(outcome)
            return tmp_path / "index.html"

        config = trainer_config(tmp_path / "run", training={"steps": 6, "checkpoint": {"everySteps": 1}})
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


class ForgetfulLearner(FakeLearner):
    """Keeps no batch, and counts the samples that somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[int] = []

    async def step(self, samples: list[Sample], step: int) -> StepResult:
        result = await super().step(samples, step)
        self.batches.clear()
        self.held.append(sum(isinstance(item, Sample) for item in gc.get_objects()))
        return result


def test_samples_are_let_go_when_their_step_is_done(tmp_path: Path) -> None:
    """Steps cost host memory once, not each."""

    async def main() -> None:
        learner = ForgetfulLearner()
        config = trainer_config(tmp_path / "run", training={"steps": 60}, rollout={"maxStaleness": 2})
        final = await Rig(tmp_path / "run", config=config, learner=learner).controller.run()
        assert final.outcome is Outcome.SUCCEEDED, final
        early, late = max(learner.held[5:30]), max(learner.held[-25:])
        assert late <= early, f"{early} samples are alive early in the run and {late} late in it"

    gc.collect()
    # What is there already is no sample of this run; to look at all of torch in every step takes a second.
    gc.freeze()
    try:
        run_virtual(main())
    finally:
        gc.unfreeze()


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
        rig = Rig(tmp_path / "run", config=trainer_config(tmp_path / "run", **sections))
        await rig.controller.run()
        assert rig.engine.top_k == top_k

    run_virtual(main())
