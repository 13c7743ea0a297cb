"""`opd-trainer probe`: every replica of every teacher gives real, repeatable scores before the student is started.

Each replica scores the same sequences twice one after the other and once all at the same time. Compared are the repeats,
and the replicas with each other.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import orjson
from numpy.typing import NDArray

from opd_api.trainer_config import TrainerConfig
from opd_api.v1alpha1 import TeacherBackend
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError
from opd_trainer.preflight.probe_sequences import Sequences, full_length_query, probe_queries, read_sequences
from opd_trainer.preflight.report import Found, Report, error, finish, of_exception, read_config
from opd_trainer.teachers.client import TeacherClient
from opd_trainer.teachers.faults import Fault, FaultKind
from opd_trainer.teachers.pool import TeacherPool
from opd_trainer.teachers.replicas import Replica
from opd_trainer.teachers.wire import ScoreQuery

#: How long a replica may be unreachable at the start of the probe, in seconds; readiness was seen before.
REACH_SECONDS = 60.0
#: Log-probabilities that vary less than this, in nats, around −ln V are uniform.
UNIFORM_NATS = 1e-3
#: Of logs with text: how many tokens make the check for uniformity meaningful without knowing V.
UNIFORM_TOKENS = 16


@dataclass(slots=True)
class ReplicaScores:
    """What one replica said: a list of [R] arrays per round."""

    url: str
    rounds: list[list[NDArray[np.float32]]] = field(default_factory=list)
    seconds: float = 0.0


def run_probe(config_path: str, *, termination_log: str | None = None) -> int:
    """Probe every teacher, write the final document, return the exit code."""
    report = Report("teacher probe")
    attempt = 1
    try:
        config = read_config(config_path)
        attempt = config.run.attempt
        asyncio.run(probe_teachers(config, report))
    except TrainerError as problem:
        report.add([of_exception(problem, config_path)])
    return finish(report, attempt, termination_log)


async def probe_teachers(config: TrainerConfig, report: Report) -> None:
    """All teachers at once; findings go into the report."""
    pool = TeacherPool(config)
    await pool.start()
    try:
        sequences = await asyncio.to_thread(read_sequences, config) if pool.clients else []
        found = await asyncio.gather(
            *(_probe_teacher(config, client, sequences, report) for client in pool.clients.values())
        )
    finally:
        await pool.stop()
    for findings in found:
        report.add(findings)
    inprocess = [teacher.name for teacher in config.teachers if teacher.backend is TeacherBackend.INPROCESS]
    if inprocess:
        report.say(f"            {', '.join(inprocess)}: in process, nothing to probe")


async def _probe_teacher(
    config: TrainerConfig, client: TeacherClient, sequences: Sequences, report: Report
) -> list[Found]:
    path = _path(config, client)
    if not client.replicas:
        return [_bad(Reason.TEACHER_UNREACHABLE, path, f"{', '.join(client.address.urls)} does not resolve", client)]
    found: list[Found] = []
    scores: list[ReplicaScores] = []
    for replica in client.replicas:
        try:
            scores.append(await _probe_replica(config, client, replica, sequences))
        except Fault as fault:
            found.append(_of_fault(fault, path, replica.endpoint.url, client))
    for item in scores:
        found += judge_replica(config, client, item, path)
        values = np.concatenate(item.rounds[0])
        report.say(
            f"            {client.name} {item.url}: {len(values)} tokens scored 3 times in {item.seconds:.1f} s,"
            f" mean log-probability {values.mean():.3f}"
        )
    return found + compare_replicas(config, client, scores, path)


async def _probe_replica(
    config: TrainerConfig, client: TeacherClient, replica: Replica, sequences: Sequences
) -> ReplicaScores:
    """Raises Fault with what is wrong."""
    queries = probe_queries(config, sequences, client.facts.vocabulary)
    await _reach(client, replica)
    await _check_served(client, replica)
    scores, started = ReplicaScores(replica.endpoint.url), time.monotonic()
    for _ in range(2):
        scores.rounds.append([(await client.score_at(replica, query)).sampled for query in queries])
    together = await asyncio.gather(*(client.score_at(replica, query) for query in queries))
    scores.rounds.append([answer.sampled for answer in together])
    scores.seconds = time.monotonic() - started
    if config.preflight.check_context_length:
        await _check_context(client, replica, full_length_query(config, sequences, client.facts.vocabulary))
    return scores


async def _reach(client: TeacherClient, replica: Replica) -> None:
    deadline = time.monotonic() + REACH_SECONDS
    while True:
        try:
            status, _ = await client.request("GET", replica.endpoint, "/health", seconds=30.0)
        except Fault as fault:
            if fault.kind is FaultKind.TEACHER or time.monotonic() > deadline:
                raise
        else:
            if status < 500:
                return
            if time.monotonic() > deadline:
                raise Fault(FaultKind.UNREACHABLE, f"/health answers {status}")
        await asyncio.sleep(1.0)


async def _check_served(client: TeacherClient, replica: Replica) -> None:
    """The server's own model list must hold the id that the job expects."""
    wanted = client.address.served_model
    if wanted is None:
        return
    status, data = await client.request("GET", replica.endpoint, "/v1/models", seconds=30.0)
    if status in (401, 403):
        raise Fault(FaultKind.TEACHER, f"the API key is refused ({status})")
    document = orjson.loads(data) if status == 200 else {}
    served = [str(item.get("id")) for item in document.get("data", []) if isinstance(item, dict)]
    if wanted not in served:
        raise Fault(FaultKind.TEACHER, f"it serves {', '.join(served) or 'nothing that it names'} instead of {wanted}")


