"""The checker of `make chaos` can fail: hand-made records that break each invariant, beside one that breaks none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from opd_chaos.invariants import check
from opd_chaos.record import PATIENCE_SECONDS, Entry, Story

Manifest = dict[str, Any]
JOB = ("OPDJob", "math")
TEACHER = ("Deployment", "math-teacher-big")
FOREVER = ((0.0, 10_000.0),)


class Tape:
    """A record in the making: one second and one version for each change."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.at = 0.0
        self._uids = 0

    def put(self, kind: str, name: str, *, owner: tuple[str, str] | None = None, **parts: Any) -> Manifest:
        """Makes or changes an object; `labels` are ours, without their prefix."""
        change = "MODIFIED"
        if (kind, name) not in self.objects:
            change, self._uids = "ADDED", self._uids + 1
            metadata: Manifest = {"name": name, "namespace": "team", "uid": f"uid-{self._uids:04}", "generation": 1}
            if owner is not None:
                uid = self.objects[owner]["metadata"]["uid"]
                metadata["ownerReferences"] = [{"uid": uid, "kind": owner[0], "controller": True}]
            self.objects[kind, name] = {"kind": kind, "metadata": metadata, "status": {}}
        found = self.objects[kind, name]
        found["metadata"]["labels"] = {
            f"opd.dev/{key}": value for key, value in parts.pop("labels", {}).items()
        } or found["metadata"].get("labels", {})
        found["metadata"] |= parts.pop("metadata", {})
        found["status"] |= parts.pop("status", {})
        found |= parts
        self._write(change, found)
        return found

    def gone(self, kind: str, name: str) -> None:
        """Deletes an object."""
        self._write("DELETED", self.objects.pop((kind, name)))

    def wait(self, seconds: float) -> None:
        """Lets time pass."""
        self.at += seconds

    def _write(self, change: str, found: Manifest) -> None:
        self.at += 1.0
        self.entries.append(Entry(len(self.entries) + 1, self.at, change, copy.deepcopy(found), self.at))

    def story(self, **parts: Any) -> Story:
        """The finished record."""
        return Story(**{"name": "math", "entries": tuple(self.entries), "uptime": FOREVER, **parts})

    # --- the stages of a life ---

    def says(self, phase: str, **status: Any) -> Tape:
        """The operator writes the status."""
        known = {"phase": phase, "observedGeneration": self.objects[JOB]["metadata"]["generation"], "attempt": 1}
        self.put(*JOB, status=known | status)
        return self

    def record(self, number: int, end: str | None = None, reason: str = "x") -> Manifest:
        """The record of an attempt."""
        return {"number": number, "rayJobName": f"math-{number}"} | ({"endTime": end, "reason": reason} if end else {})

    def begun(self) -> Tape:
        spec = {"teachers": [{"name": "big", "replicas": 1}], "lifecycle": {"preemptionGraceSeconds": 10}}
        self.put(*JOB, spec=spec)
        return self.says("Checking")

    def checked(self, pod: str = "check-x") -> Tape:
        if ("Job", "math-check-inputs") not in self.objects:
            self.put("Job", "math-check-inputs", owner=JOB, labels={"role": "check"})
        self.put("Pod", pod, owner=("Job", "math-check-inputs"), labels={"role": "check"})
        self.put("Pod", pod, status={"phase": "Succeeded"})
        return self

    def teacher(self, *, ready: bool = True) -> Tape:
        self.put(*TEACHER, owner=JOB, labels={"role": "teacher", "teacher": "big"})
        self.put("ReplicaSet", "rs", owner=TEACHER)
        self.put("Pod", "teacher-x", owner=("ReplicaSet", "rs"), labels={"role": "teacher", "teacher": "big"})
        self.says("StartingTeachers")
        return self.teacher_ready() if ready else self

    def teacher_ready(self) -> Tape:
        self.put(*TEACHER, status={"readyReplicas": 1, "observedGeneration": 1})
        return self

    def probed(self, name: str = "math-probe-1", *, passed: bool = True) -> Tape:
        self.put("Job", name, owner=JOB, labels={"role": "probe"})
        if passed:
            self.put("Job", name, status={"conditions": [{"type": "Complete", "status": "True"}]})
        return self

    def student(self, number: int = 1, *records: Manifest) -> Tape:
        attempt = {"attempt": str(number)}
        name, cluster = f"math-{number}", ("RayCluster", f"math-{number}-c")
        self.put("RayJob", name, owner=JOB, labels=attempt | {"role": "head"})
        self.says("StartingStudent", attempt=number, attempts=[*records, self.record(number)])
        self.put(*cluster, owner=("RayJob", name), labels=attempt)
        self.put("Pod", f"head-{number}", owner=cluster, labels=attempt | {"role": "head"})
        return self

    def trains(self, step: int) -> Tape:
        return self.says("Training", training={"step": step}, attempt=self.objects[JOB]["status"]["attempt"])

    def student_gone(self, number: int = 1) -> Tape:
        for key in (("Pod", f"head-{number}"), ("RayCluster", f"math-{number}-c"), ("RayJob", f"math-{number}")):
            self.gone(*key)
        return self

    def teacher_gone(self) -> Tape:
        for key in (("Pod", "teacher-x"), ("ReplicaSet", "rs"), TEACHER):
            self.gone(*key)
        return self


