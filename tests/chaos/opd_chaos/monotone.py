"""What the status says may only go forward. Pure; see invariants."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from opd_chaos.record import PATIENCE_SECONDS, TERMINAL, Chapter, Entry, Manifest, Violation, conditions, status

#: Within a live attempt. What is not named here has no place in one.
LIVE_ORDER = {"StartingStudent": 0, "Training": 1, "Finishing": 2}
#: Before the first student and between two. Teachers may be lost and come back, so the two next to each other are free.
EARLY_ORDER = {"": 0, "Pending": 0, "Checking": 1, "StartingTeachers": 2, "ProbingTeachers": 2, "StartingStudent": 3}
COUNTERS = ("attempt", "retries", "teacherRestarts", "observedGeneration")


def monotone(chapter: Chapter) -> Iterator[Violation]:
    """Attempt, step, counters, phases within an attempt, records of attempts, times: none goes back."""
    for before, after in pairwise(chapter.jobs):
        old, new = status(before), status(after)
        for name in COUNTERS:
            if (new.get(name) or 0) < (old.get(name) or 0):
                yield chapter.violation("monotone", f"{name} went from {old.get(name)} to {new.get(name)}", after)
        for name in ("startTime", "completionTime"):
            if old.get(name) and new.get(name) != old[name]:
                yield chapter.violation("monotone", f"{name} went from {old[name]} to {new.get(name)}", after)
        if old.get("phase") in TERMINAL and new.get("phase") != old["phase"]:
            yield chapter.violation("monotone", f"phase {old['phase']} was an end, then came {new.get('phase')}", after)
        yield from _steps(chapter, old, new, after)
        yield from _records(chapter, old, new, after)
        yield from _phases(chapter, old, new, after)
        yield from _conditions(chapter, before, after)


def _steps(chapter: Chapter, old: Manifest, new: Manifest, after: Entry) -> Iterator[Violation]:
    """Steps only go back where a new attempt resumes from a checkpoint."""
    was, now = ((found.get("training") or {}).get("step", 0) for found in (old, new))
    if old.get("attempt", 1) == new.get("attempt", 1) and now < was and not _may_resume(old):
        yield chapter.violation("monotone", f"step went from {was} to {now} in attempt {new.get('attempt')}", after)


def _may_resume(found: Manifest) -> bool:
    """The training numbers still are those of an attempt before: the present one has not reported yet."""
    return found.get("phase") not in ("Training", "Finishing", "Succeeded")


def _records(chapter: Chapter, old: Manifest, new: Manifest, after: Entry) -> Iterator[Violation]:
    """A record of an attempt stays, and does not change once it has an end."""
    known = {record["number"]: record for record in new.get("attempts") or ()}
    numbers = [record["number"] for record in new.get("attempts") or ()]
    if len(set(numbers)) < len(numbers):
        yield chapter.violation("monotone", f"attempts are recorded twice: {numbers}", after)
    if sum(1 for record in known.values() if not record.get("endTime")) > 1:
        yield chapter.violation("monotone", f"two attempts are recorded without an end: {sorted(known)}", after)
    for record in old.get("attempts") or ():
        now = known.get(record["number"])
        if now is None and len(known) < 10:
            yield chapter.violation("monotone", f"the record of attempt {record['number']} is gone", after)
        if now is not None and record.get("endTime") and now != record:
            yield chapter.violation(
                "monotone", f"the record of attempt {record['number']} changed after its end", after
            )


def _phases(chapter: Chapter, old: Manifest, new: Manifest, after: Entry) -> Iterator[Violation]:
    """Phases of one attempt come in their order."""
    if (old.get("attempt") or 1) != (new.get("attempt") or 1):
        return
    was, now = str(old.get("phase", "")), str(new.get("phase", ""))
    alive_before, alive = _live(old), _live(new)
    order = LIVE_ORDER if alive_before and alive else EARLY_ORDER if not (alive_before or alive) else {}
    ended = any(
        record["number"] == (new.get("attempt") or 1) and record.get("endTime") for record in new.get("attempts") or ()
    )
    if was in order and now in order and order[now] < order[was] and not (ended and order is EARLY_ORDER):
        yield chapter.violation("monotone", f"phase went from {was} to {now} in attempt {new.get('attempt')}", after)
    if alive and now in ("Pending", "Checking", "StartingTeachers", "ProbingTeachers", "Retrying"):
        yield chapter.violation("monotone", f"phase {now} while attempt {new.get('attempt')} lives", after)


def _live(found: Manifest) -> bool:
    attempt = found.get("attempt") or 1
    return any(record["number"] == attempt and not record.get("endTime") for record in found.get("attempts") or ())


def _conditions(chapter: Chapter, before: Entry, after: Entry) -> Iterator[Violation]:
    """Conditions stay, their times go forward, and move with their status only."""
    new = conditions(after)
    for kind, old in conditions(before).items():
        now = new.get(kind)
        if now is None:
            yield chapter.violation("monotone", f"condition {kind} is gone", after)
            continue
        moved = now["lastTransitionTime"] != old["lastTransitionTime"]
        if now["lastTransitionTime"] < old["lastTransitionTime"]:
            yield chapter.violation("monotone", f"condition {kind} went back in time", after)
        if moved and now["status"] == old["status"]:
            yield chapter.violation("monotone", f"condition {kind} moved its time but not its status", after)


def observed_generation(chapter: Chapter) -> Iterator[Violation]:
    """observedGeneration is never ahead of the spec, and catches up while an operator lives."""
    waits: tuple[int, float] | None = None
    last = chapter.entries[-1].spent
    for entry in chapter.jobs:
        generation = int(entry.object["metadata"].get("generation", 1))
        seen = status(entry).get("observedGeneration") or 0
        if seen > generation:
            yield chapter.violation("observedGeneration", f"{seen} is ahead of generation {generation}", entry)
        for condition in conditions(entry).values():
            if (condition.get("observedGeneration") or 0) > generation:
                yield chapter.violation(
                    "observedGeneration", f"condition {condition['type']} is ahead of {generation}", entry
                )
        if entry.object["metadata"].get("deletionTimestamp") or entry.change == "DELETED":
            break
        if waits is not None and seen >= waits[0]:
            waits = None
        if waits is None and seen < generation:
            waits = (generation, entry.spent)
        if waits is not None and chapter.story.alive(waits[1], entry.spent) > PATIENCE_SECONDS:
            yield chapter.violation("observedGeneration", f"{seen} though generation {waits[0]} is old", entry)
            return
    else:
        if waits is not None and chapter.story.alive(waits[1], last) > PATIENCE_SECONDS:
            yield chapter.violation("observedGeneration", f"generation {waits[0]} was never seen")
