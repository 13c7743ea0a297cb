"""What must never happen in the life of an OPDJob, whatever becomes of pods, operators and the API server. Pure.

`check(story)` reads the record that the observer took from the API server. It knows the API and the design, none of the
operator's code: what the operator says of itself (its status) is only ever compared with the record or with itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise

from opd_chaos.monotone import monotone, observed_generation
from opd_chaos.record import (
    PATIENCE_SECONDS,
    TERMINAL,
    Chapter,
    Entry,
    Manifest,
    Story,
    Violation,
    chapters,
    conditions,
    going,
    label,
    owners,
    status,
)

#: Between a change and the moment when a watch that goes wrong lets the operator know.
BLIND_SECONDS = 10.0
CHILDREN = frozenset({"Deployment", "Job", "RayJob", "ConfigMap", "Service", "NetworkPolicy"})


def check(story: Story) -> list[Violation]:
    """Everything that was broken."""
    found, broken = chapters(story)
    for chapter in found:
        for rule in RULES:
            broken += rule(chapter)
    return broken


# --- the gate ------------------------------------------------------------------------------------------------------------


def gate(chapter: Chapter) -> Iterator[Violation]:
    """No RayJob is created before every teacher was ready and probed."""
    for created in chapter.of("RayJob"):
        if created.change != "ADDED":
            continue
        spec = _spec_before(chapter, created)
        ready = [
            _ready_since(chapter, created, teacher)
            for teacher in spec.get("teachers") or ()
            if not teacher.get("endpoints")
        ]
        for teacher, version in zip(spec.get("teachers") or (), ready, strict=False):
            if version is None:
                yield chapter.violation(
                    "gate", f"{created.name} was created before teacher {teacher['name']} was ready", created
                )
        if (spec.get("preflight") or {}).get("enabled", True) and None not in ready:
            latest = max((version for version in ready if version is not None), default=0)
            if not any(_passed_between(chapter, uid, latest, created.version) for uid in _probes(chapter)):
                yield chapter.violation("gate", f"{created.name} was created before its teachers were probed", created)


def _spec_before(chapter: Chapter, entry: Entry) -> Manifest:
    known = [job for job in chapter.jobs if job.version < entry.version]
    return (known[-1].object.get("spec") or {}) if known else {}


def _ready_since(chapter: Chapter, created: Entry, teacher: Manifest) -> int | None:
    """Version in which the teacher's present Deployment was first fully ready, before the RayJob; None when it never was."""
    states = [
        entry
        for entry in chapter.of("Deployment")
        if label(entry, "teacher") == teacher["name"] and entry.version < created.version
    ]
    if not states:
        return None
    last = states[-1]
    if last.change == "DELETED" and created.spent - last.spent > BLIND_SECONDS:
        return None
    for entry in states:
        metadata = entry.object["metadata"]
        same = entry.uid == last.uid and _restart(entry) == _restart(last)
        seen = int(status(entry).get("observedGeneration", 0)) >= int(metadata.get("generation", 0))
        if same and seen and int(status(entry).get("readyReplicas", 0)) >= int(teacher.get("replicas") or 1):
            return entry.version
    return None


def _restart(entry: Entry) -> str:
    return str((entry.object["metadata"].get("annotations") or {}).get("opd.dev/restart", "0"))


def _probes(chapter: Chapter) -> list[str]:
    return list({entry.uid: None for entry in chapter.of("Job", "probe")})


def _passed_between(chapter: Chapter, uid: str, after: int, before: int) -> bool:
    """The probe was begun after the one version and had passed before the other."""
    states = [entry for entry in chapter.of("Job", "probe") if entry.uid == uid]
    passed = [
        entry
        for entry in states
        if entry.version < before
        and any(conditions(entry).get(kind, {}).get("status") == "True" for kind in ("Complete", "SuccessCriteriaMet"))
    ]
    return bool(passed) and states[0].change == "ADDED" and states[0].version > after


# --- attempts ------------------------------------------------------------------------------------------------------------


