"""The benchmark's contestants: ours, and the peers from their published packages.

Each is prepared by a function that imports what it needs and returns `forward() → scalar loss`; the measured part is that
call and `loss.backward()`. Inputs (logits, hidden states, weights, teacher data) exist before. An objective names what is
computed: contestants with the same objective must give the same loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

Forward = Callable[[], Tensor]


@dataclass(frozen=True)
class Problem:
    """2×1024 tokens, vocabulary 32768, K = 64, H = 1024 in the full size; everything float32."""

    batch: int = 2
    length: int = 1024
    vocabulary: int = 32768
    size: int = 64
    hidden: int = 1024

    @property
    def rows(self) -> int:
        return self.batch * self.length

    def logits(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.rows, self.vocabulary, generator=generator).mul_(2)

    def head(self, seed: int) -> tuple[Tensor, Tensor]:
        """(hidden states [N, H], lm_head [V, H]) whose logits have a spread of about 2."""
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(self.rows, self.hidden, generator=generator)
        weight = torch.randn(self.vocabulary, self.hidden, generator=generator)
        return hidden, weight.mul_(2 * self.hidden**-0.5)

    def teacher_topk(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(ids, log-probabilities) [N, K]; row by row, so that preparing leaves no large buffer."""
        parts = [torch.log_softmax(rows, -1).topk(self.size) for rows in logits.split(64)]
        return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])

    def labels(self) -> Tensor:
        return torch.randint(0, self.vocabulary, (self.rows,), generator=torch.Generator().manual_seed(9))


@dataclass(frozen=True)
class Contestant:
    case: str
    objective: str
    prepare: Callable[[Problem], Forward]


