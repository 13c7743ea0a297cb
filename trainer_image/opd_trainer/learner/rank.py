"""One learner rank: models, optimizer and the step, inside an initialised process group. Knows no Ray."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedTokenizerBase
from transformers.utils import is_flash_attn_2_available

from opd_api.trainer_config import TrainerConfig, TrainerTeacher
from opd_api.v1alpha1 import Device, Dtype, TeacherBackend
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError
from opd_trainer.learner import export, state
from opd_trainer.learner.batch import MicroBatch
from opd_trainer.learner.memory import MemoryNeed, check_memory, free_memory
from opd_trainer.learner.models import DTYPES, critic_builder, student_builder, teacher_builder
from opd_trainer.learner.optimizer import (
    GradientScaler,
    adamw,
    clip_gradients,
    learning_rate_factor,
    set_learning_rate,
    trainable,
)
from opd_trainer.learner.packing import Layout
from opd_trainer.learner.sharding import build_sharded
from opd_trainer.learner.step import Models, RankResult, RankWork, StepRunner

logger = logging.getLogger(__name__)

#: Updates in a row in which a model's gradient may be infinite or NaN before the run ends.
_BAD_UPDATES = 3
#: What is trained -> the metric of its skipped updates, and what to do when they do not end.
_SKIPPED = {"student": "skipped_updates", "critic": "critic_skipped_updates"}
_REMEDY = {
    "student": "lower training.learningRate, or look at the teacher's log-probabilities",
    "critic": "lower task.critic.learningRate, or look at the rewards",
}
#: Share of the free memory that whole gradients may take between two micro-batches.
_DEFER_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What the group must know of its ranks."""

    layout: Layout
    fused_head: bool
    parameters: int
    #: Steps made so far (from the checkpoint); None from a checkpoint that does not say.
    steps: int | None


