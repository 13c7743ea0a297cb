"""docs/immune.md names a test for every failure of others, and every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from named_tests import problem_of
from opd_failures import FAILURES

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "immune.md").read_text(encoding="utf-8")
OPERATORS = {str(number) for number in range(1, 31)}
TRAINERS = {"T1", "T2", "T17", "T19", "T20"}


def rows() -> dict[str, list[str]]:
    """First cell -> all cells, of every row of every table."""
    lines = [line.strip("|\n ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    return {cells[0]: cells for cells in lines if cells[0] not in ("no.", "what", "---")}


def test_no_number_is_missing() -> None:
    assert {number for number in rows() if re.fullmatch(r"T?\d+", number)} == OPERATORS | TRAINERS


def named(cell: str) -> list[str]:
    """Tests of a cell, `path::test`."""
    return [f"tests/{name}" for name in re.findall(r"`([^`]+::[^`]+)`", cell)]


def failures(cell: str) -> list[str]:
    """Rows of failures.md that a cell names."""
    return [name for line in re.findall(r"failures: ([^<]+)", cell) for name in re.findall(r"`([^`]+)`", line)]


@pytest.mark.parametrize("row", sorted(rows()))
def test_what_a_row_names_exists(row: str) -> None:
    shown = rows()[row][-1]
    assert named(shown) or failures(shown), "nothing shows it"
    assert [problem for test in named(shown) if (problem := problem_of(test))] == []
    assert set(failures(shown)) <= {failure.id for failure in FAILURES}


def test_every_cell_of_the_last_column_is_read_completely() -> None:
    for cells in rows().values():
        words = re.findall(r"`([^`]+)`", cells[-1])
        assert len(words) == len(named(cells[-1])) + len(failures(cells[-1])), cells[0]
