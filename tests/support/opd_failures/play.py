"""Runs a failure on the world in memory, again and again until the job has ended or would go on for ever."""

from __future__ import annotations

from opd_world import World, final, job_document

from opd_failures.row import Failure, Shown, Step
from opd_operator.model import Diagnosis

ROUNDS = 8
WAIT_SECONDS = 60.0
#: Past every default deadline of one step.
PATIENCE_SECONDS = 4 * 3600.0
#: Conditions that tell of a failure beside Progressing and Failed.
CONDITIONS_OF_STEP = {
    Step.CHECK: "InputsChecked",
    Step.TEACHERS: "TeachersReady",
    Step.PROBE: "TeachersProbed",
    Step.TRAINING: "TeachersReady",
}


def play(failure: Failure) -> Shown:
    """Raises AssertionError when the job cannot be brought to the step of the failure."""
    world = World(job_document(**failure.job))
    reach(world, failure.step)
    start, diagnosis, seen, repeats = world.now, None, set[str](), -1
    conditions: tuple[str, ...] = ()
    quiet = False
    for round_ in range(ROUNDS):
        repeats += 1
        before = _state(world)
        failure.cause(world)
        if round_ == 0:
            conditions = _conditions(world, failure.step)
        diagnosis = _last_diagnosis(world) or diagnosis
        seen |= _reasons(world)
        quiet = not _moves_on(world, before)
        diagnosis = _last_diagnosis(world) or diagnosis
        seen |= _reasons(world)
        if quiet or world.phase == "Failed":
            break
        if round_ < ROUNDS - 1:
            reach(world, failure.step)
    return Shown(
        failure_class=diagnosis.failure_class if diagnosis else None,
        reason=diagnosis.reason if diagnosis else _told(world),
        hint=diagnosis.hint if diagnosis else "",
        conditions=conditions,
        reasons=frozenset(seen),
        attempts=len(world.status.get("attempts", [])),
        repeats=repeats,
        teacher_restarts=world.status.get("teacherRestarts", 0),
        failed=world.phase == "Failed",
        end=world.condition("Failed")["reason"] if world.phase == "Failed" else "",
        seconds=(world.now - start).total_seconds(),
        left=() if world.phase in ("Training", "Retrying") else _left(world),
    )


def reach(world: World, step: Step) -> None:
    """Play everybody well until the job stands at a step."""
    if step is Step.ACCEPT:
        return
    for _ in range(300):
        if _at(world, step):
            return
        _one_step_on(world)
    raise AssertionError(f"the job never comes to '{step}' but stays {world.phase}")


def _at(world: World, step: Step) -> bool:
    phase = {
        Step.CHECK: "Checking",
        Step.TEACHERS: "StartingTeachers",
        Step.PROBE: "ProbingTeachers",
        Step.STUDENT: "StartingStudent",
        Step.TRAINING: "Training",
    }[step]
    waits = world.status.get("nextAttemptTime") if step in (Step.CHECK, Step.PROBE) else None
    return bool(world.status) and world.phase == phase and not waits


def _one_step_on(world: World) -> None:
    attempt = world.status.get("attempt", 1)
    if not world.status or world.status.get("nextAttemptTime"):
        world.after(5)
    elif world.phase == "Checking":
        world.end_job("check", final())
        world.settle()
    elif world.phase == "StartingTeachers":
        for name in world.names("Deployment"):
            world.teacher_up(name.removeprefix("math-teacher-"))
        world.settle()
    elif world.phase == "ProbingTeachers":
        world.end_job("probe", final())
        world.settle()
    elif world.phase == "StartingStudent":
        world.ray_runs(attempt)
        world.settle()
        world.heartbeat(1, attempt=attempt)
        world.settle()
    else:
        world.after(5)


def _moves_on(world: World, before: tuple[object, ...]) -> bool:
    """Let time pass until the operator does something about it. False when it never does."""
    start = world.now
    while _state(world) == before:
        if (world.now - start).total_seconds() > PATIENCE_SECONDS:
            return False
        if _holds(world):
            # The trainer is alive; only what it waits for is away.
            world.heartbeat(1, attempt=world.status["attempt"], **_same_activity(world))
        world.after(WAIT_SECONDS)
    return True


def _state(world: World) -> tuple[object, ...]:
    status = world.status
    return (
        status.get("phase") == "Failed",
        status.get("retries"),
        status.get("teacherRestarts"),
        len([entry for entry in status.get("attempts", []) if entry.get("endTime")]),
    )


def _holds(world: World) -> bool:
    """True while a trainer reports that it is alive."""
    return world.phase == "Training"


def _same_activity(world: World) -> dict[str, object]:
    held = world.condition("Progressing")["reason"] == "TeacherUnavailable"
    return {"phase": "TeacherUnavailable", "activity": 7, "unavailableTeacher": "big"} if held else {}


def _last_diagnosis(world: World) -> Diagnosis | None:
    return next((made.diagnosis for made in reversed(world.plans) if made.diagnosis is not None), None)


def _told(world: World) -> str:
    """The reason where there is no diagnosis: what it waits for, or how the attempt ended."""
    ended = [entry for entry in world.status.get("attempts", []) if entry.get("endTime")]
    return str(ended[-1]["reason"] if ended else world.condition("Progressing")["reason"])


def _conditions(world: World, step: Step) -> tuple[str, ...]:
    names = ["Failed" if world.phase == "Failed" else "Progressing"]
    if (own := CONDITIONS_OF_STEP.get(step)) and world.condition(own)["status"] == "False":
        names.append(own)
    if world.condition("NameCollision")["status"] == "True":
        names.append("NameCollision")
    return tuple(f"{name}={(entry := world.condition(name))['status']} ({entry['reason']})" for name in names)


def _reasons(world: World) -> set[str]:
    found = {entry["reason"] for entry in world.status["conditions"]}
    return found | {entry["reason"] for entry in world.status.get("attempts", []) if entry.get("reason")}


def _left(world: World) -> tuple[str, ...]:
    """Deployments, RayJobs, unfinished Jobs and pods with accelerators."""
    jobs = [name for name in world.names("Job") if not world.get("Job", name).get("status")]
    return (
        *world.names("Deployment"),
        *world.names("Service"),
        *world.names("RayJob"),
        *jobs,
        *world.accelerator_pods(),
    )
