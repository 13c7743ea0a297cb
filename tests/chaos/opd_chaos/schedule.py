"""A seed makes a schedule: twenty lives of OPDJobs, the fate of their operator and the mood of its API server. Pure.

The same seed gives the same schedule for ever; the order in which things meet on a real API server differs from run to run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

Manifest = dict[str, Any]
#: Lives of one round.
LIVES = 20
#: Of so many rounds in a row one has operators that are processes of their own, ended by kill -9.
ROUNDS_PER_REAL_KILL = 20
NEVER = 10_000.0
PHASES = ("Checking", "StartingTeachers", "ProbingTeachers", "StartingStudent", "Training", "Finishing")
#: What can happen to an attempt's student; see world_student.
STUDENT_FAULTS = (
    "head lost",
    "worker lost",
    "node lost",
    "stall",
    "silence",
    "no room",
    "ray job deleted",
    "exit 75 without a document",
    "exit 70",
    "data",
    "teacher",
    "stopped",
    "invalid",
    "complete without a document",
)


@dataclass(frozen=True)
class Teacher:
    """How the replicas of one teacher behave; times in seconds from a pod's creation."""

    name: str
    replicas: int = 1
    ready_after: float = 0.3
    #: Restarts of the container before it gets ready.
    crashes: int = 0
    #: No node has room for so long.
    unschedulable: float = 0.0
    #: Not ready for a while after this step of the first attempt.
    lost_at_step: int | None = None


@dataclass(frozen=True)
class Step:
    """A check or probe: how long its pods run and how each of them ends (the last entry for all that follow)."""

    seconds: float = 0.2
    ends: tuple[str, ...] = ("ok",)


@dataclass(frozen=True)
class Attempt:
    """What happens to the student of one attempt."""

    fault: str = ""
    at_step: int = 0
    start_after: float = 0.3


@dataclass(frozen=True)
class Action:
    """What a person does: when the job is first seen in a phase (any, when empty), and so many seconds later."""

    what: str
    phase: str = ""
    delay: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Life:
    """One job."""

    name: str
    begins_after: float = 0.0
    teachers: tuple[Teacher, ...] = (Teacher("big"),)
    check: Step = Step()
    probe: Step = Step()
    preflight: bool = True
    steps: int = 3
    step_seconds: float = 0.2
    #: Seconds from the request to stop to the last document.
    saves_in: float = 0.5
    #: Seconds that pods of a student linger in Terminating.
    lingers: float = 0.2
    attempts: tuple[Attempt, ...] = ()
    actions: tuple[Action, ...] = ()
    lifecycle: Manifest = field(default_factory=dict)

    @property
    def calm(self) -> bool:
        """Nothing happens to it: whatever becomes of operator and API server, it must succeed in its first attempt."""
        teachers = all(
            item.ready_after < NEVER and not item.crashes and not item.unschedulable and item.lost_at_step is None
            for item in self.teachers
        )
        steps = all(set(step.ends) == {"ok"} for step in (self.check, self.probe))
        faults = any(attempt.fault for attempt in self.attempts) or self.saves_in >= NEVER
        people = any(action.what != "annotate" for action in self.actions)
        return teachers and steps and not faults and not people and "activeDeadlineSeconds" not in self.lifecycle

    def attempt(self, number: int) -> Attempt:
        """What happens to the student of that attempt; nothing, beyond those that are planned."""
        return self.attempts[number - 1] if number <= len(self.attempts) else Attempt()


@dataclass(frozen=True)
class Death:
    """The end of one operator: after so many writes or seconds, whichever comes first."""

    #: `crash`: nothing of it reaches the API server any more. `stop`: SIGTERM, or what a task knows as such.
    manner: str
    writes: int
    seconds: float
    #: The last write reaches the API server, but no answer comes back.
    carried_out: bool
    #: The last write reaches it only so many seconds after the death.
    late: float
    #: Until the next operator starts.
    pause: float


