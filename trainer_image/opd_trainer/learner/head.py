"""From hidden states to what the objective needs, without ever holding [N, V] logits of a whole micro-batch.

The same requests are answered in two ways: fused with the lm_head's weight (default), or from the model's own logits where
they are more than `hidden @ weight^T` (soft caps, scales, a bias, adapters on the head).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from opd_api.v1alpha1 import Distillation, Tail, TokenSelection
from opd_trainer import core
from opd_trainer.learner.batch import MicroBatch

#: Bytes of fp32 logits in one chunk of rows of a full-vocabulary divergence.
_CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}
#: logits of a slice of rows [n, V'].
LogitsOf = Callable[[slice], Tensor]


class HeadKind(StrEnum):
    """What the head computes besides the sampled token's log-probability."""

    SAMPLED = "sampled"
    SET = "set"
    SURROGATE = "surrogate"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class HeadRequest:
    """A question to the head."""

    kind: HeadKind
    temperature: float
    distillation: Distillation
    #: Logits of the in-process teacher at the same rows; full only.
    teacher_logits: LogitsOf | None = None


class HeadOutput(NamedTuple):
    """Flat [N] each; `logprobs` and `divergence` are differentiable. Absent where the kind does not give it."""

    logprobs: Tensor
    divergence: Tensor | None = None
    entropy: Tensor | None = None
    student_mass: Tensor | None = None
    teacher_mass: Tensor | None = None


def divergence_kind(distillation: Distillation) -> HeadKind:
    """The kind of head that gives the divergence of the job's token selection."""
    if distillation.token_selection is TokenSelection.STUDENT_SAMPLED:
        return HeadKind.SAMPLED
    if distillation.token_selection is TokenSelection.FULL:
        return HeadKind.FULL
    return HeadKind.SURROGATE if distillation.tail is Tail.SAMPLED else HeadKind.SET


def from_hidden(hidden: Tensor, weight: Tensor, batch: MicroBatch, request: HeadRequest) -> HeadOutput:
    """Fused with the lm_head. hidden [N, H], weight [V, H]."""
    temperature = request.temperature
    if request.kind is HeadKind.SAMPLED:
        logprobs, entropy = core.linear_logprobs(hidden, weight, batch.labels, temperature=temperature)
        return HeadOutput(logprobs, entropy=entropy)
    if request.kind is HeadKind.FULL:
        return _full(lambda part, h, w: h[part] @ w.T, (hidden, weight), batch, request)
    ids = _sets(batch).ids
    if request.kind is HeadKind.SURROGATE:
        both = torch.cat([ids, batch.labels.unsqueeze(1)], dim=1)
        return _surrogate(core.linear_gather_logprobs(hidden, weight, both, temperature=temperature), batch, request)
    sets, options = _sets(batch), request.distillation
    return _from_topk(
        core.linear_topk_divergence(
            hidden,
            weight,
            sets.ids,
            sets.logprobs,
            options.divergence.value,
            tail=options.tail.value,
            labels=batch.labels,
            valid=sets.valid,
            jsd_alpha=options.jsd_alpha,
            forward_weight=options.mixed_forward_weight,
            log_prob_floor=options.log_prob_floor,
            temperature=temperature,
        )
    )


def from_logits(logits: Tensor, batch: MicroBatch, request: HeadRequest) -> HeadOutput:
    """From the model's own logits [N, V]."""
    temperature = request.temperature
    if request.kind is HeadKind.SAMPLED:
        logprobs = core.gather_logprobs(logits, batch.labels.unsqueeze(1), temperature=temperature)[:, 0]
        return HeadOutput(logprobs.clone())
    if request.kind is HeadKind.FULL:
        return _full(lambda part, z: z[part], (logits,), batch, request)
    sets, options = _sets(batch), request.distillation
    if request.kind is HeadKind.SURROGATE:
        both = torch.cat([sets.ids, batch.labels.unsqueeze(1)], dim=1)
        return _surrogate(core.gather_logprobs(logits, both, temperature=temperature), batch, request)
    return _from_topk(
        core.topk_divergence(
            logits,
            sets.ids,
            sets.logprobs,
            options.divergence.value,
            tail=options.tail.value,
            labels=batch.labels,
            valid=sets.valid,
            jsd_alpha=options.jsd_alpha,
            forward_weight=options.mixed_forward_weight,
            log_prob_floor=options.log_prob_floor,
            temperature=temperature,
        )
    )


