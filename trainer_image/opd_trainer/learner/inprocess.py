"""Teachers inside the learner: frozen, sharded like the student, asked on the student's own micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opd_api.v1alpha1 import Distillation, TokenSelection
from opd_trainer import core
from opd_trainer.learner.batch import MicroBatch, TokenSets
from opd_trainer.learner.head import rows_per_chunk
from opd_trainer.learner.models import FrozenTeacher

_STUDENT_SETS = frozenset({TokenSelection.STUDENT_TOPK, TokenSelection.UNION, TokenSelection.INTERSECTION})
_TEACHER_SETS = frozenset({TokenSelection.TEACHER_TOPK, TokenSelection.UNION, TokenSelection.INTERSECTION})


@dataclass(slots=True)
class TeacherRows:
    """One teacher's forward pass on a micro-batch."""

    teacher: FrozenTeacher
    states: Tensor
    weight: float
    #: [N] bool: rows of samples that this teacher scores.
    mine: Tensor


class TeacherPass:
    """What the teachers of a micro-batch say, by slices of rows. Lives as long as the teachers' roots are unsharded."""

    def __init__(self, rows: Sequence[TeacherRows]) -> None:
        self._rows = rows
        self.vocabulary = max(row.teacher.vocabulary for row in rows)

    @property
    def mine(self) -> Tensor:
        """[N] bool: rows that some in-process teacher scores."""
        return torch.stack([row.mine for row in self._rows]).any(dim=0)

    def logits(self, part: slice) -> Tensor:
        """[n, V] logits of each row's teacher; log-probabilities of the mixture where several teachers score a row."""
        if len(self._rows) == 1:
            return self._rows[0].teacher.logits(self._rows[0].states, part)
        stacked, shares = [], []
        for row in self._rows:
            logprobs = torch.log_softmax(core_float(row.teacher.logits(row.states, part)), dim=-1)
            stacked.append(_widen(logprobs, self.vocabulary))
            shares.append(row.mine[part].to(logprobs.dtype) * row.weight)
        share = torch.stack(shares)
        log_share = torch.log(share / share.sum(0).clamp_min(1e-30)).unsqueeze(-1)
        return torch.logsumexp(torch.stack(stacked) + log_share, dim=0)


def scored_rows(batch: MicroBatch, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """(teacher, [N] bool: rows of samples that it scores)."""
    sequence = batch.computed.nonzero()[:, 0]
    for name in names:
        scored = [name in teacher.split("+") for teacher in batch.teacher_of] or [True]
        yield name, torch.tensor(scored, device=sequence.device)[sequence]


def beyond_vocabulary(batch: MicroBatch, vocabularies: Mapping[str, int]) -> Tensor:
    """[N] bool: rows that some of these teachers score, none of whose vocabularies has the label."""
    scored = torch.zeros_like(batch.labels, dtype=torch.bool)
    known = torch.zeros_like(scored)
    for name, mine in scored_rows(batch, vocabularies):
        scored |= mine
        known |= mine & (batch.labels < vocabularies[name])
    return scored & ~known


def core_float(tensor: Tensor) -> Tensor:
    """float64 stays, everything else becomes float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@torch.no_grad()
def fill(batch: MicroBatch, teachers: TeacherPass, options: Distillation) -> None:
    """Write the teacher's log-probabilities of the sampled tokens and of the token sets into the batch."""
    mine = teachers.mine
    if not bool(mine.any()):
        return
    selection = options.token_selection
    student = batch.student_top.ids if selection in _STUDENT_SETS and batch.student_top is not None else None
    if selection in _STUDENT_SETS and student is None:
        raise ValueError(f"{selection} needs the student's top tokens, but the rollout has none")
    top_k = min(options.top_k or 0, teachers.vocabulary) if selection in _TEACHER_SETS else 0
    sampled, at_student, top_ids, top_logprobs = [], [], [], []
    step = rows_per_chunk(teachers.vocabulary, batch.labels.device)
    for begin in range(0, batch.labels.shape[0], step):
        part = slice(begin, min(begin + step, batch.labels.shape[0]))
        logprobs = torch.log_softmax(core_float(teachers.logits(part)), dim=-1)
        sampled.append(_at(logprobs, batch.labels[part].unsqueeze(1))[:, 0])
        if student is not None:
            at_student.append(_at(logprobs, student[part]))
        if top_k:
            best = logprobs.topk(top_k, dim=-1)
            top_ids.append(best.indices)
            top_logprobs.append(best.values)
    _merge_sampled(batch, torch.cat(sampled), mine)
    first = torch.cat(at_student) if at_student else None
    second = (torch.cat(top_ids), torch.cat(top_logprobs)) if top_k else None
    sets = _select(batch, selection, first, second)
    if sets is not None:
        _merge_sets(batch, sets, mine)


def _select(
    batch: MicroBatch, selection: TokenSelection, at_student: Tensor | None, top: tuple[Tensor, Tensor] | None
) -> TokenSets | None:
    """The set in the layout of `core.select_tokens`."""
    if selection is TokenSelection.TEACHER_TOPK and top is not None:
        return TokenSets(top[0], top[1], torch.ones_like(top[0], dtype=torch.bool))
    if at_student is None or batch.student_top is None:
        return None
    own = batch.student_top
    if top is None:
        return TokenSets(own.ids, at_student, own.valid & torch.isfinite(at_student))
    ids, valid = core.select_tokens(own.ids, top[0], selection.value)
    logprobs = torch.cat([at_student, top[1]], dim=-1)
    present = torch.cat([own.valid, torch.ones_like(top[0], dtype=torch.bool)], dim=-1)
    return TokenSets(ids, logprobs, valid & present & torch.isfinite(logprobs))


def _merge_sampled(batch: MicroBatch, sampled: Tensor, mine: Tensor) -> None:
    before = batch.teacher
    flat = sampled if before is None else torch.where(mine, sampled.to(before.dtype), batch.flatten(before))
    batch.teacher = batch.to_grid(flat)


def _merge_sets(batch: MicroBatch, sets: TokenSets, mine: Tensor) -> None:
    """Rows of other teachers keep the sets that came with their samples."""
    before = batch.selected
    if before is None or bool(mine.all()):
        batch.selected = sets
        return
    size = max(sets.ids.shape[1], before.ids.shape[1])
    new, old = _resize(sets, size), _resize(before, size)
    rows = mine.unsqueeze(1)
    batch.selected = TokenSets(
        torch.where(rows, new.ids, old.ids),
        torch.where(rows, new.logprobs.to(old.logprobs.dtype), old.logprobs),
        torch.where(rows, new.valid, old.valid),
    )


def _resize(sets: TokenSets, size: int) -> TokenSets:
    missing = size - sets.ids.shape[1]
    pad = torch.nn.functional.pad
    return TokenSets(
        pad(sets.ids, (0, missing)), pad(sets.logprobs, (0, missing), value=-torch.inf), pad(sets.valid, (0, missing))
    )


def _at(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities at ids [n, K]; −inf where the teacher's vocabulary lacks the id."""
    known = ids < logprobs.shape[1]
    values = logprobs.gather(1, torch.where(known, ids, torch.zeros_like(ids)))
    return torch.where(known, values, torch.full_like(values, -torch.inf))


def _widen(logprobs: Tensor, vocabulary: int) -> Tensor:
    return torch.nn.functional.pad(logprobs, (0, vocabulary - logprobs.shape[1]), value=-torch.inf)