def to_training() -> Tape:
    return Tape().begun().checked().teacher().probed().student().trains(1)


def happy() -> Tape:
    tape = to_training().trains(2)
    tape.says("Finishing").teacher_gone()
    tape.says("Succeeded", attempts=[tape.record(1, "12:00")], completionTime="12:00")
    return tape.student_gone()


def rules(tape: Tape, **parts: Any) -> set[str]:
    return {violation.rule for violation in check(tape.story(**parts))}


def test_a_happy_life_breaks_nothing() -> None:
    assert check(happy().story(calm=True)) == []


# --- the gate ---


def test_a_ray_job_without_a_teacher_breaks_the_gate() -> None:
    assert rules(Tape().begun().checked().student()) == {"gate"}


def test_a_ray_job_before_its_teacher_was_ready_breaks_the_gate() -> None:
    assert rules(Tape().begun().checked().teacher(ready=False).probed().student()) == {"gate"}


def test_a_ray_job_before_the_probe_passed_breaks_the_gate() -> None:
    assert rules(Tape().begun().checked().teacher().probed(passed=False).student()) == {"gate"}


def test_a_probe_before_the_teacher_was_ready_proves_nothing() -> None:
    assert rules(Tape().begun().checked().teacher(ready=False).probed().teacher_ready().student()) == {"gate"}


def test_a_probe_of_a_teacher_that_was_restarted_since_proves_nothing() -> None:
    tape = Tape().begun().checked().teacher().probed()
    tape.put(*TEACHER, metadata={"annotations": {"opd.dev/restart": "1"}})
    assert rules(tape.student()) == {"gate"}


def test_without_preflight_readiness_is_enough() -> None:
    tape = Tape().begun()
    tape.objects[JOB]["spec"]["preflight"] = {"enabled": False}
    assert rules(tape.says("Checking").teacher().student()) == set()


# --- attempts ---


def test_two_living_ray_jobs_are_one_too_many() -> None:
    tape = to_training()
    assert rules(tape.student(2, tape.record(1, "12:00"))) == {"one live attempt"}


def test_a_ray_job_beside_the_old_ones_pods_came_too_early() -> None:
    tape = to_training()
    tape.wait(60)
    tape.says("Retrying", attempts=[tape.record(1, "12:00")])
    tape.gone("RayJob", "math-1")
    assert rules(tape.student(2, tape.record(1, "12:00"))) == {"one live attempt"}


def test_old_pods_that_had_their_time_stop_nobody() -> None:
    tape = to_training()
    tape.says("Retrying", attempts=[tape.record(1, "12:00")])
    tape.gone("RayJob", "math-1")
    tape.wait(60)
    assert rules(tape.student(2, tape.record(1, "12:00"))) == set()


# --- doubles ---


