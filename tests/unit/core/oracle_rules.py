"""The vocabulary in which an oracle output is mapped: a call of ours, or a reason why there is none."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from oracle_io import Case, Output
from torch import Tensor


@dataclass(frozen=True)
class Answer:
    """What our call gives, and where it may be compared: everywhere, or where `where` (broadcastable) is true."""

    value: Tensor
    where: Tensor | None = None


Call = Callable[[Case, Output, "re.Match[str]"], "Tensor | Answer"]


@dataclass(frozen=True)
class Mapped:
    """Outputs whose full name matches `pattern` are reproduced by `call`."""

    pattern: str
    call: Call


@dataclass(frozen=True)
class Excluded:
    """Outputs that are not reproduced, and why: a peer's bug, or an option that we do not offer."""

    pattern: str
    reason: str


Rule = Mapped | Excluded


def matching(rules: list[Rule], name: str) -> list[tuple[Rule, re.Match[str]]]:
    """The rules whose pattern is the whole name; exactly one must exist for every output."""
    found = ((rule, re.fullmatch(rule.pattern, name)) for rule in rules)
    return [(rule, match) for rule, match in found if match]


def differentiated(leaf_name: str, compute: Callable[[Case, Output], Tensor], weight: str | None = None) -> Call:
    """Maps `X` to the value and `X_grad` to the gradient of its (masked) sum with respect to the named input.

    Args:
        weight: input that multiplies the value before the sum, such as the response mask.
    """

    def call(case: Case, output: Output, match: re.Match[str]) -> Tensor:
        if not output.name.endswith("_grad"):
            return compute(case, output)
        leaf = case.leaf(leaf_name)
        value = compute(case.with_inputs(**{leaf_name: leaf}), output)
        total = (value if weight is None else torch.where(case[weight] > 0, value, 0.0)).sum()
        return torch.autograd.grad(total, leaf)[0]

    return call


def skipping(rows: Callable[[Case, Output], Tensor], call: Call) -> Call:
    """Compare only where `rows` is true; a gradient gets the rows' shape with one more dimension."""

    def wrapped(case: Case, output: Output, match: re.Match[str]) -> Answer:
        value = call(case, output, match)
        assert isinstance(value, Tensor)
        where = rows(case, output)
        return Answer(value, where.reshape(*where.shape, *[1] * (value.dim() - where.dim())))

    return wrapped
