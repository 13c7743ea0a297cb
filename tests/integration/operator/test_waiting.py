"""`kubectl wait` as docs/argocd.md tells it, by the real kubectl on a real API server."""

from __future__ import annotations

import asyncio
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from operator_jobs import Job
from operator_player import Player

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "argocd.md").read_text(encoding="utf-8")
COMMANDS = dict(re.findall(r"^\| ([^|]+) \| `kubectl (wait [^`]+)` \|$", PAGE, re.MULTILINE))
#: Reached by a job that succeeds, in no order that matters: each is true at the end too.
ON_THE_WAY = (
    "inputs were checked, no accelerator is taken yet",
    "every teacher gave real scores",
    "there is a checkpoint to resume from",
    "success",
    "the end, whichever",
    "no pod of the job holds an accelerator",
)


class Waiting:
    """Runs commands of the page in a namespace, with a deadline for tests."""

    def __init__(self, control_plane: Any, job: Job) -> None:
        self._control_plane, self._job = control_plane, job
        # Of its own: waits for all of the loop's threads would keep the player and the API client from theirs.
        self._threads = ThreadPoolExecutor(len(COMMANDS))

    async def __call__(self, what: str) -> None:
        await self.run(COMMANDS[what])

    async def run(self, command: str) -> str:
        words = [word for word in shlex.split(command) if not word.startswith("--timeout")]
        deadline = ["--timeout=90s"] if words[0] == "wait" else []
        kubectl = self._control_plane.kubectl
        call = partial(kubectl, "-n", self._job.namespace, *words, *deadline)
        return str(await asyncio.get_running_loop().run_in_executor(self._threads, call))


@pytest.fixture
def waiting(control_plane: Any) -> Any:
    return lambda job: Waiting(control_plane, job)


async def test_a_job_can_be_waited_for_on_its_way_and_at_its_end(
    start_operator: Any, create_job: Any, player: Player, waiting: Any
) -> None:
    await start_operator()
    wait = waiting(await create_job())
    # All at once, before the operator has looked: a condition that is not there yet must not end a wait.
    await asyncio.gather(*(wait(what) for what in ON_THE_WAY))


async def test_the_student_and_the_end_of_a_suspension_can_be_waited_for(
    start_operator: Any, create_job: Any, player: Player, waiting: Any
) -> None:
    player.script.hold_at_step = 1
    await start_operator()
    job = await create_job()
    wait = waiting(job)
    await wait("the student trains")
    await job.patch({"suspend": True})
    await wait("a suspended job holds nothing")
    await wait("no pod of the job holds an accelerator")


async def test_a_failure_can_be_waited_for_and_names_its_reason(
    start_operator: Any, create_job: Any, player: Player, waiting: Any
) -> None:
    player.script.check = {"outcome": "Failed", "failureClass": "Data", "reason": "DataNotFound", "message": "no data"}
    await start_operator()
    wait = waiting(await create_job())
    await wait("failure")
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    first, second = (line.removeprefix("kubectl ") for line in block.strip().splitlines())
    await wait.run(first)
    assert await wait.run(second) == "Failed: DataNotFound"


async def test_a_refused_spec_can_be_waited_for(
    start_operator: Any, create_job: Any, player: Player, waiting: Any
) -> None:
    await start_operator()
    # A rule that the API server does not keep too.
    job = await create_job(distillation={"signal": "advantage", "tokenSelection": "teacher_topk", "topK": 16})
    await waiting(job)("a refused spec")


def test_every_command_of_the_page_is_run_here() -> None:
    apart = {"failure", "a refused spec", "the student trains", "a suspended job holds nothing"}
    assert set(COMMANDS) == {*ON_THE_WAY, *apart}
