"""The books of the samples and the staleness gate, under random schedules."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd_trainer.errors import TrainerError
from opd_trainer.rollout.buffer import Group, GroupBuffer
from opd_trainer.rollout.data import Prompt
from opd_trainer.rollout.staleness import StalenessGate
from opd_trainer.sample import SampleState


def prompt(ticket: int) -> Prompt:
    return Prompt(ticket, np.array([1, 2], dtype=np.int32), "p", "math", None, {})


@dataclass
class Simulation:
    """A run as the pumps drive it, with every random choice from one generator."""

    rng: random.Random
    batch: int
    group_size: int
    max_staleness: int
    concurrency: int
    version: int = 0
    ticket: int = 0
    ages: list[int] = field(default_factory=list)
    consumed_tickets: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        gate = StalenessGate(batch=self.batch, max_staleness=self.max_staleness)
        self.buffer = GroupBuffer(batch=self.batch, group_size=self.group_size, gate=gate)

    def open_groups(self) -> None:
        free = max(1, self.concurrency - self.buffer.running)
        capacity = self.buffer.gate.capacity(version=self.version, running=self.buffer.running, free_slots=free)
        for _ in range(capacity):
            self.buffer.reserve(prompt(self.ticket), self.version)
            self.ticket += 1

    def end_one(self, failures: float) -> None:
        running = [group for group in self.buffer.open_groups() if group.group_id in self.buffer._running]
        if not running:
            return
        group = self.rng.choice(running)
        if self.rng.random() < failures:
            self._fail(group)
            return
        for sample in group.samples:
            sample.state = SampleState.READY
        self.buffer.commit(group)

    def _fail(self, group: Group) -> None:
        if self.rng.random() < 0.5:
            self.buffer.fail_sample(group.samples[0], "bad")
        self.buffer.drop(group)

    def train(self) -> None:
        groups = self.buffer.select(self.version)
        if groups is None:
            return
        self.ages += [self.version - group.oldest_version for group in groups]
        self.consumed_tickets += [group.prompt.ticket for group in groups]
        self.buffer.consume(groups)
        self.version += 1


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 5),
    group_size=st.integers(1, 3),
    max_staleness=st.integers(0, 3),
    concurrency=st.integers(1, 12),
    failures=st.sampled_from([0.0, 0.2, 0.6]),
)
def test_no_schedule_loses_a_sample_or_trains_on_one_that_is_too_old(
    seed: int, batch: int, group_size: int, max_staleness: int, concurrency: int, failures: float
) -> None:
    run = Simulation(random.Random(seed), batch, group_size, max_staleness, concurrency)
    moves = 0
    while run.version < 6:
        moves += 1
        assert moves < 5000, f"no progress at version {run.version}: {run.buffer.states()}"
        run.open_groups()
        for _ in range(run.rng.randint(1, 3)):
            run.end_one(failures)
        if run.rng.random() < 0.7:
            run.train()
        run.buffer.check()
        assert run.buffer.running + run.buffer.ready <= run.buffer.gate.capacity_of_buffer
    assert max(run.ages) <= max_staleness
    assert len(run.consumed_tickets) == len(set(run.consumed_tickets)) == 6 * batch
    assert run.buffer.exits[SampleState.CONSUMED] == 6 * batch * group_size
    assert run.buffer.exits[SampleState.STALE] == 0


def test_synchronous_gate_opens_exactly_one_batch_per_version() -> None:
    gate = StalenessGate(batch=4, max_staleness=0)
    assert gate.capacity(version=0, running=0, free_slots=100) == 4
    assert gate.capacity(version=0, running=4, free_slots=100) == 0
    for _ in range(4):
        gate.accept()
    assert gate.capacity(version=0, running=0, free_slots=100) == 0
    assert gate.capacity(version=1, running=0, free_slots=100) == 4


def test_gate_is_bounded_by_free_slots() -> None:
    gate = StalenessGate(batch=4, max_staleness=2)
    assert gate.capacity(version=0, running=0, free_slots=5) == 5
    assert gate.capacity(version=0, running=0, free_slots=50) == 12


def test_reseeding_after_a_resume_prevents_a_burst() -> None:
    gate = StalenessGate(batch=4, max_staleness=1)
    gate.reseed(40)
    assert gate.capacity(version=40, running=0, free_slots=1000) == 8


def buffer_with(batch: int = 2, max_staleness: int = 1) -> GroupBuffer:
    return GroupBuffer(batch=batch, group_size=1, gate=StalenessGate(batch=batch, max_staleness=max_staleness))


def ready(buffer: GroupBuffer, group: Group) -> None:
    for sample in group.samples:
        sample.state = SampleState.READY
    buffer.commit(group)


def test_a_slow_group_is_waited_for_only_when_it_would_become_too_old() -> None:
    buffer = buffer_with()
    slow, *others = [buffer.reserve(prompt(ticket), 0) for ticket in range(4)]
    for group in others:
        ready(buffer, group)
    first = buffer.select(0)
    assert first is not None, "at version 0 the slow group may still be skipped"
    assert slow not in first
    buffer.consume(first)
    ready(buffer, buffer.reserve(prompt(4), 1))
    assert buffer.select(1) is None, "at version 1 the slow group of version 0 must be in the batch"
    ready(buffer, slow)
    second = buffer.select(1)
    assert second is not None
    assert slow in second


def test_a_group_leaves_only_once() -> None:
    buffer = buffer_with()
    group = buffer.reserve(prompt(0), 0)
    buffer.drop(group)
    with pytest.raises(TrainerError, match="left twice"):
        buffer.drop(group)


def test_an_incomplete_group_cannot_be_committed() -> None:
    buffer = buffer_with()
    group = buffer.reserve(prompt(0), 0)
    with pytest.raises(TrainerError, match="with 1 of 1 samples ready"):
        buffer.commit(group)


def test_more_groups_than_the_gate_allows_are_refused() -> None:
    buffer = buffer_with(batch=1, max_staleness=0)
    buffer.reserve(prompt(0), 0)
    with pytest.raises(TrainerError, match="gate let too many"):
        buffer.reserve(prompt(1), 0)


def test_a_sample_that_vanishes_is_noticed() -> None:
    buffer = buffer_with()
    group = buffer.reserve(prompt(0), 0)
    group.samples.clear()
    with pytest.raises(TrainerError, match="1 samples were issued"):
        buffer.check()


def test_outstanding_tickets_are_those_not_consumed() -> None:
    buffer = buffer_with(batch=1)
    first, second = buffer.reserve(prompt(7), 0), buffer.reserve(prompt(3), 0)
    ready(buffer, first)
    assert buffer.outstanding_tickets() == [7, 3]
    groups = buffer.select(0)
    assert groups is not None
    buffer.consume(groups)
    assert buffer.outstanding_tickets() == [3]
    assert second.samples[0].state is SampleState.PENDING


def test_books_continue_after_a_checkpoint() -> None:
    buffer = buffer_with(batch=1)
    group = buffer.reserve(prompt(0), 0)
    ready(buffer, group)
    buffer.consume([group])
    buffer.reserve(prompt(1), 0)
    restored = buffer_with(batch=1)
    restored.load_state_dict(buffer.state_dict())
    restored.check()
    assert restored.issued == 1, "the sample in flight is issued again, so it does not count"
    assert restored.reserve(prompt(1), 1).samples[0].sample_id == 2
    restored.check()
