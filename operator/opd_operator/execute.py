"""Carries out a Plan: doubt, delete, rehearse, secrets, create, apply, annotate, status, events, in this order.

Each write is safe to repeat and safe to lose: names are deterministic, deletes name a UID, the status names the version it
was computed from. A version in which only somebody's annotations differ counts as the same: otherwise a busy writer of the
OPDJob could keep its status from ever being written. A refusal is told to the next pass; a fault that outlives its retries
ends the pass.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import Any

from opd_api.vocabulary import Annotation, Reason
from opd_operator.cache import Cache, JobKey, trim
from opd_operator.cluster import Cluster
from opd_operator.errors import ApiError, Unreachable
from opd_operator.metrics import Metrics
from opd_operator.model import Kind, Manifest, ObjectRef, Unwritten, WriteProblem, WriteProblemKind
from opd_operator.planned import Deletion, EventType, Plan, PlannedEvent, Rehearsal, SecretRequest, StopRequest
from opd_operator.recorder import Recorder
from opd_operator.resources import CHILDREN, OPDJOB, OPDJOB_API_VERSION, OPDJOB_KIND, RESOURCES, resource_of
from opd_operator.smaller_status import essentials, missing, without_named

log = logging.getLogger(__name__)

_CACHED = frozenset(CHILDREN.values())
#: Conflicts with writers of other fields that one status write answers by itself; more of them are a new pass.
STATUS_CONFLICTS = 10


class Outcome(StrEnum):
    """How a pass ended; the label of opd_operator_reconcile_seconds."""

    UNCHANGED = "unchanged"
    CHANGED = "changed"
    #: At least one write was refused; the next pass is told.
    REFUSED = "refused"
    #: The cache was behind: nothing after that was done, and the pass is made again at once.
    STALE = "stale"
    #: The OPDJob does not exist any more.
    GONE = "gone"
    ERROR = "error"


class _Stale(Exception):
    """The OPDJob has changed since the cache saw it."""


class _Gone(Exception):
    """The OPDJob does not exist any more."""


@dataclass
class Execution:
    """What became of a plan."""

    outcome: Outcome = Outcome.UNCHANGED
    writes: int = 0
    problems: list[WriteProblem] = field(default_factory=list)
    namespace_terminating: bool = False
    #: The children were tried, and all would be taken.
    rehearsed: bool = False
    #: The status, when not all of it was taken.
    unwritten: Unwritten | None = None

    @property
    def may_create(self) -> bool:
        """False after a refusal, and in a namespace that is going away."""
        return not self.problems and not self.namespace_terminating


class Executor:
    """Executes plans of one job at a time."""

    def __init__(self, *, cluster: Cluster, cache: Cache, recorder: Recorder, metrics: Metrics) -> None:
        self._cluster = cluster
        self._cache = cache
        self._recorder = recorder
        self._metrics = metrics

    async def execute(self, job: Manifest, plan: Plan) -> Execution:
        """Raises: ApiError, Unreachable, NotLeader when the pass must be made again later."""
        done = Execution()
        try:
            await asyncio.gather(*(self._make_sure(job, ref) for ref in plan.doubt))
            if plan.secrets or plan.create or plan.apply:
                await self._confirm(job)
            for deletion in plan.delete:
                await self._delete(job, deletion, done)
            await self._rehearse(plan, done)
            await self._bring_into_being(job, plan, done)
            for stop in plan.annotate:
                await self._annotate(stop, done)
            if plan.status is not None:
                await self._write_status(job, plan.status, done)
        except _Stale:
            done.outcome = Outcome.STALE
            return done
        except _Gone:
            self._cache.remove(OPDJOB, job)
            done.outcome = Outcome.GONE
            return done
        for event in plan.events:
            await self._recorder.record(job, event)
        if done.problems:
            done.outcome = Outcome.REFUSED
        elif done.writes:
            done.outcome = Outcome.CHANGED
        return done

    async def _rehearse(self, plan: Plan, done: Execution) -> None:
        """Try the children. What only the moment refuses (a quota, a kind that is not installed yet) is no answer about them."""
        await asyncio.gather(*(self._try(rehearsal, done) for rehearsal in plan.rehearse))
        done.rehearsed = bool(plan.rehearse) and done.may_create

    async def _try(self, rehearsal: Rehearsal, done: Execution) -> None:
        try:
            await self._cluster.create(rehearsal.manifest, dry_run=True)
        except ApiError as error:
            momentary = error.already_exists or error.code == 404 or error.no_dry_run
            if not (momentary or error.problem is WriteProblemKind.QUOTA):
                self._refused(rehearsal.ref, error, done)

    async def _bring_into_being(self, job: Manifest, plan: Plan, done: Execution) -> None:
        """What is listed later may need what is listed before it (a RayJob its ConfigMaps and rights, a teacher its Service
        and NetworkPolicy), so the first refusal ends the making of objects in this pass."""
        for request in plan.secrets:
            if done.may_create:
                await self._create_secret(request, done)
        for manifest in plan.create:
            if done.may_create:
                await self._create(job, manifest, done)
        for manifest in plan.apply:
            if done.may_create:
                await self._apply(job, manifest, done)

    async def _make_sure(self, job: Manifest, ref: ObjectRef) -> None:
        """Whatever the cache has not heard of this object voids the plan."""
        resource = RESOURCES[ref.api_version, ref.kind]
        family = self._cache.children(_key(job), Kind(ref.kind))
        known = next((child for child in family if child["metadata"]["name"] == ref.name), None)
        live = await self._cluster.get(resource, ref.namespace, ref.name)
        if live is None:
            if known is not None:
                self._cache.remove(resource, known)
                raise _Stale
        elif self._cache.put(resource, trim(resource, live)) is not None:
            raise _Stale

    async def _confirm(self, job: Manifest) -> None:
        """Nothing is created for an OPDJob that is gone or that has changed since the decision."""
        if _basis(await self._refresh(job)) != _basis(job):
            raise _Stale

    async def _delete(self, job: Manifest, deletion: Deletion, done: Execution) -> None:
        try:
            answer = await self._cluster.delete(deletion)
        except ApiError as error:
            self._refused(deletion.ref, error, done)
            return
        if answer is None:
            self._cache.forget(_key(job), deletion.ref, deletion.uid)
            return
        done.writes += 1
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._cache.mark_deleting(_key(job), deletion.ref, deletion.uid, at)

    async def _create_secret(self, request: SecretRequest, done: Execution) -> None:
        manifest = {**request.manifest, "stringData": {key: secrets.token_urlsafe(32) for key in request.keys}}
        try:
            await self._cluster.create(manifest)
            done.writes += 1
        except ApiError as error:
            if not error.already_exists:  # the UID in its name makes that a proof that it is ours
                self._refused(ObjectRef.of(manifest), error, done)

    async def _create(self, job: Manifest, manifest: Manifest, done: Execution) -> None:
        try:
            self._take(await self._cluster.create(manifest))
            done.writes += 1
        except ApiError as error:
            if error.already_exists:
                await self._prove(job, manifest, done)
            else:
                self._refused(ObjectRef.of(manifest), error, done)

    async def _prove(self, job: Manifest, manifest: Manifest, done: Execution) -> None:
        """AlreadyExists is success when the existing object names our OPDJob as its owner."""
        existing = await self._existing(manifest)
        if existing is None:
            raise Unreachable(f"{manifest['kind']} {manifest['metadata']['name']} existed and vanished; will try again")
        problem = ownership_problem(job, existing)
        if problem is not None:
            done.problems.append(problem)
        else:
            self._take(existing)

    async def _apply(self, job: Manifest, manifest: Manifest, done: Execution) -> None:
        try:
            existing = await self._existing(manifest)
            if existing is not None:
                problem = ownership_problem(job, existing)
                if problem is not None:
                    done.problems.append(problem)
                    return
                metadata = {**manifest["metadata"], "uid": existing["metadata"]["uid"]}
                manifest = {**manifest, "metadata": metadata}
            self._take(await self._cluster.apply(manifest))
            done.writes += 1
        except ApiError as error:
            self._refused(ObjectRef.of(manifest), error, done)

    async def _annotate(self, stop: StopRequest, done: Execution) -> None:
        patch: Manifest = {"metadata": {"annotations": {Annotation.STOP.value: str(stop.attempt)}}}
        try:
            self._take(await self._cluster.merge_patch(stop.config_map, patch))
            done.writes += 1
        except ApiError as error:
            if error.code != 404:  # without the ConfigMap there is nobody to ask
                self._refused(stop.config_map, error, done)

    async def _write_status(self, job: Manifest, status: Manifest, done: Execution) -> None:
        current: Manifest = job.get("status") or {}
        try:
            await self._store(job, current, status, done)
        except ApiError as error:
            if error.problem is None:
                raise
            await self._write_less(job, current, status, error, done)

    async def _write_less(
        self, job: Manifest, current: Manifest, status: Manifest, error: ApiError, done: Execution
    ) -> None:
        """The status was refused: store the most of it that is taken, keep the whole for the next pass, and say so."""
        why, stored, left_out = error.message, current, ["everything"]
        for smaller in (without_named, partial(essentials, why=why), partial(essentials, why=why, without_named=True)):
            try:
                stored = await self._store(job, current, smaller(status, error.fields), done)
                left_out = missing(status, stored)
                break
            except ApiError as again:
                if again.problem is None:
                    raise
                error = again
        done.unwritten = Unwritten(stored, status)
        message = f"the API server refuses the status: {why} Left out: {', '.join(left_out)}. The job goes on."
        log.warning("status refused", extra={"why": why, "leftOut": left_out})
        await self._recorder.record(job, PlannedEvent(EventType.WARNING, Reason.STATUS_REFUSED, message))

    async def _store(self, job: Manifest, current: Manifest, status: Manifest, done: Execution) -> Manifest:
        """Write what differs; the status that is stored then."""
        difference = merge_difference(current, status)
        if not difference:
            return current
        answer = await self._patch_status(job, difference)
        trimmed = trim(OPDJOB, answer)
        self._cache.put(OPDJOB, trimmed)
        done.writes += 1
        for failure_class in ended_attempts(current, status):
            self._metrics.attempts.labels(failure_class).inc()
        stored: Manifest = trimmed.get("status") or {}
        return stored

    async def _patch_status(self, job: Manifest, difference: Manifest) -> Manifest:
        """Patches the very version that the decision was made from, or one that differs from it in nothing that counts."""
        metadata = job["metadata"]
        ref = ObjectRef(OPDJOB_API_VERSION, OPDJOB_KIND, metadata["namespace"], metadata["name"])
        version = metadata["resourceVersion"]
        for _ in range(STATUS_CONFLICTS):
            precondition = {"resourceVersion": version, "uid": metadata["uid"]}
            patch = {"metadata": precondition, "status": difference}
            try:
                return await self._cluster.merge_patch(ref, patch, subresource="status")
            except ApiError as error:
                if error.code == 404:
                    raise _Gone from error
                if not error.conflict:
                    raise
            fresh = await self._refresh(job)
            if _basis(fresh) != _basis(job):
                raise _Stale
            version = fresh["metadata"]["resourceVersion"]
        raise _Stale

    async def _refresh(self, job: Manifest) -> Manifest:
        metadata = job["metadata"]
        fresh = await self._cluster.get(OPDJOB, metadata["namespace"], metadata["name"])
        if fresh is None or fresh["metadata"]["uid"] != metadata["uid"]:
            raise _Gone
        trimmed = trim(OPDJOB, fresh)
        self._cache.put(OPDJOB, trimmed)
        return trimmed

    async def _existing(self, manifest: Manifest) -> Manifest | None:
        resource = resource_of(manifest["apiVersion"], manifest["kind"])
        return await self._cluster.get(resource, manifest["metadata"]["namespace"], manifest["metadata"]["name"])

    def _take(self, answer: Manifest) -> None:
        """What we wrote is known before the watch tells, so that the next pass does not write it again."""
        resource = resource_of(answer["apiVersion"], answer["kind"])
        if resource in _CACHED:
            self._cache.put(resource, trim(resource, answer))

    def _refused(self, ref: ObjectRef, error: ApiError, done: Execution) -> None:
        """Turns a refusal into a value; raises the error when trying again may help."""
        if error.namespace_terminating:
            done.namespace_terminating = True
            return
        kind = error.problem
        if kind is None:
            raise error
        message = error.message
        if error.code == 404:
            message = f"the cluster does not serve {ref.kind} ({ref.api_version})"
        done.problems.append(WriteProblem(ref, kind, message))


def ownership_problem(job: Manifest, existing: Manifest) -> WriteProblem | None:
    """None when the existing object is a living child of this OPDJob."""
    ref = ObjectRef.of(existing)
    owners: list[Manifest] = existing["metadata"].get("ownerReferences") or []
    ours = any(owner.get("uid") == job["metadata"]["uid"] for owner in owners)
    if existing["metadata"].get("deletionTimestamp"):
        return WriteProblem(ref, WriteProblemKind.BEING_DELETED, f"the old {ref.kind} {ref.name} is being deleted")
    if ours:
        return None
    name = job["metadata"]["name"]
    if any(owner.get("kind") == OPDJOB_KIND and owner.get("name") == name for owner in owners):
        message = f"{ref.kind} {ref.name} belongs to an earlier OPDJob {name} that is being deleted"
        return WriteProblem(ref, WriteProblemKind.BEING_DELETED, message)
    owner = f"{owners[0].get('kind')} {owners[0].get('name')}" if owners else "nobody"
    message = f"{ref.kind} {ref.name} exists and belongs to {owner}; delete or rename it, or rename the OPDJob"
    return WriteProblem(ref, WriteProblemKind.COLLISION, message)


def _basis(job: Manifest) -> tuple[Any, ...]:
    """What decisions are made from: all of an OPDJob but other people's labels and annotations."""
    metadata = job["metadata"]
    return metadata["uid"], metadata.get("deletionTimestamp"), job.get("spec"), job.get("status") or {}


def merge_difference(current: Manifest, desired: Manifest) -> Manifest:
    """The JSON merge patch (RFC 7386) from one document to the other; empty when they are equal."""
    patch: Manifest = {key: None for key in current if key not in desired}
    for key, value in desired.items():
        old = current.get(key)
        if old == value:
            continue
        patch[key] = merge_difference(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return patch


def ended_attempts(before: Manifest, after: Manifest) -> list[str]:
    """Failure classes (Succeeded has "none") of the attempts whose end the new status tells first."""
    ended = {attempt["number"] for attempt in before.get("attempts") or () if attempt.get("endTime")}
    found: list[dict[str, Any]] = after.get("attempts") or []
    return [
        attempt.get("failureClass") or "none"
        for attempt in found
        if attempt.get("endTime") and attempt["number"] not in ended
    ]


def _key(job: Manifest) -> JobKey:
    return JobKey(job["metadata"]["namespace"], job["metadata"]["name"])
