"""What is left of a status that the API server refuses (tests/integration has the real server)."""

from __future__ import annotations

from typing import Any

from opd_world import World

from opd_operator.smaller_status import ESSENTIAL, essentials, missing, without_named

WHY = 'OPDJob.opd.dev "math" is invalid: status.training.step: Invalid value'


def status() -> dict[str, Any]:
    return World().training().status


def test_only_the_sections_that_are_refused_go_first() -> None:
    full = status()
    smaller = without_named(full, ["status.training.step", "spec.x", "status.attempt", "<nil>"])
    assert smaller == {key: value for key, value in full.items() if key != "training"}
    assert missing(full, smaller) == ["training"]


def test_the_rest_keeps_what_decisions_are_made_from_and_says_why() -> None:
    full = status()
    smaller = essentials(full, [], why=WHY)
    assert set(smaller) == set(full) & set(ESSENTIAL)
    assert {(item["type"], item["status"]) for item in smaller["conditions"]} == {
        (item["type"], item["status"]) for item in full["conditions"]
    }
    told = [item["message"] for item in smaller["conditions"] if item["message"]]
    assert told == [f"the API server refuses the rest of this status: {WHY}"]
    assert all("message" not in item for item in smaller["attempts"])
    assert missing(smaller, smaller) == ["the messages"]


def test_at_last_even_a_plain_field_may_go() -> None:
    smaller = essentials(status(), ["status.retries", "status.conditions[0].type"], why=WHY, without_named=True)
    assert "retries" not in smaller
    assert smaller["conditions"]
