"""Jobs under random schedules of faults, edits and operator restarts: what must hold, holds at every step."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from datetime import timedelta

import pytest
from opd_world import World, final, job_document

from opd_api.v1alpha1 import OPDJobStatus
from opd_operator.children.names import probe_job
from opd_operator.model import WriteProblemKind
from opd_operator.planned import Plan

STEPS = 120
CLASSES = ["Config", "Data", "Teacher", "Infrastructure", "Internal", "Stall"]

REFUSED = ["--port", "9"]
REFUSALS = (
    WriteProblemKind.INVALID,
    WriteProblemKind.QUOTA,
    WriteProblemKind.FORBIDDEN,
    WriteProblemKind.NOT_SERVED,
)


class Walk:
    """One job and one source of chance."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        teachers = [{"name": name, "model": {"source": f"/data/{name}"}} for name in ("big", "code")]
        self.world = World(
            job_document(
                teachers=teachers,
                routing={"map": {"math": "big"}, "default": "code"},
                lifecycle={"backoffLimit": self.chance.randint(0, 4), "teacherIdleTimeoutSeconds": 100},
            )
        )
        self.furthest = 0
        #: The job had ended before this pass: an end is written down one pass before anything is removed.
        self.over = False

    def go(self) -> None:
        for _ in range(STEPS):
            self.chance.choice(self._possible())()
            for _ in range(self.chance.randint(1, 3)):
                self.hold(self.world.step())
            if self.world.deleted:
                return

    def hold(self, made: Plan) -> None:
        """The invariants."""
        world = self.world
        if any(item["kind"] == "RayJob" for item in made.create):
            assert self._all_teachers_ready(), "a RayJob was created before every teacher was ready"
            assert self._probe_of_these_pods_passed(), "a RayJob was created before every teacher was probed"
        assert len(world.names("RayJob")) <= 1, "two live attempts"
        if world.phase in ("Succeeded", "Failed"):
            assert made.create == made.apply == made.secrets == ()
            assert world.names("Deployment") == [] or not self.over, "an ended job holds a teacher"
        self.over = world.phase in ("Succeeded", "Failed")
        wrong = self.world.job["spec"]["teachers"][0].get("args") == REFUSED
        if wrong and made.status is not None:
            made_of_it = {item["kind"] for item in (*made.create, *made.apply)}
            assert not made_of_it & {"RayJob", "Deployment", "Job"}, "something was made from a refused spec"
        if made.status is None and world.phase == "Pending" and self._waits_for_a_correction() and not made.delete:
            assert world.names("RayJob") == world.names("Deployment") == [], "a held job holds something"
        if world.phase == "Suspended":
            assert world.accelerator_pods() == []
        attempt = world.status.get("attempt", 1)
        assert attempt >= self.furthest, "attempts only grow"
        self.furthest = attempt
        if made.status is not None:
            OPDJobStatus.model_validate(made.status)
            assert made.status["observedGeneration"] == world.job["metadata"]["generation"]
        if not world.status:  # even the trial of the children was refused
            return
        truths = [world.condition(kind)["status"] for kind in ("Succeeded", "Failed")]
        assert truths != ["True", "True"]
        assert [item["type"] for item in world.status["conditions"]] == list(
            dict.fromkeys(item["type"] for item in world.status["conditions"])
        )

    def _waits_for_a_correction(self) -> bool:
        return self.world.status["observedGeneration"] == self.world.job["metadata"]["generation"] and (
            self.world.condition("Accepted")["status"] == "False"
        )

    def _all_teachers_ready(self) -> bool:
        for name in ("big", "code"):
            item = self.world.objects.get(("Deployment", f"math-teacher-{name}"))
            if item is None or item.get("status", {}).get("readyReplicas") != 1:
                return False
        return True

    def _probe_of_these_pods_passed(self) -> bool:
        world = self.world
        pods = [
            item["metadata"]["uid"]
            for (kind, _), item in world.objects.items()
            if kind == "Pod" and item["metadata"]["labels"].get("opd.dev/role") == "teacher"
        ]
        name = probe_job("math", [*pods, f"restarts={world.status['teacherRestarts']}"])
        probe = world.objects.get(("Job", name), {})
        return [item["type"] for item in probe.get("status", {}).get("conditions", [])] == ["Complete"]

    def _possible(self) -> list[Callable[[], object]]:
        world, chance = self.world, self.chance
        attempt = world.status.get("attempt", 1)
        found: list[Callable[[], object]] = [
            lambda: world.settle(),
            lambda: world.restart_operator(),
            lambda: setattr(world, "now", world.now + self._span()),
            lambda: world.edit(suspend=chance.random() < 0.3),
            self._edit_teacher,
            self._change_of_mind,
        ]
        for role in ("check", "probe"):
            if any(self._waits(item, role) for item in world.objects.values()):
                found += [lambda role=role: world.end_job(role, final())] * 4
                found.append(lambda role=role: self._fail(role))
        for name in ("big", "code"):
            if ("Deployment", f"math-teacher-{name}") in world.objects:
                found += [lambda name=name: world.teacher_up(name)] * 2 + [lambda name=name: world.teacher_down(name)]
        if ("RayJob", f"math-{attempt}") in world.objects:
            found += [lambda: world.ray_runs(attempt)] * 2
            found += [lambda: world.heartbeat(chance.randint(1, 9), attempt=attempt)] * 4
            found.append(lambda: world.remove_pods(f"math-{attempt}-head"))
            found.append(lambda: world.final("Failed", attempt, failureClass=chance.choice(CLASSES)))
            found.append(lambda: world.final("Preempted", attempt))
            found.append(self._success(attempt))
        return found

    def _edit_teacher(self) -> None:
        big, code = self.world.job["spec"]["teachers"]
        self.world.edit(teachers=[{**big, "args": self.chance.choice([[], ["--verbose"], REFUSED, REFUSED])}, code])

    def _change_of_mind(self) -> None:
        """The API server refuses a kind of object for a while."""
        kind = self.chance.choice(["RayJob", "Deployment"])
        if self.world.refuse.pop(kind, None) is None and self.chance.random() < 0.5:
            self.world.refuse[kind] = (self.chance.choice(list(REFUSALS)), "words of the API server")

    def _fail(self, role: str) -> None:
        self.world.end_job(role, final("Failed", failureClass=self.chance.choice(CLASSES[:5])), ok=False)

    def _success(self, attempt: int) -> Callable[[], object]:
        def happen() -> None:
            self.world.final("Succeeded", attempt)
            self.world.ray(attempt, jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")

        return happen

    def _span(self) -> timedelta:
        return timedelta(seconds=self.chance.choice([1, 12, 45, 130, 700]))

    @staticmethod
    def _waits(item: dict[str, object], role: str) -> bool:
        metadata = item["metadata"]
        assert isinstance(metadata, dict)
        return item["kind"] == "Job" and metadata["labels"]["opd.dev/role"] == role and "status" not in item


@functools.cache
def walked(seed: int) -> frozenset[str]:
    """Phases of a walk."""
    walk = Walk(seed)
    walk.go()
    return frozenset(walk.world.phases)


@pytest.mark.parametrize("seed", range(12))
def test_invariants_hold_under_any_schedule(seed: int) -> None:
    assert walked(seed) & {"Checking", "Failed"}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12, 200))
def test_invariants_hold_under_many_schedules(seed: int) -> None:
    assert walked(seed) & {"Checking", "Failed"}


def test_random_walks_reach_every_kind_of_end() -> None:
    ends = frozenset().union(*(walked(seed) for seed in range(12)))
    assert ends >= {"Succeeded", "Failed", "Suspended", "Retrying", "Training", "StartingTeachers"}