def test_an_attempt_has_one_ray_job() -> None:
    tape = Tape().begun().checked().teacher().probed().student()
    twice = tape.student_gone().student()
    assert rules(twice) == {"nothing doubled"}
    first = next(entry.uid for entry in tape.entries if entry.kind == "RayJob")
    assert rules(twice, touched=frozenset({first})) == set(), "somebody else had deleted the first"


def test_a_teacher_is_made_once() -> None:
    tape = Tape().begun().checked().teacher().teacher_gone().teacher()
    assert rules(tape) == {"nothing doubled"}


def test_a_teacher_may_be_made_again_after_a_suspension() -> None:
    tape = Tape().begun().checked().teacher().teacher_gone()
    tape.put(*JOB, spec=tape.objects[JOB]["spec"] | {"suspend": True})
    assert rules(tape.teacher()) == set()


def test_the_input_check_passes_once() -> None:
    assert rules(Tape().begun().checked().checked("check-y")) == {"nothing doubled"}


def test_a_suspension_that_meets_the_end_of_a_check_costs_a_second_check() -> None:
    tape = Tape().begun().checked()
    tape.put(*JOB, spec=tape.objects[JOB]["spec"] | {"suspend": True})
    assert rules(tape.checked("check-y")) == set()


def test_a_start_is_told_once() -> None:
    tape = happy()
    uid = tape.entries[0].uid
    told = (uid, "AttemptStarted", "attempt 1 starts")
    assert rules(tape, events=(told,)) == set()
    assert rules(tape, events=(told, told)) == {"nothing doubled"}


# --- owners and ends ---


@pytest.mark.parametrize("role", ["teacher", "head", "worker"])
def test_a_pod_with_accelerators_and_no_job_above_it_is_an_orphan(role: str) -> None:
    tape = Tape().begun()
    tape.put("Pod", "stray", labels={"role": role})
    assert rules(tape) == {"owner"}


def test_an_owner_that_nobody_ever_saw_is_no_owner() -> None:
    tape = Tape().begun()
    stray = {"ownerReferences": [{"uid": "unknown", "kind": "RayCluster", "controller": True}]}
    tape.put("Pod", "stray", labels={"role": "head"}, metadata=stray)
    assert rules(tape) == {"owner"}


def test_nothing_is_made_for_a_job_that_has_ended() -> None:
    tape = happy()
    tape.put(*TEACHER, owner=JOB, labels={"role": "teacher", "teacher": "big"})
    assert "terminal" in rules(tape)


def test_a_job_that_has_ended_lets_its_teachers_go() -> None:
    tape = to_training()
    tape.says("Failed", attempts=[tape.record(1, "12:00")], completionTime="12:00").student_gone()
    tape.wait(PATIENCE_SECONDS + 5)
    tape.teacher_gone()
    assert rules(tape) == {"terminal"}
    assert rules(tape, uptime=((0.0, tape.at - PATIENCE_SECONDS - 10),)) == set(), "no operator lived in that time"


def test_a_job_to_which_nothing_happened_succeeds_in_its_first_attempt() -> None:
    tape = to_training()
    tape.says("Failed", attempts=[tape.record(1, "12:00")], completionTime="12:00").student_gone().teacher_gone()
    assert rules(tape) == set()
    assert rules(tape, calm=True) == {"calm"}


@pytest.mark.parametrize("condition", ["ResourcesReleased", "Suspended"])
def test_nobody_says_released_while_a_pod_holds_an_accelerator(condition: str) -> None:
    tape = to_training()
    tape.put("Pod", "head-1", spec={"nodeName": "node"})
    tape.wait(60)
    said = [{"type": condition, "status": "True", "lastTransitionTime": "12:00"}]
    held = copy.deepcopy(tape).says("Training", conditions=said)
    tape.put("Pod", "head-1", status={"phase": "Failed"})
    assert rules(held) == {"released"}
    assert rules(tape.says("Training", conditions=said)) == set()


