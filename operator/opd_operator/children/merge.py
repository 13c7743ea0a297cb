"""How a user's pod template is laid over the generated one.

Maps merge by key. Lists whose elements have an identity merge by it: containers, init containers, volumes and variables by
name, mounts by path. Every other list is replaced: a user who writes `args` means these and no others.
"""

from __future__ import annotations

from typing import Any

#: List field -> field that identifies an element.
IDENTITY = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
}
#: A volume or a variable has one source: two of them merged by key would be refused by the API server.
REPLACED_ELEMENTS = frozenset({"volumes", "env", "volumeMounts"})


def merge_template(base: dict[str, Any], overlay: dict[str, Any] | None) -> dict[str, Any]:
    """A new PodTemplateSpec; neither argument is changed."""
    return _merge_maps(base, overlay or {})


def merge_named(base: list[dict[str, Any]], overlay: list[dict[str, Any]], field: str) -> list[dict[str, Any]]:
    """Elements of both lists; those with one identity become one, at the place of the first. A list with an element that has
    none takes the place of the whole: the API server refuses it and says why."""
    identity = IDENTITY[field]
    if not all(isinstance(item, dict) and isinstance(item.get(identity), str) for item in overlay):
        return overlay
    merged = {item[identity]: item for item in base}
    for item in overlay:
        known = merged.get(item[identity])
        whole = known is None or field in REPLACED_ELEMENTS
        merged[item[identity]] = item if whole else _merge_maps(known or {}, item)
    return list(merged.values())


def _merge_maps(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overlay.items():
        known = merged.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            merged[key] = _merge_maps(known, value)
        elif key in IDENTITY and isinstance(known, list) and isinstance(value, list):
            merged[key] = merge_named(known, value, key)
        else:
            merged[key] = value
    return merged
