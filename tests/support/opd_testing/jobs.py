"""OPDJob documents for tests: the smallest job a person writes, and changes to it by dotted path."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

SMALLEST: dict[str, Any] = {
    "apiVersion": "opd.dev/v1alpha1",
    "kind": "OPDJob",
    "metadata": {"name": "math"},
    "spec": {
        "student": {"model": {"source": "Qwen/Qwen3-8B"}},
        "teachers": [{"name": "teacher", "model": {"source": "Qwen/Qwen3-32B"}, "tensorParallelSize": 4}],
        "data": {"source": "/data/dapo-math.parquet"},
        "training": {"steps": 200, "gpus": 4},
        "storage": {"claimName": "opd-math"},
    },
}

#: Value in `job_document` that takes a field away.
ABSENT = object()


def job_document(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The smallest job with `changes`, for example {"spec.distillation.topK": 64, "spec.teachers.0.backend": "vllm"}."""
    return changed(SMALLEST, changes or {})


def changed(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a document with changes by dotted path; numbers are indices of lists."""
    result = copy.deepcopy(dict(document))
    for path, value in changes.items():
        *parents, last = path.split(".")
        place: Any = result
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
        if value is ABSENT:
            place.pop(last, None)
        else:
            place[int(last) if isinstance(place, list) else last] = copy.deepcopy(value)
    return result
