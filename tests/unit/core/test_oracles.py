"""The core against vectors made by running published implementations; every output is mapped or excluded with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle_io import Case, Family, Output, families
from oracle_map import RULES
from oracle_rules import Answer, Excluded, Mapped, matching

_OWN = Path(__file__).parent / "data" / "oracles"


def _folder(config: pytest.Config) -> Path:
    # The option exists only when this folder was named on the command line.
    return config.getoption("--oracles", None) or _OWN


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    loaded = list(families(_folder(metafunc.config)))
    if "case_id" in metafunc.fixturenames:
        pairs = [(family, case_id) for family in loaded for case_id in family.case_ids()]
        metafunc.parametrize("family,case_id", pairs, ids=[f"{family.name}-{case_id}" for family, case_id in pairs])
    elif "family" in metafunc.fixturenames:
        metafunc.parametrize("family", loaded, ids=[family.name for family in loaded])


def test_every_output_is_mapped_or_excluded_exactly_once(family: Family) -> None:
    assert family.name in RULES, f"no rules for family {family.name}"
    wrong = {name: len(matching(RULES[family.name], name)) for name in family.outputs}
    assert not {name: count for name, count in wrong.items() if count != 1}


def test_every_rule_serves_an_output(family: Family) -> None:
    if family.folder != _OWN:
        pytest.skip("another folder may hold fewer outputs")
    idle = [rule.pattern for rule in RULES[family.name] if not any(matching([rule], name) for name in family.outputs)]
    assert not idle


def test_core_reproduces_the_oracle(family: Family, case_id: str) -> None:
    case = family.case(case_id)
    complaints = [
        complaint for name in case.outputs if (complaint := _compare(family, case, family.outputs[name])) is not None
    ]
    assert not complaints, "\n".join(complaints)


def _compare(family: Family, case: Case, output: Output) -> str | None:
    [(rule, match)] = matching(RULES[family.name], output.name)
    if isinstance(rule, Excluded):
        return None
    assert isinstance(rule, Mapped)
    answer = rule.call(case, output, match)
    if not isinstance(answer, Answer):
        answer = Answer(answer)
    expected = case.outputs[output.name].double()
    ours = answer.value.detach().double()
    if ours.shape != expected.shape:
        return f"{output.name}: shape {tuple(ours.shape)} instead of {tuple(expected.shape)}"
    rtol, atol = family.bounds(output, case)
    close = torch.isclose(ours, expected, rtol=rtol, atol=atol, equal_nan=False)
    if answer.where is not None:
        close = close | ~answer.where.expand_as(close)
    if bool(close.all()):
        return None
    worst = (ours - expected).abs()[~close].max().item()
    return f"{output.name} ({output.tolerance}): {int((~close).sum())} of {close.numel()} differ, worst by {worst:.3g}"