@dataclass(frozen=True)
class Mood:
    """Shares of the operator's calls (and watches) that go wrong."""

    share: float = 0.0
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Round:
    """Everything of one seed."""

    seed: int
    lives: tuple[Life, ...]
    #: Real processes and kill -9, otherwise tasks of one process.
    processes: bool
    #: Ends of the operators, one row for each of one or two replicas.
    deaths: tuple[tuple[Death, ...], ...]
    mood: Mood


CALL_FAULTS = (
    "429",
    "500",
    "503",
    "conflict",
    "reset",
    "lost answer",
    "timeout",
    "delay",
    "cut watch",
    "gone watch",
    "mute watch",
)


def make_round(seed: int, lives: int = LIVES) -> Round:
    """The schedule of a seed."""
    dice = random.Random(seed)
    processes = seed % ROUNDS_PER_REAL_KILL == 0
    replicas = 2 if not processes and dice.random() < 0.2 else 1
    share = dice.choice((0.0, 0.05, 0.1, 0.2))
    kinds = tuple(kind for kind in CALL_FAULTS if dice.random() < 0.7) or CALL_FAULTS
    return Round(
        seed=seed,
        lives=tuple(_life(random.Random(f"{seed}/{number}"), f"job{number:02}") for number in range(lives)),
        processes=processes,
        deaths=tuple(_deaths(dice, processes) for _ in range(replicas)),
        mood=Mood(share, kinds),
    )


def _deaths(dice: random.Random, processes: bool) -> tuple[Death, ...]:
    count = dice.choice((1, 2)) if processes else dice.choice((0, 1, 2, 3, 4))
    return tuple(
        Death(
            manner="stop" if not processes and dice.random() < 0.25 else "crash",
            writes=dice.randint(1, 250),
            seconds=dice.uniform(3.0, 15.0),
            carried_out=dice.random() < 0.5,
            late=dice.uniform(0.2, 3.0) if dice.random() < 0.3 else 0.0,
            pause=dice.choice((0.0, 0.0, 0.5, 2.0, 5.0)),
        )
        for _ in range(count)
    )


def _life(dice: random.Random, name: str) -> Life:
    if dice.random() < 0.2:
        return Life(
            name=name, begins_after=dice.uniform(0.0, 4.0), steps=dice.randint(1, 5), teachers=_teachers(dice, 0.0)
        )
    trouble = 0.25
    return Life(
        name=name,
        begins_after=dice.uniform(0.0, 4.0),
        teachers=_teachers(dice, trouble),
        check=_step(dice, ("Data", "Config", "Infrastructure", "Internal")),
        probe=_step(dice, ("Teacher", "Teacher", "Infrastructure", "Config")),
        preflight=dice.random() > 0.08,
        steps=dice.randint(1, 6),
        step_seconds=dice.uniform(0.1, 0.5),
        saves_in=dice.choice((0.1, 0.5, 1.0, NEVER)),
        lingers=dice.choice((0.0, 0.2, 1.0, 3.0)),
        attempts=_attempts(dice),
        actions=_actions(dice),
        lifecycle=_lifecycle(dice),
    )


def _teachers(dice: random.Random, trouble: float) -> tuple[Teacher, ...]:
    found = []
    for name in ("big", "code")[: dice.choice((1, 1, 1, 2))]:
        found.append(
            Teacher(
                name=name,
                replicas=dice.choice((1, 1, 2)),
                ready_after=dice.choice((0.1, 0.5, 1.5)) if dice.random() > trouble / 4 else NEVER,
                crashes=dice.choice((1, 3, 6)) if dice.random() < trouble / 2 else 0,
                unschedulable=dice.choice((1.0, 3.0, NEVER)) if dice.random() < trouble / 2 else 0.0,
                lost_at_step=dice.randint(1, 3) if dice.random() < trouble else None,
            )
        )
        if trouble == 0.0:
            found[-1] = Teacher(name=name, replicas=found[-1].replicas, ready_after=dice.choice((0.1, 0.5, 1.5)))
    return tuple(found)


