"""One step: what is old, what is an advantage, and the optimizer updates.

Phases, each over all micro-batches of the step before the next begins, because they end in numbers of the whole step:
teachers in the learner -> values -> pass 1 (old log-probabilities) -> correction -> advantages -> updates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from opd_api.trainer_config import TrainerConfig
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer import core
from opd_trainer.core import Moments
from opd_trainer.errors import TrainerError
from opd_trainer.learner.batch import MicroBatch, build
from opd_trainer.learner.head import HeadKind, HeadRequest, divergence_kind
from opd_trainer.learner.inprocess import TeacherPass, TeacherRows, beyond_vocabulary, fill, scored_rows
from opd_trainer.learner.metering import Meter
from opd_trainer.learner.models import Critic, FrozenTeacher, StudentWithHead
from opd_trainer.learner.objective import Normaliser, Objective
from opd_trainer.learner.packing import Layout
from opd_trainer.learner.task import Advantages
from opd_trainer.sample import Sample

logger = logging.getLogger(__name__)

#: The fused head may differ from the model's own logits by this much more than the rounding of these, in nats.
_HEAD_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}


@dataclass(frozen=True, slots=True)
class RankWork:
    """One rank's part of a step. The same number of updates and micro-batches on every rank."""

    #: updates -> micro-batches -> samples; an empty micro-batch is a dummy pass.
    updates: list[list[list[Sample]]]
    task: Advantages | None
    #: updates -> micro-batches -> in-process teachers that some rank needs there.
    teachers: list[list[list[str]]]


@dataclass(slots=True)
class RankResult:
    """What a rank tells; metrics are those of all ranks."""

    metrics: dict[str, float]
    old_logprobs: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    teacher_logprobs: dict[int, NDArray[np.float32]] = field(default_factory=dict)


@dataclass(slots=True)
class Models:
    """What a rank holds, sharded."""

    student: StudentWithHead
    teachers: dict[str, FrozenTeacher]
    teacher_weights: dict[str, float]
    critic: Critic | None
    compute: torch.dtype
    device: torch.device


