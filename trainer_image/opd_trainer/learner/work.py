"""A step's samples as work of ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from opd_api.trainer_config import TrainerConfig
from opd_api.v1alpha1 import TeacherBackend
from opd_trainer.learner.batch import input_length
from opd_trainer.learner.packing import Layout, plan_ranks, split_updates
from opd_trainer.learner.step import RankWork
from opd_trainer.learner.task import check_rewards, task_advantages
from opd_trainer.sample import Sample


def split(config: TrainerConfig, samples: Sequence[Sample], *, ranks: int, layout: Layout) -> list[RankWork]:
    """Each rank's work. Raises TrainerError(Data) when rewards are missing that the task needs.

    Samples are cut into updates in their order (groups stay together as far as they go), each update into micro-batches
    of equal number on all ranks. Task advantages are those of the whole step.
    """
    task = config.task
    if task.task_adv_weight > 0 and task.critic is not None:
        check_rewards(samples)
    advantages = task_advantages(samples, task)
    works = [RankWork([], None, []) for _ in range(ranks)]
    for part in split_updates(len(samples), config.training.updates_per_step):
        members = [samples[index] for index in part]
        plans = plan_ranks(
            [input_length(sample) for sample in members], ranks, config.training.max_tokens_per_micro_batch, layout
        )
        named = in_process_passes(config, members, plans)
        for work, plan in zip(works, plans, strict=True):
            work.updates.append([[members[index] for index in batch] for batch in plan])
            work.teachers.append(named)
    if advantages is None:
        return works
    return [
        RankWork(
            work.updates,
            {s.sample_id: advantages[s.sample_id] for update in work.updates for batch in update for s in batch},
            work.teachers,
        )
        for work in works
    ]


def in_process_passes(
    config: TrainerConfig, samples: Sequence[Sample], plans: Sequence[Sequence[Sequence[int]]]
) -> list[list[str]]:
    """For each micro-batch the in-process teachers that some rank needs: all ranks pass through the same teachers."""
    names = [teacher.name for teacher in config.teachers if teacher.backend is TeacherBackend.INPROCESS]
    if not names:
        return [[] for _ in plans[0]]
    passes = []
    for number in range(len(plans[0])):
        wanted = {
            name for plan in plans for index in plan[number] for name in (samples[index].teacher or "").split("+")
        }
        passes.append([name for name in names if name in wanted])
    return passes