def rows_per_chunk(vocabulary: int, device: torch.device) -> int:
    """Rows whose fp32 logits fit the chunk budget."""
    return max(1, _CHUNK_BYTES.get(device.type, 1 << 30) // (4 * vocabulary))


def _sets(batch: MicroBatch):
    if batch.selected is None:
        raise ValueError("the token sets of the teacher are missing")
    return batch.selected


def _from_topk(result: core.TopKResult) -> HeadOutput:
    assert result.sampled_logprobs is not None
    return HeadOutput(
        result.sampled_logprobs, result.divergence, result.entropy, result.student_mass, result.teacher_mass
    )


def _surrogate(gathered: Tensor, batch: MicroBatch, request: HeadRequest) -> HeadOutput:
    """`tail: sampled`: the set's reverse KL and a score-function correction outside it; gathered is [N, K + 1]."""
    sets = _sets(batch)
    if batch.teacher is None:
        raise ValueError("tail: sampled needs the teacher's log-probability of the sampled token")
    floor = request.distillation.log_prob_floor
    inside, sampled = gathered[:, :-1], gathered[:, -1]
    teacher_inside, teacher_sampled = sets.logprobs, batch.flatten(batch.teacher)
    if floor is not None:
        teacher_inside, teacher_sampled = teacher_inside.clamp_min(floor), teacher_sampled.clamp_min(floor)
        inside = inside.clamp_min(floor)
    # An entry that is not valid is no member of the set: −1 equals no sampled token, −inf reaches no sum.
    ids = torch.where(sets.valid, sets.ids, -torch.ones_like(sets.ids))
    teacher_inside = torch.where(sets.valid, teacher_inside, torch.full_like(teacher_inside, -torch.inf))
    divergence = core.student_topk_surrogate_from_logprobs(
        inside, ids, teacher_inside, sampled, batch.labels, teacher_sampled
    )
    with torch.no_grad():
        student_mass = torch.where(sets.valid, gathered[:, :-1].exp(), torch.zeros_like(inside)).sum(-1)
        teacher_mass = torch.where(sets.valid, sets.logprobs.exp(), torch.zeros_like(sets.logprobs)).sum(-1)
    return HeadOutput(sampled.clone(), divergence, None, student_mass, teacher_mass)


def _full(
    logits_of: Callable[..., Tensor], inputs: tuple[Tensor, ...], batch: MicroBatch, request: HeadRequest
) -> HeadOutput:
    """The whole vocabulary, chunk by chunk; each chunk's logits are formed again in the backward pass."""
    if request.teacher_logits is None:
        raise ValueError("tokenSelection full needs the in-process teacher's logits")
    teacher, vocabulary = request.teacher_logits, inputs[-1].shape[0 if len(inputs) == 2 else 1]
    step = rows_per_chunk(vocabulary, inputs[0].device)
    parts = []
    for begin in range(0, batch.labels.shape[0], step):
        part = slice(begin, min(begin + step, batch.labels.shape[0]))

        def chunk(*tensors: Tensor, part: slice = part) -> tuple[Tensor, Tensor, Tensor]:
            return _full_chunk(logits_of(part, *tensors), teacher(part), batch.labels[part], request)

        parts.append(checkpoint(chunk, *inputs, use_reentrant=False))
    logprobs, divergence, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    return HeadOutput(logprobs, divergence, entropy.detach())


def _full_chunk(
    logits: Tensor, teacher_logits: Tensor, labels: Tensor, request: HeadRequest
) -> tuple[Tensor, Tensor, Tensor]:
    options = request.distillation
    student = logits.to(_at_least_float(logits)) / request.temperature
    # core.full_divergence has one temperature for both sides; here the teacher stays at 1.
    teacher = teacher_logits.to(student.dtype)
    everything = torch.log_softmax(student, dim=-1)
    logprobs = everything.gather(1, labels.unsqueeze(1))[:, 0]
    entropy = -(everything.detach().exp() * everything.detach()).sum(-1)
    if options.log_prob_floor is None:
        divergence = core.full_divergence(
            student,
            teacher,
            options.divergence.value,
            jsd_alpha=options.jsd_alpha,
            forward_weight=options.mixed_forward_weight,
        )
    else:
        shared = min(student.shape[-1], teacher.shape[-1])
        divergence = core.set_divergence(
            torch.log_softmax(student[:, :shared], dim=-1),
            torch.log_softmax(teacher[:, :shared], dim=-1),
            options.divergence.value,
            tail="trunc",
            jsd_alpha=options.jsd_alpha,
            forward_weight=options.mixed_forward_weight,
            log_prob_floor=options.log_prob_floor,
        )
    return logprobs, divergence, entropy


def _at_least_float(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