def one_live_attempt(chapter: Chapter) -> Iterator[Violation]:
    """At most one RayJob lives, and the pods of the one before are gone or have had their time."""
    live: dict[str, Entry] = {}
    pods: dict[str, Entry] = {}
    parents = {entry.uid: owners(entry) for entry in chapter.entries}
    ends: dict[str, float] = {}
    for entry in chapter.entries:
        if entry.kind == "OPDJob":
            for record in status(entry).get("attempts") or ():
                if record.get("endTime"):
                    ends.setdefault(str(record["number"]), entry.at)
        elif entry.kind == "Pod" and label(entry, "role") in ("head", "worker"):
            over = entry.change == "DELETED" or status(entry).get("phase") in TERMINAL
            if over:
                pods.pop(entry.uid, None)
            else:
                pods.setdefault(entry.uid, entry)
        elif entry.kind == "RayJob":
            ended = status(entry).get("jobDeploymentStatus") in ("Complete", "Failed", "ValidationFailed")
            if going(entry) or ended:
                live.pop(entry.uid, None)
            elif entry.change == "ADDED":
                for other in live.values():
                    yield chapter.violation(
                        "one live attempt", f"{entry.name} was created while {other.name} lived", entry
                    )
                live[entry.uid] = entry
                old = [
                    pod
                    for pod in pods.values()
                    if [entry.uid] != [uid for up in owners(pod) for uid in parents.get(up, [])]
                ]
                yield from _old_pods(chapter, entry, old, ends)


def _old_pods(
    chapter: Chapter, created: Entry, pods: Iterable[Entry], ends: Mapping[str, float]
) -> Iterator[Violation]:
    """Pods of another RayJob, also of one with the same attempt, which the fence in the run directory would not tell apart."""
    grace = (_spec_before(chapter, created).get("lifecycle") or {}).get("preemptionGraceSeconds", 120)
    patience = float(grace) + chapter.story.extra_seconds - 2.0
    for pod in pods:
        known = created.spent - pod.spent > BLIND_SECONDS
        waited = created.at - ends.get(label(pod, "attempt"), created.at)
        if known and waited < patience:
            message = f"{created.name} was created though {pod.name} of a RayJob before it was there, {waited:.1f} s after its end"
            yield chapter.violation("one live attempt", message, created)


def nothing_doubled(chapter: Chapter) -> Iterator[Violation]:
    """One RayJob for each attempt, one passed check, one Deployment for each start of a teacher, one word of each start."""
    made: dict[tuple[str, str], set[str]] = defaultdict(set)
    for entry in chapter.entries:
        if entry.change == "ADDED":
            made[entry.kind, entry.name].add(entry.uid)
    for (kind, name), uids in made.items():
        if kind == "RayJob" and len(uids - chapter.story.touched) > 1:
            yield chapter.violation("nothing doubled", f"RayJob {name} was created {len(uids)} times")
        if kind == "Deployment" and len(uids) > 1 + _releases(chapter) + len(uids & chapter.story.touched):
            yield chapter.violation(
                "nothing doubled",
                f"Deployment {name} was created {len(uids)} times after {_releases(chapter)} releases",
            )
    passed = {entry.uid for entry in chapter.of("Pod", "check") if status(entry).get("phase") == "Succeeded"}
    passed -= chapter.story.touched
    if len(passed) > 1 + _suspensions(chapter):  # a stop that meets a check at its end deletes it unseen
        yield chapter.violation("nothing doubled", f"the input check passed {len(passed)} times")
    starts = [
        message for uid, reason, message in chapter.story.events if uid == chapter.uid and reason == "AttemptStarted"
    ]
    for message in {message for message in starts if starts.count(message) > 1}:
        yield chapter.violation("nothing doubled", f"{starts.count(message)} Events say '{message}'")


def _releases(chapter: Chapter) -> int:
    """How often teachers were let go on purpose: suspensions, and waits without room."""
    released = {
        record["number"]
        for entry in chapter.jobs
        for record in status(entry).get("attempts") or ()
        if record.get("reason") == "CapacityReleased"
    }
    return _suspensions(chapter) + len(released)