@pytest.mark.parametrize(("counter", "limit"), [("retries", 3), ("teacherRestarts", 1)])
def test_there_are_no_more_retries_than_allowed(counter: str, limit: int) -> None:
    assert rules(to_training().says("Training", **{counter: limit})) == set()
    assert rules(to_training().says("Training", **{counter: limit + 1})) == {"limits"}


# --- what only goes forward ---


@pytest.mark.parametrize("counter", ["attempt", "retries", "teacherRestarts", "observedGeneration"])
def test_a_counter_never_goes_back(counter: str) -> None:
    tape = Tape().begun()
    tape.put(*JOB, metadata={"generation": 5})
    tape.says("Checking", **{counter: 3}).says("Checking", **{"observedGeneration": 3, counter: 2})
    assert "monotone" in rules(tape)


def test_a_step_never_goes_back_in_an_attempt() -> None:
    assert rules(to_training().trains(3).trains(2)) == {"monotone"}


def test_a_new_attempt_may_go_back_to_its_checkpoint() -> None:
    tape = to_training().trains(3)
    tape.says("Retrying", attempts=[tape.record(1, "12:00")]).student_gone()
    assert rules(tape.student(2, tape.record(1, "12:00")).trains(2)) == set()


@pytest.mark.parametrize("phase", ["StartingStudent", "Checking", "ProbingTeachers"])
def test_a_live_attempt_never_goes_back_to_an_earlier_phase(phase: str) -> None:
    assert rules(to_training().says(phase)) == {"monotone"}


def test_an_early_phase_never_comes_back() -> None:
    assert rules(Tape().begun().checked().teacher().says("Checking")) == {"monotone"}


@pytest.mark.parametrize("after", ["Training", "Failed", "Pending"])
def test_an_end_is_an_end(after: str) -> None:
    assert "monotone" in rules(happy().says(after))


@pytest.mark.parametrize("name", ["startTime", "completionTime"])
def test_start_and_end_have_one_time(name: str) -> None:
    assert rules(Tape().begun().says("Checking", **{name: "1"}).says("Checking", **{name: "2"})) == {"monotone"}


def test_the_record_of_an_attempt_stays_as_it_ended() -> None:
    tape = to_training()
    tape.says("Retrying", attempts=[tape.record(1, "12:00")])
    changed = copy.deepcopy(tape).says("Retrying", attempts=[tape.record(1, "12:01")])
    lost = copy.deepcopy(tape).says("Retrying", attempts=[])
    twice = copy.deepcopy(tape).says("Retrying", attempts=[tape.record(1, "12:00"), tape.record(1, "12:00")])
    assert [rules(found) for found in (tape, changed, lost, twice)] == [set(), *[{"monotone"}] * 3]


def test_two_attempts_never_live_in_the_status() -> None:
    tape = Tape().begun()
    tape.says("StartingStudent", attempts=[tape.record(1), tape.record(2)])
    assert rules(tape) == {"monotone"}


@pytest.mark.parametrize(
    "after",
    [
        [],
        [{"type": "Accepted", "status": "True", "lastTransitionTime": "11:59"}],
        [{"type": "Accepted", "status": "True", "lastTransitionTime": "12:01"}],
    ],
    ids=["gone", "back in time", "moved without a change"],
)
def test_a_condition_stays_and_its_time_moves_with_its_status(after: list[Manifest]) -> None:
    before = [{"type": "Accepted", "status": "True", "lastTransitionTime": "12:00"}]
    assert rules(Tape().begun().says("Checking", conditions=before).says("Checking", conditions=after)) == {"monotone"}


# --- observedGeneration ---


def test_an_observed_generation_is_never_ahead() -> None:
    assert rules(Tape().begun().says("Checking", observedGeneration=2)) == {"observedGeneration"}


def test_an_edit_is_seen_while_an_operator_lives() -> None:
    tape = Tape().begun()
    tape.put(*JOB, metadata={"generation": 2})
    tape.wait(PATIENCE_SECONDS + 5)
    tape.put(*JOB)
    assert rules(tape) == {"observedGeneration"}
    assert rules(tape, uptime=()) == set(), "nobody was there to see it"