class LearnerRank:
    """Methods are collectives: every rank calls the same one with its own part of the work."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        total_steps: int,
        layout: Layout | None = None,
        master: torch.dtype = torch.float32,
        always_pass_one: bool = False,
    ) -> None:
        """`layout`, `master` (type of parameters) and `always_pass_one` are for numerics tests; the defaults are right."""
        self._config = config
        self._total_updates = total_steps * config.training.updates_per_step
        self._master = master
        self._always_pass_one = always_pass_one
        cuda = config.device is Device.CUDA
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        half = config.training.dtype is not Dtype.FP32
        flash = cuda and half and is_flash_attn_2_available()
        self._layout = layout or (Layout.PACKED if flash else Layout.PADDED)
        self._attention = "flash_attention_2" if flash else "sdpa"
        self._updates = 0
        self._steps: int | None = 0
        #: Student and critic each for itself: the good gradient of one says nothing about the other.
        self._bad_updates: Counter[str] = Counter()

    # --- life ----------------------------------------------------------------------------------------------------------
    def start(self, checkpoint: Path | None) -> RankFacts:
        """Load the models, or a checkpoint's `learner` folder. Raises TrainerError."""
        config, world = self._config, dist.get_world_size()
        self._control = dist.new_group(backend="gloo")
        mesh = init_device_mesh(self._device.type, (world,))
        compute = self._master if self._master == torch.float64 else DTYPES[config.training.dtype]
        self._tokenizer: PreTrainedTokenizerBase | None = None
        if dist.get_rank() == 0:
            self._tokenizer = export.load_tokenizer(config.student)
        torch.manual_seed(config.training.seed)
        build = student_builder(
            config.student.model, config.student.lora, seed=config.training.seed, attention=self._attention
        )
        free = self._least(free_memory(self._device, self._ranks_on_host()))
        check_memory(self._need(build(False)), ranks=world, free=free)
        self._student = build_sharded(build, mesh, compute=compute, master=self._master)
        self._optimizer = adamw(
            self._student.parameters(), learning_rate=config.training.learning_rate, training=config.training
        )
        self._start_critic(mesh, compute)
        teachers = self._load_teachers(mesh)
        self._prepare_training()
        self._scaler = GradientScaler.for_dtype(compute)
        self._defer_sync = world > 1 and 4.0 * _count(self._student, trained=True) < _DEFER_SHARE * free
        self._runner = StepRunner(
            config,
            Models(
                student=self._student,
                teachers=teachers,
                teacher_weights={teacher.name: teacher.weight for teacher in config.teachers},
                critic=self._critic,
                compute=compute,
                device=self._device,
            ),
            layout=self._layout,
            floats=torch.float64 if self._master == torch.float64 else torch.float32,
            control=self._control,
            always_pass_one=self._always_pass_one,
        )
        if checkpoint is not None:
            self._load(checkpoint)
        return RankFacts(self._layout, self._student.fused, _count(self._student), self._steps)

    def _start_critic(self, mesh: DeviceMesh, compute: torch.dtype) -> None:
        task = self._config.task
        self._critic, self._critic_optimizer = None, None
        if task.critic is None or task.task_adv_weight <= 0:
            return
        build = critic_builder(task.critic.model, attention=self._attention)
        self._critic = build_sharded(build, mesh, compute=compute, master=self._master)
        self._critic_optimizer = adamw(
            self._critic.parameters(), learning_rate=task.critic.learning_rate, training=self._config.training
        )

    def _load_teachers(self, mesh: DeviceMesh) -> dict[str, nn.Module]:
        double = torch.float64 if self._master == torch.float64 else None
        loaded = {}
        for teacher in in_process_teachers(self._config):
            assert teacher.model is not None
            build = teacher_builder(teacher.model, attention=self._attention)
            loaded[teacher.name] = build_sharded(
                build, mesh, compute=double or DTYPES[teacher.model.dtype], master=double
            ).eval()
        return loaded

    def _prepare_training(self) -> None:
        for module in (self._student, self._critic):
            if module is None:
                continue
            if self._config.training.activation_checkpointing:
                module.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            module.train()

    def _need(self, student: nn.Module) -> MemoryNeed:
        """From modules without storage."""
        trained, total = _count(student, trained=True), _count(student)
        critic = self._config.task.critic
        if critic is not None and self._config.task.task_adv_weight > 0:
            trained_critic = _count(critic_builder(critic.model, attention=self._attention)(False))
            trained, total = trained + trained_critic, total + trained_critic
        teachers = 0
        for teacher in in_process_teachers(self._config):
            assert teacher.model is not None
            size = DTYPES[teacher.model.dtype].itemsize
            teachers += size * _count(teacher_builder(teacher.model, attention=self._attention)(False))
        return MemoryNeed(trained=trained, frozen=total - trained, teachers=teachers)

    def _ranks_on_host(self) -> int:
        hosts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname(), group=self._control)
        return hosts.count(socket.gethostname())

    def _least(self, value: float) -> float:
        """The smallest of all ranks' values: what follows from it decides how many collectives a rank makes."""
        least = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._control)
        return float(least)

    # --- step ----------------------------------------------------------------------------------------------------------
    def step(self, work: RankWork) -> RankResult:
        """All updates of a step. Raises TrainerError when the gradient stays infinite."""
        updates = self._runner.prepare(work)
        for batches, names in zip(updates, work.teachers, strict=True):
            self._update(batches, names)
        if self._steps is not None:
            self._steps += 1
        result = RankResult(self._metrics(len(updates), sum(len(batches) for batches in updates)))
        for batches in updates:
            for batch in batches:
                _collect(batch, batch.old, result.old_logprobs)
                if self._runner.has_teachers:
                    _collect(batch, batch.teacher, result.teacher_logprobs)
        return result

    def _update(self, batches: list[MicroBatch], names: list[list[str]]) -> None:
        training, runner = self._config.training, self._runner
        factor = learning_rate_factor(
            self._updates,
            total=self._total_updates,
            warmup=training.warmup_steps * training.updates_per_step,
            schedule=training.schedule,
        )
        normaliser = runner.normaliser(batches)
        for number, (batch, teachers) in enumerate(zip(batches, names, strict=True)):
            last = number == len(batches) - 1
            for module in (self._student, self._critic):
                if isinstance(module, FSDPModule):
                    module.set_requires_gradient_sync(last or not self._defer_sync)
            runner.backward(batch, teachers, normaliser, lambda loss: loss * self._scaler.scale)
        self._updates += 1
        self._apply(factor, trained=normaliser.tokens > 0)
        runner.meter.total("tokens", normaliser.tokens / dist.get_world_size())

    def _apply(self, factor: float, *, trained: bool) -> None:
        """Clip, check and step; nothing moves in an update without trained tokens."""
        training, meter = self._config.training, self._runner.meter
        parameters = trainable(self._student)
        self._scaler.unscale(parameters)
        norm = clip_gradients(parameters, training.grad_clip)
        finite = bool(torch.isfinite(torch.tensor(norm)))
        rate = training.learning_rate * factor
        if finite:
            meter.add("grad_norm", norm)
            meter.add("grad_clip_fraction", float(norm > training.grad_clip))
        meter.add("learning_rate", rate)
        if trained and finite:
            set_learning_rate(self._optimizer, rate)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._apply_critic(factor, trained=trained)
        self._scaler.update(finite)
        # An overflow of fp16 is normal while the scale is found.
        self._watch(finite, norm, of="student", normal=self._scaler.enabled and self._scaler.scale > 1)

    def _apply_critic(self, factor: float, *, trained: bool) -> None:
        critic = self._config.task.critic
        if self._critic is None or self._critic_optimizer is None or critic is None:
            return
        norm = clip_gradients(trainable(self._critic), self._config.training.grad_clip)
        finite = bool(torch.isfinite(torch.tensor(norm)))
        if finite:
            self._runner.meter.add("critic_grad_norm", norm)
        if trained and finite:
            set_learning_rate(self._critic_optimizer, critic.learning_rate * factor)
            self._critic_optimizer.step()
        self._critic_optimizer.zero_grad(set_to_none=True)
        self._watch(finite, norm, of="critic")

    def _watch(self, finite: bool, norm: float, *, of: str, normal: bool = False) -> None:
        """Count the bad gradients of one model. Unless they are `normal` they may come only a few times in a row."""
        if finite:
            self._bad_updates[of] = 0
            return
        self._runner.meter.total(_SKIPPED[of], 1.0 / dist.get_world_size())
        logger.warning("update %d of the %s is skipped: the norm of its gradient is %s", self._updates, of, norm)
        if normal:
            return
        self._bad_updates[of] += 1
        if self._bad_updates[of] >= _BAD_UPDATES:
            raise TrainerError(
                FailureClass.INTERNAL,
                Reason.INTERNAL_ERROR,
                f"the gradient of the {of} was {norm} in {_BAD_UPDATES} updates in a row; {_REMEDY[of]}",
            )

    def _metrics(self, updates: int, micro_batches: int) -> dict[str, float]:
        metrics = self._runner.meter.reduce(self._control)
        metrics["opd_loss"] = metrics.pop("loss_sum", 0.0) / max(1, updates)
        if "value_loss_sum" in metrics:
            metrics["value_loss"] = metrics.pop("value_loss_sum") / max(1, updates)
        metrics["updates"] = float(updates)
        metrics["micro_batches"] = float(micro_batches)
        metrics["fused_head"] = float(self._student.fused)
        return metrics

    # --- files -----------------------------------------------------------------------------------------------------------
    def save(self, directory: Path) -> None:
        """DCP shards of model, optimizer and schedule (and of the critic)."""
        state.save(directory, self._trained(), self._schedule(), adapters_only=self._config.student.lora is not None)

    def _load(self, directory: Path) -> None:
        schedule = state.load(
            directory, self._trained(), self._schedule(), adapters_only=self._config.student.lora is not None
        )
        self._updates = int(schedule["updates"])
        self._steps = int(schedule["steps"]) if "steps" in schedule else None
        self._scaler.restore(schedule)

    def _trained(self) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
        trained: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {"student": (self._student, self._optimizer)}
        if self._critic is not None and self._critic_optimizer is not None:
            trained["critic"] = (self._critic, self._critic_optimizer)
        return trained

    def _schedule(self) -> dict[str, float | int]:
        known = {} if self._steps is None else {"steps": self._steps}
        return {"updates": self._updates, **known, **self._scaler.state()}

    def publish(self, directory: Path) -> None:
        """The current weights, in the type that the learner computes in, for the engines. Rank 0 writes."""
        self._write(directory, DTYPES[self._config.training.dtype])

    def export(self, directory: Path) -> None:
        """The final student in model.dtype; with adapters, they alone as well. Rank 0 writes."""
        self._write(directory, DTYPES[self._config.student.model.dtype])
        if self._config.student.lora is not None:
            first = dist.get_rank() == 0
            adapter = export.gather_adapter(self._student, keep=first)
            if first:
                export.write_adapter(directory / export.ADAPTER_FOLDER, adapter, self._config.student)
            dist.barrier(group=self._control)

    def _write(self, directory: Path, dtype: torch.dtype) -> None:
        first = dist.get_rank() == 0
        weights = export.gather(self._student, dtype, keep=first)
        if first:
            assert self._tokenizer is not None
            trusted = self._config.student.model.trust_remote_code
            export.write_model(directory, weights, self._student, dtype, trusted)
            self._tokenizer.save_pretrained(directory)
        dist.barrier(group=self._control)


def in_process_teachers(config: TrainerConfig) -> list[TrainerTeacher]:
    """Teachers that run inside the learner."""
    return [teacher for teacher in config.teachers if teacher.backend is TeacherBackend.INPROCESS]


def _count(module: nn.Module, *, trained: bool = False) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


def _collect(batch: MicroBatch, grid: torch.Tensor | None, into: dict) -> None:
    if grid is None:
        return
    values = grid.detach().float().cpu().numpy()
    for row, (sample, length) in enumerate(zip(batch.sample_ids, batch.lengths, strict=True)):
        into[sample] = values[row, :length].copy()
