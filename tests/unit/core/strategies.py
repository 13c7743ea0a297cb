"""Hypothesis strategies: small problems in float64, drawn by shape and seed so that examples shrink."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

KINDS = ("forward_kl", "reverse_kl", "jsd", "mixed", "low_var_kl")
KL_KINDS = KINDS[:4]
TAILS = ("tail", "norm", "trunc")

quick = settings(max_examples=20, deadline=None)


class Problem(NamedTuple):
    """Student and teacher logits [N, V], and a set of K ids per row."""

    student: Tensor
    teacher: Tensor
    ids: Tensor

    @property
    def student_logprobs(self) -> Tensor:
        return torch.log_softmax(self.student, -1).gather(1, self.ids)

    @property
    def teacher_logprobs(self) -> Tensor:
        return torch.log_softmax(self.teacher, -1).gather(1, self.ids)


@st.composite
def problems(draw: st.DrawFn, max_rows: int = 6, max_vocabulary: int = 16) -> Problem:
    rows = draw(st.integers(1, max_rows))
    vocabulary = draw(st.integers(2, max_vocabulary))
    size = draw(st.integers(1, vocabulary))
    spread = draw(st.sampled_from([0.1, 1.0, 4.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    student, teacher = (
        spread * torch.randn(rows, vocabulary, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    ids = torch.stack([torch.randperm(vocabulary, generator=generator)[:size] for _ in range(rows)])
    return Problem(student, teacher, ids)


@st.composite
def masks(draw: st.DrawFn, rows: int, columns: int) -> Tensor:
    """A [rows, columns] 0/1 mask with holes; rows may be empty."""
    bits = draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(bits, dtype=torch.float64).reshape(rows, columns)
