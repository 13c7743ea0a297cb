"""What is left of a status that the API server refuses. Pure.

A policy, a schema of another version or a value that no schema foresaw may refuse a status. Deadlines, cleanup and the stop
live from a few plain fields of it, so these are written without the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from opd_api.vocabulary import ConditionType
from opd_operator.model import Manifest

#: What the next pass decides on; everything else is for people or is computed again.
ESSENTIAL = (
    "observedGeneration",
    "phase",
    "reason",
    "conditions",
    "attempt",
    "startTime",
    "completionTime",
    "attempts",
    "retries",
    "nextAttemptTime",
    "teacherRestarts",
)
_FIELD = re.compile(r"^status\.([A-Za-z]+)")
_WORDS = 512


def without_named(status: Manifest, fields: Iterable[str]) -> Manifest:
    """The status without the sections to which the refused fields belong, as far as they may be missed."""
    named = {match.group(1) for field in fields if (match := _FIELD.match(field))}
    return {key: value for key, value in status.items() if key not in named or key in ESSENTIAL}


def essentials(status: Manifest, fields: Iterable[str], *, why: str, without_named: bool = False) -> Manifest:
    """The least that keeps the job going: no text of others, and in Progressing why the rest is missing. `without_named`: not
    even what was refused of that."""
    named = {match.group(1) for field in fields if (match := _FIELD.match(field))} - {"conditions"}
    named = named if without_named else set()
    found = {key: status[key] for key in ESSENTIAL if key in status and key not in named}
    found["conditions"] = [_plain_condition(item, why) for item in status.get("conditions", ())]
    if "attempts" in found:
        found["attempts"] = [{key: item[key] for key in item if key != "message"} for item in found["attempts"]]
    return found


def _plain_condition(condition: dict[str, Any], why: str) -> dict[str, Any]:
    message = ""
    if condition["type"] == ConditionType.PROGRESSING:
        message = f"the API server refuses the rest of this status: {why}"[:_WORDS]
    return {**condition, "message": message}


def missing(status: Manifest, written: Manifest) -> list[str]:
    """Sections that were left out, for people."""
    left_out = [key for key in status if key not in written]
    return left_out or ["the messages"]