async def _check_context(client: TeacherClient, replica: Replica, query: ScoreQuery) -> None:
    try:
        await client.score_at(replica, query)
    except Fault as fault:
        if fault.kind is not FaultKind.DATA:
            raise
        message = f"a sequence of {query.tokens} tokens is refused: {fault}"
        raise Fault(FaultKind.TEACHER, message, Reason.CONTEXT_TOO_SHORT) from None


def judge_replica(config: TrainerConfig, client: TeacherClient, scores: ReplicaScores, path: str) -> list[Found]:
    """Uniform output and differences between the rounds of one replica."""
    first = np.concatenate(scores.rounds[0])
    if _uniform(first, client.facts.vocabulary):
        message = (
            f"{scores.url} gives every token the same log-probability {first.mean():.3f}: its weights are not loaded"
        )
        return [_bad(Reason.TEACHER_UNIFORM, path, message, client)]
    for repeat, how in ((1, "one after the other"), (2, "at the same time")):
        if text := _difference(config, first, np.concatenate(scores.rounds[repeat])):
            message = f"two scores of one sequence {how} at {scores.url} differ by {text}"
            return [_bad(Reason.TEACHER_NOT_DETERMINISTIC, path, message, client)]
    return []


def compare_replicas(
    config: TrainerConfig, client: TeacherClient, scores: Sequence[ReplicaScores], path: str
) -> list[Found]:
    """Replicas of one teacher must agree."""
    found = []
    for other in scores[1:]:
        text = _difference(config, np.concatenate(scores[0].rounds[0]), np.concatenate(other.rounds[0]))
        if text:
            message = f"{scores[0].url} and {other.url} differ by {text}: do they serve the same weights?"
            found.append(_bad(Reason.TEACHER_NOT_DETERMINISTIC, path, message, client))
    return found


def _uniform(values: NDArray[np.float32], vocabulary: int | None) -> bool:
    if float(np.ptp(values)) > UNIFORM_NATS or len(values) < UNIFORM_TOKENS:
        return False
    # Vocabularies are padded, so the constant may be −ln of a slightly smaller number than the rows that are known.
    return vocabulary is None or abs(float(values.mean()) + math.log(vocabulary)) < 0.1


def _difference(config: TrainerConfig, one: NDArray[np.float32], two: NDArray[np.float32]) -> str | None:
    """Text when the two limits of `preflight` are broken."""
    gaps = np.abs(one - two)
    mean, p99 = float(gaps.mean()), float(np.quantile(gaps, 0.99))
    limits = config.preflight
    if mean <= limits.max_mean_diff_nats and p99 <= limits.max_p99_diff_nats:
        return None
    return (
        f"{mean:.3g} nats on average and {p99:.3g} at the 99th percentile"
        f" (limits {limits.max_mean_diff_nats:g} and {limits.max_p99_diff_nats:g})"
    )


def _path(config: TrainerConfig, client: TeacherClient) -> str:
    index = [teacher.name for teacher in config.teachers].index(client.name)
    return f"spec.teachers[{index}]"


def _of_fault(fault: Fault, path: str, url: str, client: TeacherClient) -> Found:
    unreachable = fault.kind in (FaultKind.UNREACHABLE, FaultKind.CUT)
    reason = Reason.TEACHER_UNREACHABLE if unreachable else fault.reason
    return _bad(reason, path, f"{url}: {fault}", client)


def _bad(reason: Reason, path: str, message: str, client: TeacherClient) -> Found:
    return error(reason, path, message, failure_class=FailureClass.TEACHER, teacher=client.name)
