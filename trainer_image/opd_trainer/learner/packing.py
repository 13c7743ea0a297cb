"""How the sequences of one update are cut into micro-batches. Pure.

A micro-batch is one forward and backward pass of one rank. FSDP's collectives need the same number of passes on every
rank, so a rank that runs out of sequences gets empty micro-batches (the rank makes a dummy pass for them).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

#: micro-batches of one rank, each a list of sequence indices; an empty list is a dummy pass.
RankPlan = list[list[int]]


class Layout(StrEnum):
    """How the sequences of a micro-batch lie in memory."""

    #: [B, longest], right-padded: needs no mask, because a causal model never looks right. Costs B x longest tokens.
    PADDED = "padded"
    #: [1, sum of lengths], position ids restart: attention must be block-diagonal (varlen kernels). Costs the sum.
    PACKED = "packed"


def pack(lengths: Sequence[int], max_tokens: int, layout: Layout) -> RankPlan:
    """First fit of the sequences, longest first, into micro-batches of at most `max_tokens`.

    A sequence that is longer than `max_tokens` gets a micro-batch of its own.
    """
    bins: RankPlan = []
    loads: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for number, members in enumerate(bins):
            # Longest first: the first member decides the width of a padded micro-batch.
            grown = (
                loads[number] + lengths[index] if layout is Layout.PACKED else (len(members) + 1) * lengths[members[0]]
            )
            if grown <= max_tokens:
                members.append(index)
                loads[number] = grown
                break
        else:
            bins.append([index])
            loads.append(lengths[index])
    return bins


def plan_ranks(lengths: Sequence[int], ranks: int, max_tokens: int, layout: Layout) -> list[RankPlan]:
    """Distribute sequences over ranks, pack each rank, and give all ranks the same number of micro-batches.

    Sequences go, longest first, to the rank with the fewest tokens so far. Every sequence is in exactly one micro-batch.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    plans = []
    for share in shares:
        packed = pack([lengths[index] for index in share], max_tokens, layout)
        plans.append([[share[i] for i in members] for members in packed])
    passes = max((len(plan) for plan in plans), default=0)
    return [plan + [[] for _ in range(passes - len(plan))] for plan in plans]


def split_updates(count: int, updates: int) -> list[range]:
    """Cut `count` samples into at most `updates` contiguous parts of nearly equal size; none is empty."""
    parts = min(updates, count)
    return [range(count * part // parts, count * (part + 1) // parts) for part in range(parts)]
