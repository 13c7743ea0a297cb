"""A cluster in memory for the operator's pure half: plans are executed on a dictionary, controllers are played by methods
(opd_world_api, opd_world_controllers).

Nothing here decides anything: it does what an API server, the built-in controllers and KubeRay would do, when a test says so.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

from opd_world_api import KilledError
from opd_world_controllers import Controllers, final

from opd_operator.model import Kind, Manifest, Memory, Snapshot
from opd_operator.observe import observe
from opd_operator.plan import plan
from opd_operator.planned import Plan
from opd_operator.settings import Settings

UID = "0123abcd-0000-0000-0000-000000000000"
SNAPSHOT_FIELDS = {
    Kind.DEPLOYMENT: "deployments",
    Kind.SERVICE: "services",
    Kind.JOB: "jobs",
    Kind.POD: "pods",
    Kind.RAY_JOB: "ray_jobs",
    Kind.RAY_CLUSTER: "ray_clusters",
    Kind.CONFIG_MAP: "config_maps",
    Kind.NETWORK_POLICY: "network_policies",
}
#: Kinds that the operator creates but does not watch.
UNWATCHED = frozenset({"Secret", "ServiceAccount", "Role", "RoleBinding"})


def job_document(**sections: Any) -> Manifest:
    """A small valid OPDJob; keyword sections (camelCase fields) are merged over its spec."""
    spec: dict[str, Any] = {
        "student": {"model": {"source": "/data/student"}},
        "teachers": [{"name": "big", "model": {"source": "/data/teacher"}}],
        "data": {"source": "/data/prompts.jsonl"},
        "rollout": {"maxStaleness": 1},
        "training": {"steps": 10, "gpus": 1},
        "storage": {"claimName": "opd"},
    }
    for name, value in sections.items():
        spec[name] = {**spec[name], **value} if isinstance(value, dict) and isinstance(spec.get(name), dict) else value
    return {
        "apiVersion": "opd.dev/v1alpha1",
        "kind": "OPDJob",
        "metadata": {
            "name": "math",
            "namespace": "team",
            "uid": UID,
            "generation": 1,
            "creationTimestamp": "2026-03-01T11:59:59Z",
        },
        "spec": spec,
    }


class World(Controllers):
    """See the module."""

    def __init__(
        self, document: Manifest | None = None, settings: Settings | None = None, *, ignore_rules: bool = False
    ) -> None:
        super().__init__(document or job_document())
        self.ignore_rules = ignore_rules
        self.settings = settings or Settings()
        self.memory = Memory()
        self.events: list[Manifest] = []
        self.plans: list[Plan] = []
        self.tried: list[Plan] = []
        self.phases: list[str] = []
        self.kuberay_missing = False

    # --- passes ---

    def step(self) -> Plan:
        """One pass: observe, plan, execute. One that only tried the children, all of which would be taken, and the next."""
        observation = observe(self.snapshot(), self.now, self.memory)
        observation = replace(observation, kuberay_missing=self.kuberay_missing)
        if self.ignore_rules:
            observation = replace(observation, job=replace(observation.job, findings=()))
        made = plan(observation, self.now, self.settings)
        try:
            problems = self.execute(made)
            self.memory = observation.memory.with_problems(problems, observation.job.generation)
            if made.rehearse:
                self.tried.append(made)
                if not self.memory.problems:
                    self.memory = replace(self.memory, rehearsed=observation.job.generation)
                    return self.step()
        except KilledError:
            self.restart_operator()
        self.plans.append(made)
        if made.status is not None and (not self.phases or self.phases[-1] != made.status["phase"]):
            self.phases.append(made.status["phase"])
        return made

    def settle(self) -> World:
        """Passes until nothing is left to do now."""
        for _ in range(20):
            before = self.memory.problems
            made = self.step()
            idle = not (made.delete or made.rehearse or made.create or made.apply or made.annotate or made.status)
            if self.deleted or idle or (self.memory.problems and self.memory.problems == before and not made.status):
                return self
        last = self.plans[-1]
        writes = [item["metadata"]["name"] for item in (*last.create, *last.apply)] + [
            item.ref.name for item in last.delete
        ]
        raise AssertionError(f"the plan never comes to rest: {writes}, problems {self.memory.problems}, {last.status}")

    def after(self, seconds: float) -> World:
        """Let time pass, then settle."""
        self.now += timedelta(seconds=seconds)
        return self.settle()

    def snapshot(self) -> Snapshot:
        """What the cache would hold. No copies: the pure half changes nothing, which a test of its own proves."""
        found: dict[str, list[Manifest]] = {field: [] for field in SNAPSHOT_FIELDS.values()}
        for (kind, _), item in sorted(self.objects.items()):
            if kind not in UNWATCHED:
                found[SNAPSHOT_FIELDS[Kind(kind)]].append(item)
        return Snapshot(
            job=self.job,
            events=tuple(self.events),
            **{field: tuple(items) for field, items in found.items()},  # type: ignore[arg-type]
        )

    def edit(self, **sections: Any) -> World:
        """A user changes the spec."""
        for name, value in sections.items():
            old = self.job["spec"].get(name)
            self.job["spec"][name] = {**old, **value} if isinstance(value, dict) and isinstance(old, dict) else value
        self.job["metadata"]["generation"] += 1
        return self

    def restart_operator(self) -> World:
        """A new process remembers nothing."""
        self.memory = Memory()
        return self

    # --- what is there ---

    @property
    def status(self) -> Manifest:
        """Status of the OPDJob."""
        status: Manifest = self.job.get("status", {})
        return status

    @property
    def phase(self) -> str:
        """Phase of the OPDJob."""
        return str(self.status.get("phase"))

    def condition(self, kind: str) -> Manifest:
        """A condition by type."""
        return next(item for item in self.status["conditions"] if item["type"] == kind)

    def attempt(self, number: int) -> Manifest:
        """The record of an attempt."""
        return next(item for item in self.status["attempts"] if item["number"] == number)

    def names(self, kind: str) -> list[str]:
        """Names of the objects of a kind that are not being deleted."""
        return sorted(
            name
            for (found, name), item in self.objects.items()
            if found == kind and not item["metadata"].get("deletionTimestamp")
        )

    def get(self, kind: str, name: str) -> Manifest:
        """An object."""
        return self.objects[kind, name]

    def reasons(self) -> list[str]:
        """Reasons of the events so far."""
        return [reason for reason, _ in self.said]

    def accelerator_pods(self) -> list[str]:
        """Pods of teachers and students that exist."""
        return [
            name
            for (kind, name), item in self.objects.items()
            if kind == "Pod" and item["metadata"]["labels"].get("opd.dev/role") in ("teacher", "head", "worker")
        ]

    # --- the way to a point ---

    def checked(self) -> World:
        """Go on until the input check has passed."""
        self.settle()
        self.end_job("check", final())
        return self.settle()

    def ready(self) -> World:
        """Go on until the teachers are ready."""
        self.checked()
        for name in [item["name"] for item in self.job["spec"]["teachers"]]:
            if ("Deployment", f"math-teacher-{name}") in self.objects:
                self.teacher_up(name)
        return self.settle()

    def probed(self) -> World:
        """Go on until the RayJob exists."""
        self.ready()
        self.end_job("probe", final())
        return self.settle()

    def training(self, step: int = 1) -> World:
        """Go on until the trainer reports."""
        self.probed()
        self.ray_runs()
        self.settle()
        self.heartbeat(step)
        return self.settle()


def _lose_the_status_of_the_next_attempt(world: World) -> None:
    """The RayJob is created, and the status that tells of it meets a conflict: the spec was edited at the same time."""
    known = set(world.names("RayJob"))
    for _ in range(20):
        before = copy.deepcopy(world.job.get("status", {}))
        world.step()
        if set(world.names("RayJob")) - known:
            world.job["status"] = before
            return
    raise AssertionError("no RayJob was created")


def untold_attempt(attempt: int) -> World:
    """A world in which an attempt's RayJob lives and no status tells of it."""
    world = World()
    if attempt == 1:
        world.ready()
        world.end_job("probe", final())
    else:
        world.training()
        world.final("Failed", failureClass="Infrastructure", reason="HeadLost", message="gone")
        world.remove_pods("math-1")
        world.settle()
        world.now += timedelta(hours=1)
    _lose_the_status_of_the_next_attempt(world)
    assert world.names("RayJob") == [f"math-{attempt}"]
    return world
