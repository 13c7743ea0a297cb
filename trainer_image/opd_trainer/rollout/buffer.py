"""Groups of samples between rollout and training.

reserve -> commit | drop, then select; single samples fail and may be replaced. Every issued sample leaves exactly once (consumed, failed, filtered, stale);
`check` recounts and raises when the books do not add up. Nothing here waits or does I/O; the controller's pumps do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError
from opd_trainer.rollout.data import Prompt
from opd_trainer.rollout.staleness import StalenessGate
from opd_trainer.sample import EXITS, Sample, SampleState


@dataclass(slots=True, eq=False)
class Group:
    """All samples of one prompt."""

    group_id: int
    prompt: Prompt
    start_version: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def oldest_version(self) -> int:
        """Oldest weights that wrote a token of a live sample of the group."""
        versions = [sample.start_version for sample in self.samples if sample.state not in EXITS]
        return min(versions, default=self.start_version)

    @property
    def complete(self) -> list[Sample]:
        """Samples that are ready for training."""
        return [sample for sample in self.samples if sample.state is SampleState.READY]


def _fault(message: str) -> TrainerError:
    return TrainerError(FailureClass.INTERNAL, Reason.INTERNAL_ERROR, f"sample accounting: {message}")


class GroupBuffer:
    """The books of all samples. One instance a run, touched by one thread."""

    def __init__(self, *, batch: int, group_size: int, gate: StalenessGate) -> None:
        self.batch = batch
        self.group_size = group_size
        self.gate = gate
        self.issued = 0
        self.exits: Counter[SampleState] = Counter()
        self._running: dict[int, Group] = {}
        self._ready: dict[int, Group] = {}
        self._next_group = 0
        self._next_sample = 0

    # -- the life of a group ---------------------------------------------------------------------------------------

    def reserve(self, prompt: Prompt, version: int) -> Group:
        """Open a group; it holds a place until commit or drop."""
        if len(self._running) + len(self._ready) >= self.gate.capacity_of_buffer:
            raise _fault(f"more than {self.gate.capacity_of_buffer} groups are open; the gate let too many through")
        group = Group(group_id=self._next_group, prompt=prompt, start_version=version)
        self._next_group += 1
        self._running[group.group_id] = group
        for _ in range(self.group_size):
            self.issue(group, version)
        return group

    def issue(self, group: Group, version: int) -> Sample:
        """One more sample of an open group: the first ones, and replacements of failed ones."""
        if group.group_id not in self._running:
            raise _fault(f"group {group.group_id} is not open")
        prompt = group.prompt
        sample = Sample(
            sample_id=self._next_sample,
            group_id=group.group_id,
            data_source=prompt.data_source,
            prompt_ids=prompt.ids,
            prompt_text=prompt.text,
            answer=prompt.answer,
            record=prompt.record,
            start_version=version,
        )
        self._next_sample += 1
        self.issued += 1
        group.samples.append(sample)
        return sample

    def fail_sample(self, sample: Sample, error: str) -> None:
        """A sample cannot be used; its group may replace it."""
        sample.error = error
        self._leave(sample, SampleState.FAILED)

    def commit(self, group: Group) -> None:
        """The group is complete: it waits for a training step."""
        live = [sample for sample in group.samples if sample.state not in EXITS]
        if len(live) != self.group_size or any(sample.state is not SampleState.READY for sample in live):
            raise _fault(f"group {group.group_id} was committed with {len(live)} of {self.group_size} samples ready")
        self._ready[group.group_id] = self._close(group)
        self.gate.accept()

    def drop(self, group: Group) -> None:
        """The filter refused the group, or too many of its samples failed: what is left of it leaves as FILTERED."""
        for sample in self._close(group).samples:
            if sample.state not in EXITS:
                self._leave(sample, SampleState.FILTERED)

    def _close(self, group: Group) -> Group:
        if self._running.pop(group.group_id, None) is None:
            raise _fault(f"group {group.group_id} left twice")
        return group

    def _leave(self, sample: Sample, exit_state: SampleState) -> None:
        if sample.state in EXITS:
            raise _fault(f"sample {sample.sample_id} left twice ({sample.state}, then {exit_state})")
        sample.state = exit_state
        self.exits[exit_state] += 1

    # -- selection -------------------------------------------------------------------------------------------------

    def select(self, version: int) -> list[Group] | None:
        """One batch of groups for the step on weights `version`; None while it is not complete.

        Groups are taken in the order of completion, except where that would leave more old ones than the coming steps can
        take: of those that must be consumed at version d or before, at most (d - version) batches may remain. So a slow
        group holds nobody up before its time, and nothing ever becomes too old.
        """
        if len(self._ready) < self.batch:
            return None
        max_staleness = self.gate.max_staleness
        open_by_deadline = Counter(group.oldest_version + max_staleness for group in self.open_groups())
        waiting = dict(self._ready)
        chosen: list[Group] = []
        must_go = 0
        for deadline in sorted(open_by_deadline):
            must_go += open_by_deadline[deadline]
            need = must_go - max(0, deadline - version) * self.batch - len(chosen)
            if need <= 0:
                continue
            old = [group for group in waiting.values() if group.oldest_version + max_staleness <= deadline]
            if len(old) < need:
                return None
            chosen += [waiting.pop(group.group_id) for group in old[:need]]
        if len(chosen) > self.batch:
            raise _fault(f"{len(chosen)} groups are due at version {version} but a batch has {self.batch}")
        chosen += list(waiting.values())[: self.batch - len(chosen)]
        for group in chosen:
            age = version - group.oldest_version
            if age > max_staleness:
                raise _fault(f"group {group.group_id} is {age} versions old; maxStaleness is {max_staleness}")
        return chosen

    def consume(self, groups: Iterable[Group]) -> None:
        """The step on these groups is done."""
        for group in groups:
            if self._ready.pop(group.group_id, None) is None:
                raise _fault(f"group {group.group_id} was consumed twice")
            for sample in group.samples:
                if sample.state not in EXITS:
                    self._leave(sample, SampleState.CONSUMED)

    # -- books -----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Groups between reserve and commit or drop."""
        return len(self._running)

    @property
    def ready(self) -> int:
        """Complete groups that wait for a step."""
        return len(self._ready)

    def open_groups(self) -> list[Group]:
        """Running and ready groups, oldest first."""
        return sorted([*self._running.values(), *self._ready.values()], key=lambda group: group.group_id)

    def outstanding_tickets(self) -> list[int]:
        """Stream positions of all prompts that were issued and not consumed, for the re-issue list of a checkpoint."""
        return [group.prompt.ticket for group in self.open_groups()]

    def states(self) -> Counter[SampleState]:
        """Samples by state: the live ones are recounted, the others remembered."""
        live = Counter(
            sample.state for group in self.open_groups() for sample in group.samples if sample.state not in EXITS
        )
        return live + self.exits

    def check(self) -> None:
        """issued = sum over states. Raises TrainerError(Internal)."""
        total = sum(self.states().values())
        if total != self.issued:
            raise _fault(f"{self.issued} samples were issued but the states add up to {total}: {dict(self.states())}")
        if sum(self.exits[state] for state in self.exits if state not in EXITS):
            raise _fault(f"exits in a live state: {dict(self.exits)}")

    def state_dict(self) -> dict[str, object]:
        """Counters for a checkpoint. Samples in flight are not in it: their prompts are issued again."""
        return {
            "next_group": self._next_group,
            "next_sample": self._next_sample,
            "exits": {state.value: count for state, count in self.exits.items()},
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue the books of a checkpoint."""
        self._next_group = int(str(state["next_group"]))
        self._next_sample = int(str(state["next_sample"]))
        exits = state["exits"]
        assert isinstance(exits, dict)
        self.exits = Counter({SampleState(name): int(count) for name, count in exits.items()})
        self.issued = sum(self.exits.values())
