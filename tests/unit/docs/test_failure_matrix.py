"""docs/failure-matrix.md: what `make matrix` notices, and that what it runs is in the table."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from named_tests import problem_of
from opd_failures import FAILURES, GROUPS
from opd_failures.live import Seen, differences, hint_of
from opd_failures.on_cluster import ON_CLUSTER_TEST
from opd_failures.on_cluster_rows import ON_CLUSTER

ROOT = Path(__file__).resolve().parents[3]
KILLED = next(failure for failure in FAILURES if failure.id == "killed")


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("matrix", ROOT / "tools/docs/matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def good() -> Seen:
    """A trainer that was killed, as the table says."""
    return Seen(
        id="killed",
        where="cluster",
        test=ON_CLUSTER_TEST,
        failure_class="Infrastructure",
        reason="RayJobFailed",
        told=("Failed=True (BackoffLimitExceeded)",),
        message="the trainer was killed by a signal",
        hint=hint_of(KILLED, "killed"),
        attempts=1,
        teacher_restarts=0,
        end="Failed (BackoffLimitExceeded)",
        left=(),
    )


def test_a_row_that_is_as_the_table_says_has_no_differences(good: Seen) -> None:
    assert differences(KILLED, good) == []


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("failure_class", "Internal"),
        ("reason", "PodFailed"),
        ("end", "Succeeded"),
        ("attempts", 2),
        ("teacher_restarts", 1),
        ("hint", ""),
        ("left", ("Pod killed-1-head",)),
        ("message", ""),
    ],
)
def test_every_cell_that_is_otherwise_is_a_difference(good: Seen, cell: str, value: Any) -> None:
    assert len(differences(KILLED, replace(good, **{cell: value}))) == 1


def test_a_row_that_changed_since_the_last_run_is_told(matrix: ModuleType, good: Seen) -> None:
    key = ("cluster", "killed")
    assert matrix.changes({key: good}, {key: good}) == []
    assert matrix.changes({key: good}, {key: replace(good, attempts=2)}) == ["cluster: killed: attempts was 1, is 2"]


def test_what_was_not_shown_is_told(matrix: ModuleType, good: Seen) -> None:
    told = matrix.missing({("cluster", "killed"): good})
    assert "cluster: killed was not shown" not in told
    assert "API server: killed was not shown" in told


def test_what_is_done_on_the_cluster_is_in_its_group_of_the_table() -> None:
    assert {name: set(rows) - {row.id for row in GROUPS[name]} for name, rows in ON_CLUSTER.items() if rows} == {
        name: set() for name in ON_CLUSTER
    }
    assert problem_of(ON_CLUSTER_TEST) == ""
