"""The record of one OPDJob name, told apart by UID, and what was known from the outside. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Manifest = dict[str, Any]
TERMINAL = frozenset({"Succeeded", "Failed"})
#: Seconds in which a living operator must have acted, on a busy machine with a fifth of its calls failing.
PATIENCE_SECONDS = 40.0


@dataclass(frozen=True)
class Entry:
    """One change of one object."""

    version: int
    #: Monotonic seconds of this machine when it was seen.
    at: float
    #: ADDED, MODIFIED or DELETED.
    change: str
    object: Manifest
    #: The same moment in seconds that the machine had for us (clock).
    spent: float = 0.0

    @property
    def kind(self) -> str:
        """Kind of the object."""
        return str(self.object["kind"])

    @property
    def name(self) -> str:
        """Name of the object."""
        return str(self.object["metadata"]["name"])

    @property
    def uid(self) -> str:
        """UID of the object."""
        return str(self.object["metadata"]["uid"])


@dataclass(frozen=True)
class Violation:
    """A broken invariant."""

    rule: str
    job: str
    message: str
    version: int = 0


@dataclass(frozen=True)
class Story:
    """One OPDJob name of a round: the record and what is known about it from the outside."""

    name: str
    #: Sorted by version.
    entries: tuple[Entry, ...]
    #: UIDs that were deleted from outside, on purpose.
    touched: frozenset[str] = frozenset()
    #: (start, end) of operators, in seconds that the machine had for us.
    uptime: tuple[tuple[float, float], ...] = ()
    #: Seconds that old pods are waited for beyond the grace.
    extra_seconds: float = 5.0
    #: Nothing happened to it, so it must succeed in its first attempt.
    calm: bool = False
    #: Events about it: (uid of the OPDJob, reason, message).
    events: tuple[tuple[str, str, str], ...] = ()

    def alive(self, start: float, end: float) -> float:
        """Seconds between two moments (`spent`) in which an operator lived."""
        return sum(max(0.0, min(end, stop) - max(start, begin)) for begin, stop in self.uptime)


@dataclass
class Chapter:
    """The record of one OPDJob, told apart by UID from others of its name."""

    story: Story
    uid: str
    entries: list[Entry] = field(default_factory=list)

    @property
    def jobs(self) -> list[Entry]:
        """The OPDJob's own entries."""
        return [entry for entry in self.entries if entry.kind == "OPDJob"]

    def of(self, kind: str, role: str = "") -> list[Entry]:
        """Entries of a kind (and role)."""
        return [entry for entry in self.entries if entry.kind == kind and (not role or label(entry, "role") == role)]

    def violation(self, rule: str, message: str, entry: Entry | None = None) -> Violation:
        """A violation in this chapter."""
        return Violation(rule, f"{self.story.name}/{self.uid[:8]}", message, entry.version if entry else 0)


def label(entry: Entry, name: str) -> str:
    """Value of one of our labels."""
    return str((entry.object["metadata"].get("labels") or {}).get(f"opd.dev/{name}", ""))


def status(entry: Entry) -> Manifest:
    """Status of the object."""
    found: Manifest = entry.object.get("status") or {}
    return found


def conditions(entry: Entry) -> Mapping[str, Manifest]:
    """Conditions by type."""
    return {item["type"]: item for item in status(entry).get("conditions") or ()}


def going(entry: Entry) -> bool:
    """Deleted or being deleted."""
    return entry.change == "DELETED" or bool(entry.object["metadata"].get("deletionTimestamp"))


def owners(entry: Entry) -> list[str]:
    """UIDs of controlling owners."""
    references = entry.object["metadata"].get("ownerReferences") or ()
    return [str(reference["uid"]) for reference in references if reference.get("controller")]


def chapters(story: Story) -> tuple[list[Chapter], list[Violation]]:
    """The record by OPDJob; objects whose owners lead to none are violations by themselves."""
    parents = {entry.uid: owners(entry) for entry in story.entries}
    roots = {entry.uid for entry in story.entries if entry.kind == "OPDJob"}
    found = {uid: Chapter(story, uid) for uid in roots}
    orphans: dict[str, Violation] = {}
    for entry in story.entries:
        root = _root(entry.uid, parents, roots)
        if root is not None:
            found[root].entries.append(entry)
        elif entry.uid not in orphans:
            holder = label(entry, "role") in ("teacher", "head", "worker") and entry.kind == "Pod"
            what = "a pod with accelerators" if holder else f"{entry.kind} {entry.name}"
            orphans[entry.uid] = Violation(
                "owner", story.name, f"{what} {entry.name} has no OPDJob above it", entry.version
            )
    return list(found.values()), list(orphans.values())


def _root(uid: str, parents: Mapping[str, list[str]], roots: set[str]) -> str | None:
    for _ in range(6):
        if uid in roots:
            return uid
        above = parents.get(uid) or []
        if len(above) != 1:
            return None
        uid = above[0]
    return None
