"""The API server of the world in memory (see opd_world): a dictionary of objects on which plans are executed."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime

from opd_operator.model import Manifest, ObjectRef, WriteProblem, WriteProblemKind
from opd_operator.planned import Plan

START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


#: Refusals that a dry run tells of.
ABOUT_THE_OBJECT = (WriteProblemKind.INVALID, WriteProblemKind.FORBIDDEN, WriteProblemKind.TYPE_NOT_READ)


class KilledError(Exception):
    """The operator's process dies at a write."""


class ApiServer:
    """Keeps objects, refuses what a test says, collects garbage, and lets the operator die at a write of choice."""

    def __init__(self, job: Manifest) -> None:
        self.job = job
        self.now = START
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.said: list[tuple[str, str]] = []
        self.stops: list[int] = []
        self.refuse: dict[str, tuple[WriteProblemKind, str]] = {}
        self.created: list[str] = []
        self.writes = 0
        #: The operator dies just before its write of this number.
        self.kill_at: int | None = None
        self.kills = 0
        self.deleted = False
        self._uids = 0

    def _write(self) -> None:
        """Count a write; die instead of it when told so."""
        self.writes += 1
        if self.writes == self.kill_at:
            self.kill_at = None
            self.kills += 1
            raise KilledError

    def execute(self, made: Plan) -> tuple[WriteProblem, ...]:
        """Carry out a plan; what was refused."""
        problems: list[WriteProblem] = []
        for deletion in made.delete:
            self._delete(deletion.ref, deletion.uid)
        for rehearsal in made.rehearse:
            problem = self.refuse.get(rehearsal.ref.kind)
            if problem is not None and problem[0] in ABOUT_THE_OBJECT:
                problems.append(WriteProblem(rehearsal.ref, *problem))
        for request in made.secrets:
            self._post(request.manifest, problems)
        for manifest in made.create:
            self._post(manifest, problems)
        for manifest in made.apply:
            self._put(manifest, problems)
        for stop in made.annotate:
            self._write()
            item = self.objects["ConfigMap", stop.config_map.name]
            item["metadata"].setdefault("annotations", {})["opd.dev/stop"] = str(stop.attempt)
            self.stops.append(stop.attempt)
        if made.status is not None:
            self._write()
            self.job["status"] = json.loads(json.dumps(made.status))
        for _ in made.events:
            self._write()
        self.said += [(event.reason, event.message) for event in made.events]
        return tuple(problems)

    def _refused(self, manifest: Manifest, problems: list[WriteProblem]) -> bool:
        problem = self.refuse.get(manifest["kind"])
        if problem is None:
            return False
        problems.append(WriteProblem(ObjectRef.of(manifest), *problem))
        return True

    def _post(self, manifest: Manifest, problems: list[WriteProblem]) -> None:
        self._write()
        key = (manifest["kind"], manifest["metadata"]["name"])
        if self._refused(manifest, problems) or self._exists(manifest, problems):
            return
        item = copy.deepcopy(manifest)
        item["metadata"] |= {"uid": self._uid(), "creationTimestamp": self._stamp(), "generation": 1}
        self.objects[key] = item
        self.created.append("/".join(key))

    def _exists(self, manifest: Manifest, problems: list[WriteProblem]) -> bool:
        """AlreadyExists, and the GET that follows."""
        known = self.objects.get((manifest["kind"], manifest["metadata"]["name"]))
        if known is None:
            return False
        owners = known["metadata"].get("ownerReferences", [])
        if all(owner["uid"] != self.job["metadata"]["uid"] for owner in owners):
            going = bool(known["metadata"].get("deletionTimestamp"))
            kind = WriteProblemKind.BEING_DELETED if going else WriteProblemKind.COLLISION
            problems.append(WriteProblem(ObjectRef.of(manifest), kind))
        return True

    def _put(self, manifest: Manifest, problems: list[WriteProblem]) -> None:
        key = (manifest["kind"], manifest["metadata"]["name"])
        known = self.objects.get(key)
        if known is None:
            self._post(manifest, problems)
            return
        self._write()
        count = len(problems)
        if self._refused(manifest, problems) or (self._exists(manifest, problems) and len(problems) > count):
            return
        item = copy.deepcopy(manifest)
        changed = item.get("spec") != known.get("spec")
        item["metadata"] = {**known["metadata"], **item["metadata"]}
        item["metadata"]["generation"] = known["metadata"]["generation"] + changed
        item["status"] = known.get("status", {})
        self.objects[key] = item

    def _delete(self, ref: ObjectRef, uid: str) -> None:
        self._write()
        if ref.kind == "OPDJob":
            self.deleted = True
            return
        item = self.objects.get((ref.kind, ref.name))
        if item is None or item["metadata"]["uid"] != uid:
            return
        del self.objects[ref.kind, ref.name]
        self._collect(uid)

    def vanish(self, kind: str, name: str) -> None:
        """Somebody deletes an object; what it owned goes too."""
        self._collect(self.objects.pop((kind, name))["metadata"]["uid"])

    def _collect(self, owner: str) -> None:
        """Garbage collection of what an object owned."""
        for key, item in list(self.objects.items()):
            references = item["metadata"].get("ownerReferences", ())
            if any(reference["uid"] == owner for reference in references):
                self.objects.pop(key, None)
                self._collect(item["metadata"]["uid"])

    def _uid(self) -> str:
        self._uids += 1
        return f"uid-{self._uids:04d}"

    def _stamp(self) -> str:
        return self.now.strftime("%Y-%m-%dT%H:%M:%SZ")
