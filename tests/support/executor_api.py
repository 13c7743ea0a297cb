"""An API server in memory for tests of what carries plans out: it keeps objects and answers as a test asks."""

from __future__ import annotations

import copy
import itertools
from typing import Any

from opd_operator.errors import ApiError
from opd_operator.model import ObjectRef
from opd_operator.planned import Deletion
from opd_operator.resources import Resource

Manifest = dict[str, Any]


class Api:
    """Objects by kind and name, with versions, UIDs and the answers that tests ask for."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.calls: list[str] = []
        self.answers: dict[str, Exception] = {}
        self._numbers = itertools.count(100)

    def hold(self, manifest: Manifest) -> Manifest:
        held = copy.deepcopy(manifest)
        held["metadata"].setdefault("uid", f"uid-{next(self._numbers)}")
        held["metadata"]["resourceVersion"] = str(next(self._numbers))
        self.objects[held["kind"], held["metadata"]["name"]] = held
        return copy.deepcopy(held)

    def _called(self, verb: str, kind: str, name: str) -> None:
        self.calls.append(f"{verb} {kind}/{name}")
        error = self.answers.get(f"{verb} {kind}")
        if error is not None:
            raise error

    async def get(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        self._called("get", resource.kind, name)
        return copy.deepcopy(self.objects.get((resource.kind, name)))

    async def create(self, manifest: Manifest, *, fenced: bool = True, dry_run: bool = False) -> Manifest:
        name = manifest["metadata"]["name"]
        self._called("try" if dry_run else "create", manifest["kind"], name)
        if (manifest["kind"], name) in self.objects:
            raise ApiError(409, "AlreadyExists", "exists")
        return manifest if dry_run else self.hold(manifest)

    async def apply(self, manifest: Manifest) -> Manifest:
        self._called("apply", manifest["kind"], manifest["metadata"]["name"])
        return self.hold(manifest)

    async def merge_patch(
        self, ref: ObjectRef, patch: Manifest, *, subresource: str | None = None, fenced: bool = True
    ) -> Manifest:
        self._called(f"patch{'/' + subresource if subresource else ''}", ref.kind, ref.name)
        held = self.objects.get((ref.kind, ref.name))
        if held is None:
            raise ApiError(404, "NotFound", "gone")
        wanted = patch.get("metadata", {}).get("resourceVersion")
        if wanted not in (None, held["metadata"]["resourceVersion"]):
            raise ApiError(409, "Conflict", "changed")
        return self.hold(_merged(held, patch))

    async def delete(self, deletion: Deletion) -> Manifest | None:
        self._called("delete", deletion.ref.kind, deletion.ref.name)
        held = self.objects.get((deletion.ref.kind, deletion.ref.name))
        if held is None or held["metadata"]["uid"] != deletion.uid:
            return None
        return self.objects.pop((deletion.ref.kind, deletion.ref.name))


def _merged(old: Manifest, patch: Manifest) -> Manifest:
    result = dict(old)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = _merged(result.get(key) or {}, value)
        else:
            result[key] = value
    return result
