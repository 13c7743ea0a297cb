"""What a live operator answers to a failure: on a real API server, or on a real cluster."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from operator_jobs import Job, eventually

from opd_api.vocabulary import Reason
from opd_failures.play import play
from opd_failures.row import Failure, Step, Then

Manifest = dict[str, Any]
#: Where `make matrix` wants what was seen; without it nobody writes anything.
RESULTS = "OPD_MATRIX_RESULTS"
#: Steps at which a failure is done to a job that stands there; others are there from the start.
PHASE = {Step.STUDENT: "StartingStudent", Step.TRAINING: "Training"}
#: What the table's answer leads to when the fault happens once and no retries are allowed.
ENDS_FAILED = {Then.FAILS, Then.RETRIES, Then.RETRIES_STEP, Then.WAITS}
#: Conditions that tell a person what is wrong.
TELLING = ("Accepted", "InputsChecked", "TeachersReady", "TeachersProbed", "Progressing", "NameCollision", "Failed")
#: What Kubernetes appends to names.
RANDOM_PART = re.compile(r"(?<=[a-z0-9])-(?:[a-f0-9]{8,10}-)?[bcdfghjklmnpqrstvwxz2456789]{5}(?![a-z0-9])")
MESSAGE_LIMIT = 300


@dataclass(frozen=True)
class Seen:
    """One failure as it was seen."""

    id: str
    #: "cluster" or "API server".
    where: str
    test: str
    #: Of the first attempt; None where no attempt had begun, because the status names a class with attempts only.
    failure_class: str | None
    #: Of the first attempt, else of the end.
    reason: str
    #: Conditions that told of it, `type=status (reason)`.
    told: tuple[str, ...]
    message: str
    #: The table's hint when it was among the words that were told.
    hint: str
    attempts: int
    teacher_restarts: int
    #: "Failed (reason)", "Succeeded", or "goes on".
    end: str
    #: What was there after the end or the release.
    left: tuple[str, ...]


async def follow(failure: Failure, job: Job, *, heal: Callable[[], None], seconds: float, to_the_end: bool = True) -> None:  # fmt: skip
    """Wait for the answer: the end of attempt 1, then, after `heal` has put everything right, the end of the job. Without
    `to_the_end` a job that was released or that may go on is left at that."""
    if failure.step in PHASE and failure.then is not Then.WAITS:
        await eventually("attempt 1 has ended", lambda: first_end(job), seconds=seconds, state=job.status)
        heal()
        if not to_the_end and failure.then is Then.RELEASES:
            return
    await job.reaches("Failed", "Succeeded", seconds=seconds)


async def first_end(job: Job) -> Any:
    attempts = (await job.status()).get("attempts") or []
    return next((entry for entry in attempts if entry["number"] == 1 and entry.get("endTime")), None)


async def left_of(job: Job) -> list[str]:
    """Deployments, Services, RayJobs, RayClusters, unfinished Jobs and pods with accelerators of a job."""
    kinds = [("apps/v1", "Deployment"), ("v1", "Service"), ("ray.io/v1", "RayJob"), ("ray.io/v1", "RayCluster")]
    left = [f"{kind} {name}" for version, kind in kinds for name in sorted(await job.names(version, kind))]
    for found in await job.children("batch/v1", "Job"):
        ended = any(entry["type"] in ("Complete", "Failed") for entry in found.get("status", {}).get("conditions", []))
        if not ended and not found["metadata"].get("deletionTimestamp"):
            left.append(f"Job {found['metadata']['name']}")
    for pod in await job.children("v1", "Pod"):
        if pod["metadata"]["labels"]["opd.dev/role"] in ("teacher", "head", "worker"):
            left.append(f"Pod {pod['metadata']['name']}")
    return left


async def wait_until_free(job: Job, seconds: float) -> None:
    """Wait until nothing is left, and until the status of an ended job says so too."""

    async def free() -> bool:
        ended = await job.phase() in ("Failed", "Succeeded")
        released = (await job.condition("ResourcesReleased")).get("status") == "True"
        return not await left_of(job) and (released or not ended)

    await eventually("everything is freed", free, seconds=seconds, state=lambda: left_of(job))


async def seen(failure: Failure, job: Job, where: str, test: str) -> Seen:
    """What there is to see of an answered failure. Also kept for `make matrix`."""
    status = await job.status()
    first = await first_end(job) or {}
    phase = status.get("phase", "")
    failed = await job.condition("Failed")
    reason = first.get("reason") or failed.get("reason", "")
    words = [*job.told.values(), *(entry.get("message") or "" for entry in status.get("attempts") or [])]
    hint = hint_of(failure, job.name)
    message = first.get("message") or failed.get("message", "")
    found = Seen(
        id=failure.id,
        where=where,
        test=test,
        failure_class=first.get("failureClass"),
        reason=reason,
        told=_telling(job.told, failure, reason),
        message=_plain(message, job, hint),
        hint=hint if any(hint in text for text in words) else "",
        attempts=len(status.get("attempts") or []),
        teacher_restarts=status.get("teacherRestarts", 0),
        end=f"Failed ({failed.get('reason')})" if phase == "Failed" else phase if phase == "Succeeded" else "goes on",
        left=tuple(await left_of(job)),
    )
    if folder := os.environ.get(RESULTS):
        (Path(folder) / f"{where.replace(' ', '-')}.{failure.id}.json").write_text(json.dumps(asdict(found)))
    return found


def hint_of(failure: Failure, job: str) -> str:
    """The hint that the plan gives (its job is called math), for a job of another name."""
    return play(failure).hint.replace("Job math-", f"Job {job}-")


def differences(failure: Failure, shown: Seen) -> list[str]:
    """How what was seen differs from what the table says; empty when it does not. Without retries (backoffLimit 0)."""
    begun, released = failure.step in PHASE, failure.then is Then.RELEASES
    goes_on = begun and failure.then not in ENDS_FAILED
    ends = {"Succeeded", "goes on"} if released else {"Succeeded"}
    if not goes_on:
        ends = {f"Failed ({Reason.BACKOFF_LIMIT_EXCEEDED if failure.then is Then.RETRIES else failure.reason})"}
    attempts = {1, 2} if released else {2 if goes_on else int(begun)}
    restarted = int(failure.then is Then.RESTARTS)
    wanted_class = failure.failure_class.value if failure.failure_class else None
    checks = (
        ("reason", shown.reason, {Reason.CAPACITY_RELEASED.value if released else failure.reason.value}),
        ("class", shown.failure_class, {wanted_class if begun else None}),
        ("end", shown.end, ends),
        ("attempts", shown.attempts, attempts),
        ("teacher restarts", shown.teacher_restarts, {restarted}),
        ("hint", shown.hint, {hint_of(failure, shown.id)}),
        ("left", shown.left, {()}),
    )
    wrong = [
        f"{what}: {value!r} instead of {sorted(map(str, good))}" for what, value, good in checks if value not in good
    ]
    return wrong if shown.message or failure.then is Then.NOT_COUNTED else [*wrong, "no message"]


def _telling(told: dict[str, str], failure: Failure, reason: str) -> tuple[str, ...]:
    """Conditions about this failure: by their reason, or because their message names it."""
    names = {failure.reason.value, reason}
    return tuple(
        text
        for text, message in told.items()
        if text.split("=")[0] in TELLING
        and (any(f"({name})" in text or f": {name}:" in message for name in names) or text.startswith("Failed=True"))
    )


def _plain(message: str, job: Job, hint: str) -> str:
    """A message without its hint and without what differs in every run."""
    words = message.removesuffix(hint).replace(job.namespace, "NAMESPACE")
    words = re.sub(rf"{job.name}-[0-9a-f]{{8}}(?![0-9a-f])", f"{job.name}-UID", words)
    words = RANDOM_PART.sub("-…", words).strip()
    return words if len(words) <= MESSAGE_LIMIT else f"{words[: MESSAGE_LIMIT - 1]}…"
