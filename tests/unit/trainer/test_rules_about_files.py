"""Rules 11, 16 and 17, which need files: tokenizers of student and teacher, and the teacher's usual length."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opd_testing.configs import trainer_config

from opd_api.vocabulary import Reason, Severity
from opd_trainer.preflight.check import response_cap
from opd_trainer.preflight.tokenizers import TokenizerFacts, compare

SPECIAL = {"bos_token": None, "eos_token": 2, "unk_token": None}
QWEN = TokenizerFacts("qwen", {"a": 0, "b": 1, "<eos>": 2}, SPECIAL, 2, frozenset({2}), 8, (0, 1))

CASES: dict[str, tuple[dict[str, Any], list[Severity], str]] = {
    "equal": ({}, [], ""),
    "other map": ({"vocabulary": {"a": 1, "b": 0, "<eos>": 2}}, [Severity.ERROR], "'a' is 0 for the student and 1"),
    "one more token": ({"vocabulary": {"a": 0, "b": 1, "<eos>": 2, "c": 3}}, [Severity.ERROR], "'c' is None"),
    "other merges": ({"sample": (1, 0)}, [Severity.ERROR], "cut into other tokens"),
    "other special id": ({"special": SPECIAL | {"eos_token": 1}}, [Severity.ERROR], "eos_token is 2"),
    "other end of response": ({"end_ids": frozenset({1, 2})}, [Severity.ERROR], "lengths would explode"),
    "only padding": ({"padding": 0}, [Severity.WARNING], "harmless"),
    "padded vocabulary": ({"embedding_rows": 16}, [Severity.WARNING], "harmless"),
}


@pytest.mark.parametrize(("change", "severities", "words"), CASES.values(), ids=CASES)
def test_tokenizers_must_number_their_tokens_alike(
    change: dict[str, Any], severities: list[Severity], words: str
) -> None:
    found = compare(QWEN, replace(QWEN, **change), "teacher", "spec.teachers[0]")
    assert [item.severity for item in found] == severities
    assert all(item.reason is Reason.TOKENIZER_MISMATCH and words in item.message for item in found)


@pytest.mark.parametrize(("usual", "warns"), [(4096, True), (512, False), (None, False)])
def test_a_cap_below_the_teachers_usual_length_warns(tmp_path: Path, usual: int | None, warns: bool) -> None:
    config = trainer_config(tmp_path, urls={"teacher": ["http://127.0.0.1:1"]}, rollout={"maxResponseTokens": 512})
    (tmp_path / "generation_config.json").write_text(json.dumps({} if usual is None else {"max_new_tokens": usual}))
    found = response_cap(config, "teacher", tmp_path)
    assert [(item.reason, item.severity) for item in found] == [(Reason.RESPONSE_CAP_SHORT, Severity.WARNING)] * warns
    assert all("Write maxResponseTokens: 4096" in item.message for item in found)
