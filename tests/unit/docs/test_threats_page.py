"""docs/threats.md names tests, ports and rules that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from named_tests import problem_of

from opd_api.rules import RULES
from opd_api.vocabulary import Port

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "threats.md").read_text(encoding="utf-8")
TESTS = sorted(set(re.findall(r"`([^`]+::[^`]+)`", PAGE)))


@pytest.mark.parametrize("test", TESTS)
def test_the_tests_that_the_page_names_exist(test: str) -> None:
    assert problem_of(f"tests/{test}") == ""


def test_every_claim_of_the_tables_is_shown_by_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "| shown by |" not in line]
    claims = [row for row in rows if row.count(" | ") == 3 and "---" not in row]
    assert len(claims) == 7
    assert [row for row in claims if "::test_" not in row] == []


def test_ports_and_rules_are_those_of_the_code() -> None:
    for port in (Port.RAY_DASHBOARD, Port.METRICS, Port.TEACHER):
        assert f" {port}" in PAGE
    assert "SecretInLiteral" in {item.code for item in RULES}