class StepRunner:
    """Runs the phases of a step on one rank. Every method that touches a model is a collective."""

    def __init__(
        self,
        config: TrainerConfig,
        models: Models,
        *,
        layout: Layout,
        floats: torch.dtype,
        control: dist.ProcessGroup | None,
        always_pass_one: bool = False,
    ) -> None:
        self._config = config
        self._models = models
        self._layout = layout
        self._floats = floats
        self._control = control
        self._world = dist.get_world_size()
        self._always_pass_one = always_pass_one
        self._head_checked = False
        self.objective = Objective(config)
        self.meter = Meter()

    @property
    def has_teachers(self) -> bool:
        """Whether teachers run inside the learner."""
        return bool(self._models.teachers)

    # --- phases before the updates -------------------------------------------------------------------------------------
    def prepare(self, work: RankWork) -> list[list[MicroBatch]]:
        """Micro-batches of all updates, with everything in them that does not depend on the current weights."""
        self.meter = Meter()
        updates = [
            [
                build(samples, self._layout, task=work.task, device=self._models.device, dtype=self._floats)
                for samples in update
            ]
            for update in work.updates
        ]
        flat = [
            (batch, names)
            for update, named in zip(updates, work.teachers, strict=True)
            for batch, names in zip(update, named, strict=True)
        ]
        self._check_head(flat[0][0])
        with torch.no_grad():
            if self.has_teachers and not self._teachers_answer_late:
                with self._timed("teacher_forward_seconds"):
                    for batch, names in flat:
                        self._ask_teachers(batch, names)
            batches = [batch for batch, _ in flat]
            for batch, names in flat:
                self._drop_what_the_teacher_lacks(batch, names)
            self._values(batches)
            if self.objective.needs_pass_one(len(updates)) or self._always_pass_one:
                with self._timed("old_logprobs_seconds"):
                    for batch, names in flat:
                        self._pass_one(batch, names)
            self._correct(batches)
            self._advantages(batches)
        return updates

    @property
    def _teachers_answer_late(self) -> bool:
        """A loss over the whole vocabulary asks the teachers beside the update's own forward pass, and only there."""
        return divergence_kind(self._config.distillation) is HeadKind.FULL and not self.objective.advantage_signal

    def _ask_teachers(self, batch: MicroBatch, names: Sequence[str]) -> None:
        if names:
            fill(batch, self._teacher_pass(batch, names), self._config.distillation)
            self._reshard_teachers(names)

    def _teacher_pass(self, batch: MicroBatch, names: Sequence[str]) -> TeacherPass:
        rows = []
        for name, mine in scored_rows(batch, names):
            with torch.no_grad():
                states = self._models.teachers[name](batch)
            rows.append(TeacherRows(self._models.teachers[name], states, self._models.teacher_weights[name], mine))
        return TeacherPass(rows)

    def _reshard_teachers(self, names: Sequence[str]) -> None:
        for name in names:
            _reshard(self._models.teachers[name])

    def _drop_what_the_teacher_lacks(self, batch: MicroBatch, names: Sequence[str]) -> None:
        """A token to which the teacher gives no probability at all (its vocabulary lacks it) trains nothing."""
        if batch.empty:
            return
        if self._teachers_answer_late and names:
            lacking = batch.trained & batch.to_grid(beyond_vocabulary(batch, self._vocabularies(names)))
        elif batch.teacher is not None:
            lacking = batch.trained & ~torch.isfinite(batch.teacher)
        else:
            return
        self.meter.total("tokens_teacher_lacks", float(lacking.sum()))
        batch.trained &= ~lacking

    def _vocabularies(self, names: Sequence[str]) -> dict[str, int]:
        return {name: self._models.teachers[name].vocabulary for name in names}

    def _values(self, batches: Sequence[MicroBatch]) -> None:
        if self._models.critic is None:
            return
        for batch in batches:
            batch.values = batch.to_grid(self._models.critic(batch).to(self._floats))
            _, batch.returns = core.gae(batch.token_rewards, batch.values, batch.trained)
            # Whitening needs the whole step, so the advantages are taken back from the returns: A = G − V.
            batch.task = batch.returns - batch.values
        for batch, white in zip(batches, self._whitened([b.task for b in batches], batches, final=False), strict=True):
            batch.task = white

    def _pass_one(self, batch: MicroBatch, names: Sequence[str]) -> None:
        with self._request(batch, names, for_advantages=True) as request:
            output = self._models.student(batch, request)
        batch.old = batch.to_grid(output.logprobs.to(self._floats))
        if output.divergence is not None:
            batch.divergence = batch.to_grid(output.divergence.to(self._floats))

    def _correct(self, batches: Sequence[MicroBatch]) -> None:
        for batch in batches:
            self._mismatch(batch)
            if self.objective.corrects and batch.old is not None:
                tokens = float(batch.trained.sum())
                batch.weights, kept, metrics = self.objective.correction(batch, batch.old)
                self.meter.add_all(metrics, tokens)
                batch.trained &= kept
            if self.objective.old_from_engine:
                batch.old = batch.rollout

    def _mismatch(self, batch: MicroBatch) -> None:
        """How far engine and learner are apart on the same tokens: E[exp(r) − r − 1] and E|r|, r = learner − engine."""
        if batch.old is None or batch.rollout is None:
            return
        tokens = float(batch.trained.sum())
        ratio = (batch.old - batch.rollout)[batch.trained]
        if tokens:
            self.meter.add("mismatch_kl", (torch.expm1(ratio) - ratio).mean(), tokens)
            self.meter.add("mismatch_abs", ratio.abs().mean(), tokens)

    # --- advantages ------------------------------------------------------------------------------------------------------
    def _advantages(self, batches: Sequence[MicroBatch]) -> None:
        """Fill `advantages` wherever they do not have to wait for the update's own forward pass."""
        if self.objective.whitens_task:
            tasks = [self._task_of(batch) for batch in batches]
            for batch, white in zip(batches, self._whitened(tasks, batches, final=False), strict=True):
                batch.task = white
        if not self.objective.advantage_signal:
            if self.objective.has_task:
                self._finish_advantages(batches, [None] * len(batches))
            return
        ready = all(self._can_compare(batch) for batch in batches)
        if not ready:
            return
        signals = []
        for batch in batches:
            assert batch.old is not None
            signals.append(self.objective.distillation_advantages(batch, batch.old, batch.divergence))
        if self.objective.subtracts_baseline:
            moments = self._moments(signals, batches)
            signals = [self.objective.baseline(x, b, moments) for x, b in zip(signals, batches, strict=True)]
        self._finish_advantages(batches, list(signals))

    def _can_compare(self, batch: MicroBatch) -> bool:
        return batch.old is not None and (batch.divergence is not None or not self.objective.compares_sets)

    def _finish_advantages(self, batches: Sequence[MicroBatch], signals: Sequence[Tensor | None]) -> None:
        combined = [
            self.objective.combine(batch, self._task_of(batch) if self.objective.has_task else None, signal)
            for batch, signal in zip(batches, signals, strict=True)
        ]
        if self.objective.whitens_sum:
            combined = self._whitened(combined, batches, final=True)
        for batch, advantages in zip(batches, combined, strict=True):
            batch.advantages = advantages

    @staticmethod
    def _task_of(batch: MicroBatch) -> Tensor:
        if batch.task is None:
            raise ValueError("the task advantages are missing")
        return batch.task

    def _whitened(self, values: Sequence[Tensor | None], batches: Sequence[MicroBatch], *, final: bool) -> list[Tensor]:
        present = [value for value in values if value is not None]
        moments = self._moments(present, batches)
        return [self.objective.whiten(x, b, moments, final=final) for x, b in zip(present, batches, strict=True)]

    def _moments(self, values: Sequence[Tensor], batches: Sequence[MicroBatch]) -> Moments:
        """Of all trained tokens of the step, over all ranks."""
        parts = [torch.stack(core.masked_moments(x, b.trained)).cpu() for x, b in zip(values, batches, strict=True)]
        total = torch.stack(parts).sum(0)
        dist.all_reduce(total, group=self._control)
        device = self._models.device
        return Moments(total[0].to(device), total[1].to(device), total[2].to(device))

    # --- updates -----------------------------------------------------------------------------------------------------------
    def normaliser(self, batches: Sequence[MicroBatch]) -> Normaliser:
        """Trained tokens and sequences of an update over all ranks: one collective before the first backward."""
        counts = torch.tensor(
            [
                float(sum(int(b.trained.sum()) for b in batches)),
                float(sum(int(b.trained.any(dim=1).sum()) for b in batches)),
            ],
            dtype=torch.float64,
        )
        dist.all_reduce(counts, group=self._control)
        return Normaliser(float(counts[0]), float(counts[1]), self._world)

    def backward(
        self, batch: MicroBatch, names: Sequence[str], normaliser: Normaliser, scale: Callable[[Tensor], Tensor]
    ) -> None:
        """Forward and backward of one micro-batch of the student, and of the critic."""
        with self._request(batch, names, for_advantages=False) as request:
            with self._timed("forward_seconds"):
                output = self._models.student(batch, request)
                logprobs = batch.to_grid(output.logprobs.to(self._floats))
                divergence = None if output.divergence is None else batch.to_grid(output.divergence.to(self._floats))
                if batch.old is None:
                    batch.old = logprobs.detach()
                if self.objective.advantage_signal and batch.advantages is None:
                    signal = self.objective.distillation_advantages(batch, batch.old, divergence)
                    self._finish_advantages([batch], [signal])
                loss, metrics = self.objective.loss(batch, logprobs, batch.old, divergence, normaliser)
            with self._timed("backward_seconds"):
                scale(loss).backward()
        self.meter.add_all(metrics, float(batch.trained.sum()))
        self.meter.total("loss_sum", float(loss.detach()) / self._world)
        self._observe(batch, output.entropy, output.student_mass, output.teacher_mass)
        if self._models.critic is not None:
            values = batch.to_grid(self._models.critic(batch).to(self._floats))
            value_loss, value_metrics = self.objective.value_loss(batch, values, normaliser)
            value_loss.backward()
            self.meter.add_all(value_metrics, float(batch.trained.sum()))
            self.meter.total("value_loss_sum", float(value_loss.detach()) / self._world)

    def _observe(self, batch: MicroBatch, *flat: Tensor | None) -> None:
        tokens = float(batch.trained.sum())
        if not tokens:
            return
        trained = batch.flatten(batch.trained)
        for name, values in zip(("entropy", "student_mass", "teacher_mass"), flat, strict=True):
            if values is not None:
                self.meter.add(name, values.detach()[trained].mean(), tokens)
        if batch.old is not None and batch.teacher is not None:
            gap = (batch.old - batch.teacher)[batch.trained]
            self.meter.add("opd_reverse_kl", gap.mean(), tokens)
        if batch.advantages is not None:
            self.meter.add("advantage_mean", batch.advantages[batch.trained].mean(), tokens)
            self.meter.add("advantage_abs", batch.advantages[batch.trained].abs().mean(), tokens)

    # --- parts ---------------------------------------------------------------------------------------------------------------
    @contextmanager
    def _request(self, batch: MicroBatch, names: Sequence[str], *, for_advantages: bool) -> Iterator[HeadRequest]:
        """The question to the student's head; teachers stay whole until the block ends."""
        distillation = self._config.distillation
        wanted = self.objective.compares_sets and self.objective.advantage_signal is for_advantages
        if self.objective.advantage_signal and not for_advantages:
            # Without pass 1 the update's own detached divergence is the advantage.
            wanted = self.objective.compares_sets and batch.advantages is None
        kind = divergence_kind(distillation) if wanted else HeadKind.SAMPLED
        if kind in (HeadKind.SET, HeadKind.SURROGATE) and batch.selected is None:
            raise TrainerError(
                FailureClass.INTERNAL,
                Reason.INTERNAL_ERROR,
                f"distillation.tokenSelection {distillation.token_selection} reached the learner without token sets",
            )
        logits = None
        if kind is HeadKind.FULL:
            if not names:
                raise TrainerError(
                    FailureClass.CONFIG,
                    Reason.CONFIG_ERROR,
                    "distillation.tokenSelection full needs a teacher with backend inprocess",
                )
            with self._timed("teacher_forward_seconds"):
                teachers = self._teacher_pass(batch, names)
                if self._teachers_answer_late:
                    fill(batch, teachers, distillation)
            logits = teachers.logits
        try:
            yield HeadRequest(kind, self._config.rollout.sampling.temperature, distillation, logits)
        finally:
            if logits is not None:
                self._reshard_teachers(names)

    def _check_head(self, batch: MicroBatch) -> None:
        """First batch: the fused head against the model's own logits; another answer switches the fused head off."""
        if self._head_checked:
            return
        self._head_checked = True
        if self._models.student.fused:
            with torch.no_grad():
                apart = self._models.student(batch, None)
            assert apart.divergence is not None
            gap = (apart.logprobs - apart.divergence).max().double().cpu()
            dist.all_reduce(gap, op=dist.ReduceOp.MAX, group=self._control)
            limit = _HEAD_TOLERANCE[self._models.compute]
            if not float(gap) <= limit:
                self._models.student.fused = False
                logger.warning(
                    "the fused head differs from this model's own logits by %.3g nats more than rounding explains (limit %.3g):"
                    " the model's logits are used, which needs more memory; please report the architecture %s",
                    float(gap),
                    limit,
                    type(self._models.student.model).__name__,
                )
            _reshard(self._models.student)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.meter.total(name, (time.perf_counter() - started) / self._world)


def _reshard(module: torch.nn.Module) -> None:
    if isinstance(module, FSDPModule):
        module.reshard()
