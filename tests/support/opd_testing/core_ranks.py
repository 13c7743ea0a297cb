"""What the two ranks of the core's distributed tests compute; imported by the forked processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from opd_trainer import core

WORLD = 2
ROWS, VOCABULARY, SET, HIDDEN = 7, 23, 4, 6
SPLIT = 14  # columns of rank 0; rank 1 has the rest


def vocabulary_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits with padding at the end, ids, upstream of the log-probabilities, upstream of the log-sum-exp)."""
    generator = torch.Generator().manual_seed(3)
    logits = 5 * torch.randn(ROWS, VOCABULARY, dtype=torch.float64, generator=generator)
    logits[:, -2:] = -torch.inf
    logits[1, SPLIT:] = -torch.inf  # rank 1 holds only padding of this row
    ids = torch.randint(0, SPLIT, (ROWS, SET), generator=generator)
    ids[2] = torch.randint(SPLIT, VOCABULARY - 2, (SET,), generator=generator)
    ids[3, :2] = torch.tensor([SPLIT, VOCABULARY - 3])
    upstream = torch.randn(ROWS, SET, dtype=torch.float64, generator=generator)
    return logits, ids, upstream, torch.randn(ROWS, dtype=torch.float64, generator=generator)


def split_vocabulary(rank: int) -> dict[str, Any]:
    logits, ids, upstream, upstream_total = vocabulary_inputs()
    first = 0 if rank == 0 else SPLIT
    own = logits[:, first : SPLIT if rank == 0 else None].clone().requires_grad_()
    group = dist.group.WORLD
    values = core.vocab_parallel_gather_logprobs(own, ids, first_id=first, group=group, temperature=0.7, chunk_rows=3)
    total = core.vocab_parallel_logsumexp(own, group=group, temperature=0.7, chunk_rows=3)
    ((values * upstream).sum() + (total * upstream_total).sum()).backward()
    return {"values": values.detach(), "total": total.detach(), "gradient": own.grad}


class Student(nn.Module):
    """Two checkpointed blocks and a head whose loss runs inside the root's forward, as the learner does it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, inputs: Tensor, ids: Tensor, teacher: Tensor, labels: Tensor) -> core.TopKResult:
        hidden = inputs
        for block in self.blocks:
            hidden = checkpoint(lambda x, block=block: torch.tanh(block(x)), hidden, use_reentrant=False)
        return checkpoint(self._head, hidden, ids, teacher, labels, use_reentrant=False)

    def _head(self, hidden: Tensor, ids: Tensor, teacher: Tensor, labels: Tensor) -> core.TopKResult:
        return core.linear_topk_divergence(
            hidden, self.head.weight, ids, teacher, "jsd", labels=labels, jsd_alpha=0.3, chunk_rows=2
        )


def student() -> Student:
    torch.manual_seed(11)
    return Student().double()


def student_batch() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(inputs, ids, teacher log-probabilities, labels, mask) of the whole step; rank 1's share is fully masked in row 5."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(6, HIDDEN, dtype=torch.float64, generator=generator)
    teacher = torch.log_softmax(torch.randn(6, VOCABULARY, dtype=torch.float64, generator=generator), -1)
    top, ids = teacher.topk(SET)
    labels = torch.randint(0, VOCABULARY, (6,), generator=generator)
    return inputs, ids, top, labels, torch.tensor([1.0, 1, 1, 1, 1, 0])


def student_loss(model: nn.Module, rows: slice, world: int) -> Tensor:
    inputs, ids, teacher, labels, mask = student_batch()
    result = model(inputs[rows], ids[rows], teacher[rows], labels[rows])
    per_token = (result.divergence - 0.1 * result.sampled_logprobs).unsqueeze(0)
    return core.aggregate(
        per_token, mask[rows].unsqueeze(0), "token-mean", num_tokens=mask.sum(), data_parallel_size=world
    )


def sharded_student(rank: int) -> dict[str, Any]:
    model = student()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, reshard_after_forward=False)
    loss = student_loss(model, slice(0, 4) if rank == 0 else slice(4, 6), WORLD)
    loss.backward()
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def both(rank: int) -> dict[str, Any]:
    """One pair of processes for all distributed checks: to start them costs more than what they compute."""
    return {"vocabulary": split_vocabulary(rank), "student": sharded_student(rank)}
