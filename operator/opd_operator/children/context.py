"""What every builder needs to know of a job, and the metadata that all children share."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from opd_api import API_VERSION, KIND
from opd_api.v1alpha1 import OPDJobSpec
from opd_api.vocabulary import Annotation, Role
from opd_operator.children import names
from opd_operator.model import Manifest
from opd_operator.settings import Settings


@dataclass(frozen=True)
class JobContext:
    """One OPDJob as its children see it."""

    name: str
    namespace: str
    uid: str
    spec: OPDJobSpec
    settings: Settings

    @property
    def uid8(self) -> str:
        """First eight characters of the UID."""
        return self.uid[:8]

    @property
    def image(self) -> str:
        """Image of everything that is not a teacher server of another project."""
        return self.spec.runtime.image or self.settings.trainer_image

    @property
    def pull_policy(self) -> str:
        """imagePullPolicy of every container."""
        return str(self.spec.runtime.image_pull_policy or self.settings.image_pull_policy)

    def metadata(self, name: str, role: Role, *, attempt: int | None = None, teacher: str | None = None) -> Manifest:
        """Metadata of a child: name, labels and the owner reference that frees it together with the OPDJob."""
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": names.labels(self.name, role, attempt=attempt, teacher=teacher),
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": self.name,
                    "uid": self.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        }


def spec_hash(value: Any) -> str:
    """Hash of a manifest part, independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]


def with_spec_hash(manifest: Manifest) -> Manifest:
    """The manifest with the hash of its spec in an annotation (computed before it is added)."""
    annotations = manifest["metadata"].setdefault("annotations", {})
    annotations[Annotation.SPEC_HASH.value] = spec_hash(manifest["spec"])
    return manifest