def _step(dice: random.Random, failures: tuple[str, ...]) -> Step:
    seconds = dice.choice((0.1, 0.5, 1.5))
    if dice.random() < 0.85:
        return Step(seconds)
    failure = dice.choice(failures)
    return Step(seconds, (failure,) if dice.random() < 0.4 else (failure, failure, "ok"))


def _attempts(dice: random.Random) -> tuple[Attempt, ...]:
    return tuple(
        Attempt(
            fault=dice.choice(STUDENT_FAULTS) if dice.random() < 0.6 else "",
            at_step=dice.randint(0, 3),
            start_after=dice.choice((0.1, 0.4, 1.0)),
        )
        for _ in range(dice.choice((1, 1, 2, 3)))
    )


def _actions(dice: random.Random) -> tuple[Action, ...]:
    found = []
    for _ in range(dice.choice((0, 0, 1, 1, 2))):
        what = dice.choice(
            (
                "suspend",
                "suspend",
                "suspend",
                "delete",
                "delete",
                "recreate",
                "edit",
                "edit",
                "delete teacher",
                "delete pod",
                "annotate",
            )
        )
        found.append(
            Action(
                what=what,
                phase=dice.choice(("", *PHASES, "Retrying", "Succeeded")),
                delay=dice.choice((0.0, 0.0, dice.uniform(0.0, 2.0))),
                seconds=dice.uniform(0.0, 3.0),
            )
        )
    return tuple(found)


def _lifecycle(dice: random.Random) -> Manifest:
    found: Manifest = {"backoffLimit": dice.choice((0, 1, 3))}
    if dice.random() < 0.1:
        found["activeDeadlineSeconds"] = dice.randint(3, 15)
    if dice.random() < 0.1:
        found["ttlSecondsAfterFinished"] = dice.randint(0, 3)
    if dice.random() < 0.15:
        found["cleanup"] = {"onFailure": "KeepRay", "keepSeconds": dice.randint(1, 4)}
    return found


def document(life: Life, namespace: str) -> Manifest:
    """The OPDJob of a life. Deadlines are short where its schedule lets them pass, and long where they must not."""
    faults = {attempt.fault for attempt in life.attempts}
    hopeless = any(item.ready_after >= NEVER or item.unschedulable >= NEVER or item.crashes for item in life.teachers)
    lifecycle: Manifest = {
        "preemptionGraceSeconds": 2,
        "teacherReadyDeadlineSeconds": 6 if hopeless else 600,
        "preRunningDeadlineSeconds": 600,
        "teacherIdleTimeoutSeconds": 2,
        "stallTimeoutSeconds": 4 if "stall" in faults else 600,
        # One that is asked to stop and is deaf stays silent, also when the request is taken back.
        "heartbeatTimeoutSeconds": 4 if "silence" in faults or life.saves_in >= NEVER else 600,
        **life.lifecycle,
    }
    teachers = [
        {
            "name": item.name,
            "backend": "transformers",
            "model": {"source": f"/data/{item.name}"},
            "replicas": item.replicas,
        }
        for item in life.teachers
    ]
    spec: Manifest = {
        "runtime": {"device": "cpu", "acceleratorResource": "nvidia.com/gpu"},
        "storage": {"claimName": "data"},
        "student": {"model": {"source": "/data/student"}},
        "teachers": teachers,
        "data": {"source": "/data/prompts.jsonl"},
        "rollout": {"engine": "transformers"},
        "training": {"steps": life.steps},
        "preflight": {"enabled": life.preflight},
        "lifecycle": lifecycle,
    }
    if len(teachers) > 1:
        spec["routing"] = {"map": {item["name"]: item["name"] for item in teachers}}
    metadata = {"name": life.name, "namespace": namespace}
    return {"apiVersion": "opd.dev/v1alpha1", "kind": "OPDJob", "metadata": metadata, "spec": spec}
