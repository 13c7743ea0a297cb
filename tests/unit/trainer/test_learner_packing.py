"""Packing: every sequence once, within the budget, the same number of passes on every rank."""

from hypothesis import given
from hypothesis import strategies as st

from opd_trainer.learner.packing import Layout, pack, plan_ranks, split_updates

lengths = st.lists(st.integers(1, 60), max_size=40)
layouts = st.sampled_from(list(Layout))


def tokens(sizes: list[int], layout: Layout) -> int:
    """Tokens that a micro-batch of these sequences occupies."""
    return sum(sizes) if layout is Layout.PACKED else len(sizes) * max(sizes, default=0)


@given(lengths, st.integers(1, 5), st.integers(1, 100), layouts)
def test_a_plan_holds_every_sequence_once_within_the_budget(
    sizes: list[int], ranks: int, budget: int, layout: Layout
) -> None:
    plans = plan_ranks(sizes, ranks, budget, layout)
    assert len({len(plan) for plan in plans}) == 1
    members = [index for plan in plans for batch in plan for index in batch]
    assert sorted(members) == list(range(len(sizes)))
    for plan in plans:
        for batch in plan:
            assert len(batch) == 1 or tokens([sizes[i] for i in batch], layout) <= budget


@given(lengths, st.integers(2, 4))
def test_ranks_carry_nearly_the_same_number_of_tokens(sizes: list[int], ranks: int) -> None:
    plans = plan_ranks(sizes, ranks, 10_000, Layout.PACKED)
    loads = [sum(sizes[i] for batch in plan for i in batch) for plan in plans]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@given(lengths, st.integers(1, 100))
def test_no_two_packed_micro_batches_could_be_one(sizes: list[int], budget: int) -> None:
    loads = sorted(sum(sizes[i] for i in batch) for batch in pack(sizes, budget, Layout.PACKED))
    assert len(loads) < 2 or loads[0] + loads[1] > budget


def test_a_sequence_over_the_budget_is_alone() -> None:
    assert pack([5, 100, 4], 10, Layout.PACKED) == [[1], [0, 2]]
    assert pack([5, 100, 4], 10, Layout.PADDED) == [[1], [0, 2]]


@given(st.integers(1, 100), st.integers(1, 20))
def test_updates_are_contiguous_and_none_is_empty(count: int, updates: int) -> None:
    parts = split_updates(count, updates)
    assert [index for part in parts for index in part] == list(range(count))
    sizes = [len(part) for part in parts]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == min(updates, count)