def _suspensions(chapter: Chapter) -> int:
    wanted = [bool((entry.object.get("spec") or {}).get("suspend")) for entry in chapter.jobs]
    return sum(now and not before for before, now in pairwise([False, *wanted]))


# --- the end -------------------------------------------------------------------------------------------------------------


def terminal_holds_no_teacher(chapter: Chapter) -> Iterator[Violation]:
    """Nothing is created for a job that has ended, and its teachers go."""
    end = next((entry for entry in chapter.jobs if status(entry).get("phase") in TERMINAL), None)
    if end is None:
        return
    last = chapter.entries[-1].spent
    for entry in chapter.entries:
        if entry.kind in CHILDREN and entry.change == "ADDED" and entry.version > end.version:
            yield chapter.violation("terminal", f"{entry.kind} {entry.name} was created after the end", entry)
    for kind, role in (("Deployment", ""), ("Pod", "teacher")):
        for uid in {entry.uid for entry in chapter.of(kind, role)}:
            states = [entry for entry in chapter.of(kind, role) if entry.uid == uid]
            gone = next((entry.spent for entry in states if going(entry)), last)
            if chapter.story.alive(end.spent, gone) > PATIENCE_SECONDS:
                yield chapter.violation(
                    "terminal", f"{kind} {states[0].name} of a job that has ended was kept", states[-1]
                )


def released_is_true(chapter: Chapter) -> Iterator[Violation]:
    """Where the status says that no accelerator is held, no pod holds one: on a node, not ended, and there for a while."""
    holders: dict[str, Entry] = {}
    for entry in chapter.entries:
        if entry.kind == "Pod" and label(entry, "role") in ("teacher", "head", "worker"):
            holds = (
                bool((entry.object.get("spec") or {}).get("nodeName")) and status(entry).get("phase") not in TERMINAL
            )
            if holds and entry.change != "DELETED":
                holders.setdefault(entry.uid, entry)
            else:
                holders.pop(entry.uid, None)
        elif entry.kind == "OPDJob" and entry.change != "DELETED":
            for kind in ("ResourcesReleased", "Suspended"):
                if conditions(entry).get(kind, {}).get("status") == "True":
                    for pod in holders.values():
                        if entry.spent - pod.spent > BLIND_SECONDS:
                            yield chapter.violation(
                                "released", f"{kind} is True, but {pod.name} holds accelerators", entry
                            )


def limits(chapter: Chapter) -> Iterator[Violation]:
    """No more retries than the spec allows at any time, and one restart of the teachers."""
    allowed = 0
    for entry in chapter.jobs:
        allowed = max(allowed, int(((entry.object.get("spec") or {}).get("lifecycle") or {}).get("backoffLimit", 3)))
        found = status(entry)
        for name, limit in (("retries", allowed), ("teacherRestarts", 1)):
            if (found.get(name) or 0) > limit:
                yield chapter.violation("limits", f"{name} is {found[name]} where {limit} are allowed", entry)


def calm_succeeds(chapter: Chapter) -> Iterator[Violation]:
    """A job to which nothing happened succeeds, in one attempt, with all of its steps."""
    if not chapter.story.calm:
        return
    last = chapter.jobs[-1]
    found = status(last)
    if found.get("phase") != "Succeeded" or found.get("attempt") != 1:
        why = conditions(last).get("Failed", {}).get("message", "")
        first = (found.get("attempts") or [{}])[0]
        yield chapter.violation(
            "calm",
            f"nothing happened to it, but it is {found.get('phase')} in attempt {found.get('attempt')}: {why} {first}",
            last,
        )


RULES: tuple[Callable[[Chapter], Iterable[Violation]], ...] = (
    gate,
    one_live_attempt,
    nothing_doubled,
    terminal_holds_no_teacher,
    released_is_true,
    limits,
    calm_succeeds,
    monotone,
    observed_generation,
)
