"""docs/mapping.md: every row is backed by an oracle vector or a test that exists, and "not offered" is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from oracle_io import Output, families
from oracle_map import RULES
from oracle_rules import Excluded, matching

_HERE = Path(__file__).parent
_PAGE = _HERE.parents[2] / "docs" / "mapping.md"
_SEPARATOR = re.compile(r"\|( --- \|)+")


def _rows() -> list[list[str]]:
    lines = [line for line in _PAGE.read_text().splitlines() if line.startswith("|")]
    headers = {index - 1 for index, line in enumerate(lines) if _SEPARATOR.fullmatch(line)}
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for index, line in enumerate(lines)
        if index not in headers and not _SEPARATOR.fullmatch(line)
    ]


@pytest.fixture(scope="module")
def outputs() -> dict[str, dict[str, Output]]:
    return {family.name: family.outputs for family in families(_HERE / "data" / "oracles")}


@pytest.mark.parametrize("cells", _rows(), ids=lambda cells: cells[0][:60])
def test_a_row_of_the_mapping_has_evidence(cells: list[str], outputs: dict[str, dict[str, Output]]) -> None:
    evidence = re.findall(r"`([^`]+)`", cells[-1])
    assert evidence, "no evidence in the last column"
    for name in evidence:
        if "::" in name:
            file, function = name.split("::")
            assert f"def {function}(" in (_HERE / file).read_text(), name
            continue
        family, output = name.split("/")
        assert output in outputs[family], name
        [(rule, _)] = matching(RULES[family], output)
        assert isinstance(rule, Excluded) == any("*not offered*" in cell for cell in cells), name