def _topk_inputs(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    ids, teacher = problem.teacher_topk(problem.logits(1))
    return problem.logits(0).requires_grad_(), ids, teacher


def _head_inputs(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight = problem.head(1)
    parts = [problem.teacher_topk(rows @ weight.T) for rows in hidden.split(64)]
    student_hidden, student_weight = problem.head(0)
    ids, teacher = (torch.cat(column) for column in zip(*parts, strict=True))
    return student_hidden.requires_grad_(), student_weight.requires_grad_(), ids, teacher


# --- ours -----------------------------------------------------------------------------------------------------------
def _ours_topk(problem: Problem) -> Forward:
    from opd_trainer import core

    logits, ids, teacher = _topk_inputs(problem)
    return lambda: core.topk_divergence(logits, ids, teacher, "forward_kl").divergence.sum()


def _ours_gather(problem: Problem) -> Forward:
    from opd_trainer import core

    logits, ids, _ = _topk_inputs(problem)
    return lambda: core.gather_logprobs(logits, ids).sum()


def _ours_fused(problem: Problem) -> Forward:
    from opd_trainer import core

    hidden, weight, ids, teacher = _head_inputs(problem)
    labels = problem.labels()
    return lambda: core.linear_topk_divergence(
        hidden, weight, ids, teacher, "forward_kl", labels=labels
    ).divergence.sum()


# --- peers ----------------------------------------------------------------------------------------------------------
def _trl_full(problem: Problem) -> Forward:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    shape = (problem.batch, problem.length, problem.vocabulary)
    student, teacher = problem.logits(0).view(shape).requires_grad_(), problem.logits(1).view(shape)
    labels = problem.labels().view(shape[:2])
    return lambda: GKDTrainer.generalized_jsd_loss(student, teacher, labels=labels, beta=0.0, reduction="sum")


def _swift_topk(problem: Problem) -> Forward:
    from swift.rlhf_trainers.gkd_loss import TeacherOutput, gkd_loss

    logits, ids, teacher = _topk_inputs(problem)
    shape = (problem.batch, problem.length)
    shaped = logits.detach().view(*shape, -1).requires_grad_()
    labels = problem.labels().view(shape)
    output = TeacherOutput(topk_logprobs=teacher.view(*shape, -1), topk_indices=ids.view(*shape, -1), labels=labels)
    return lambda: gkd_loss(shaped, output, labels, beta=0.0, temperature=1.0)[0]


def _verl_topk(chunk: int | None) -> Callable[[Problem], Forward]:
    def prepare(problem: Problem) -> Forward:
        from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk

        logits, ids, teacher = _topk_inputs(problem)
        offsets = torch.tensor([0, problem.rows])
        jagged = [torch.nested.nested_tensor_from_jagged(tensor, offsets) for tensor in (teacher, ids)]
        loss_config = SimpleNamespace(
            use_chunked_topk=chunk is not None, chunked_topk_chunk_size=chunk or 0, log_prob_min_clamp=None
        )
        config = SimpleNamespace(distillation_loss=loss_config)
        return lambda: compute_forward_kl_topk(logits.unsqueeze(0), *jagged, config, "thd")["distillation_losses"].sum()

    return prepare


def _verl_gather(chunk: int) -> Callable[[Problem], Forward]:
    def prepare(problem: Problem) -> Forward:
        from verl.trainer.distillation.fsdp.losses import _chunked_topk_log_probs

        logits, ids, _ = _topk_inputs(problem)
        return lambda: _chunked_topk_log_probs(logits.unsqueeze(0), ids.unsqueeze(0), chunk).sum()

    return prepare


def _trl_gather(problem: Problem) -> Forward:
    from trl.trainer.utils import selective_log_softmax

    logits, ids, _ = _topk_inputs(problem)
    return lambda: selective_log_softmax(logits, ids).sum()


def _torch_gather(problem: Problem) -> Forward:
    logits, ids, _ = _topk_inputs(problem)
    return lambda: torch.log_softmax(logits, -1).gather(1, ids).sum()


def _liger(chunk: int) -> Callable[[Problem], Forward]:
    def prepare(problem: Problem) -> Forward:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        (hidden, weight), (teacher_hidden, teacher_weight) = problem.head(0), problem.head(1)
        hidden.requires_grad_()
        weight.requires_grad_()
        labels, rows = problem.labels(), problem.rows
        # compiled=False: a compiler in the measured process would be what is measured.
        loss = LigerFusedLinearJSDLoss(
            weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=False, chunk_size=chunk
        )
        return lambda: loss(hidden, weight, teacher_hidden, teacher_weight, labels) * rows

    return prepare


def _linear_verl(problem: Problem) -> Forward:
    from verl.trainer.distillation.fsdp.losses import _chunked_topk_log_probs, kl_divergence

    hidden, weight, ids, teacher = _head_inputs(problem)

    def forward() -> Tensor:
        gathered = _chunked_topk_log_probs((hidden @ weight.T).unsqueeze(0), ids.unsqueeze(0), 256)[0]
        return kl_divergence(log_q=gathered, log_p=teacher).sum()

    return forward


CONTESTANTS: dict[str, Contestant] = {
    "topk/ours": Contestant("topk", "forward KL, tail", _ours_topk),
    "topk/ms-swift": Contestant("topk", "forward KL, norm", _swift_topk),
    "topk/verl": Contestant("topk", "forward KL, trunc", _verl_topk(None)),
    "topk/verl chunk 256": Contestant("topk", "forward KL, trunc", _verl_topk(256)),
    "topk/TRL GKD": Contestant("topk", "forward KL, full", _trl_full),
    "fused/ours": Contestant("fused", "forward KL, tail", _ours_fused),
    "fused/Liger": Contestant("fused", "forward KL, full", _liger(1024)),
    "fused/Liger chunk 256": Contestant("fused", "forward KL, full", _liger(256)),
    "fused/linear + verl chunk 256": Contestant("fused", "forward KL, trunc", _linear_verl),
    "gather/ours": Contestant("gather", "log-probabilities", _ours_gather),
    "gather/verl": Contestant("gather", "log-probabilities", _verl_gather(4096)),
    "gather/verl chunk 256": Contestant("gather", "log-probabilities", _verl_gather(256)),
    "gather/TRL": Contestant("gather", "log-probabilities", _trl_gather),
    "gather/torch": Contestant("gather", "log-probabilities", _torch_gather),
}
