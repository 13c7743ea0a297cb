"""docs/argocd/health.lua on the status that the operator writes in every phase, in the Lua that Argo CD speaks (5.1).

The documents of docs/argocd/testdata come from here and have Argo CD's own test format; after a change of the status run with
OPD_UPDATE_GOLDEN=1 and review the difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa import lua51
from opd_failures import faults
from opd_world import World, job_document

from opd_api.vocabulary import Phase
from opd_operator.model import Manifest

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "argocd"
UPDATE = bool(os.environ.get("OPD_UPDATE_GOLDEN"))


def pending() -> World:
    world = World().probed()
    faults.student_unscheduled(world)
    return world.after(601)


def finishing() -> World:
    world = World().training(10)
    world.heartbeat(10, phase="Exporting")
    return world.settle()


def retrying() -> World:
    world = World().training()
    faults.head_gone(world)
    return world


def suspending() -> World:
    return World().training().edit(suspend=True).settle()


def succeeded() -> World:
    world = World().training(10)
    world.final()
    world.ray(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    return world.settle()


def failed() -> World:
    world = World().settle()
    faults.step_says("check", "Data", "DataNotFound")(world)
    return world


def unseen() -> World:
    return World()


def changed() -> World:
    return World().training().edit(lifecycle={"ttlSecondsAfterFinished": 60})


CASES: dict[str, tuple[Callable[[], World], str, str]] = {
    "Pending": (pending, "Progressing", "Pending, waits (CapacityReleased): attempt 2 waits for the back-off"),
    "Checking": (lambda: World().settle(), "Progressing", "Checking"),
    "StartingTeachers": (lambda: World().checked(), "Progressing", "StartingTeachers"),
    "ProbingTeachers": (lambda: World().ready(), "Progressing", "ProbingTeachers"),
    "StartingStudent": (lambda: World().probed(), "Progressing", "StartingStudent"),
    "Training": (lambda: World().training(3), "Progressing", "Training, step 3/10"),
    "Finishing": (finishing, "Progressing", "Finishing, step 10/10"),
    "Retrying": (retrying, "Progressing", "Retrying, step 1/10, waits (BackOff): attempt 2 waits for the back-off"),
    "Suspending": (suspending, "Progressing", "Suspending, step 1/10, waits (SuspendRequested): the trainer saves"),
    "Suspended": (lambda: World(job_document(suspend=True)).settle(), "Suspended", "spec.suspend is true"),
    "Succeeded": (succeeded, "Healthy", "the distilled student is there"),
    "Failed": (failed, "Degraded", "DataNotFound: DataNotFound and the remedy"),
    "unseen": (unseen, "Progressing", "the operator has not seen the job yet"),
    "changed": (changed, "Progressing", "the operator has not seen the last change"),
}


def health(document: Manifest) -> dict[str, str]:
    """What the script says, run as Argo CD runs it: the object is the global `obj`, the result is what it returns."""
    lua = lua51.LuaRuntime(unpack_returned_tuples=True, register_eval=False)
    lua.globals().obj = lua.table_from(document, recursive=True)
    for library in ("os", "io", "require", "package", "dofile", "loadfile"):
        lua.globals()[library] = None
    answer: Any = lua.execute((FOLDER / "health.lua").read_text(encoding="utf-8"))
    return dict(answer.items())


@pytest.mark.parametrize("name", CASES)
def test_the_health_of_a_job_follows_from_its_status(name: str) -> None:
    make, status, message = CASES[name]
    world = make()
    if name in set(Phase):
        assert world.phase == name
    said = health(world.job)
    assert said["status"] == status
    assert said["message"].startswith(message)
    path = FOLDER / "testdata" / f"{name.lower()}.yaml"
    text = yaml.safe_dump(world.job, sort_keys=False, allow_unicode=True, width=140)
    if UPDATE:
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "the documents in docs/argocd are of an older operator"


def test_every_phase_has_a_case() -> None:
    assert set(Phase) <= set(CASES)


def test_argo_cds_own_test_says_the_same() -> None:
    """health_test.yaml can be put beside the script into Argo CD's resource_customizations and run there."""
    tests = []
    for name, (make, _, _) in CASES.items():
        said = health(make().job)
        status = {"status": said["status"], "message": said["message"]}
        tests.append({"healthStatus": status, "inputPath": f"testdata/{name.lower()}.yaml"})
    path = FOLDER / "health_test.yaml"
    text = yaml.safe_dump({"tests": tests}, sort_keys=False, allow_unicode=True, width=140)
    if UPDATE:
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_a_status_without_conditions_is_no_error() -> None:
    said = health({"metadata": {"generation": 1}, "status": {"phase": "Checking"}})
    assert said == {"status": "Progressing", "message": "Checking"}
