"""Every row of the data is looked at before an accelerator is taken, and what would crash the reader never reaches it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError
from opd_trainer.rollout.columns import Gaps, column, distinct, empty, garbled
from opd_trainer.rollout.data import load_records
from opd_trainer.rollout.nesting import MOST_LEVELS, Nesting, too_deep


def nested(levels: int, opening: str = '{"a":', closing: str = "}") -> str:
    return opening * levels + "1" + closing * levels


@pytest.mark.parametrize("opening", ['{"a":', "["])
@pytest.mark.parametrize("levels", [MOST_LEVELS + 1, 100_000])
def test_a_row_that_is_nested_without_end_is_a_data_error_with_file_and_row(
    tmp_path: Path, opening: str, levels: int
) -> None:
    path = tmp_path / "prompts.jsonl"
    deep = nested(levels, opening, "}" if opening == '{"a":' else "]")
    path.write_text('{"prompt": "a"}\n' * 3 + f'{{"prompt": "b", "more": {deep}}}\n')
    with pytest.raises(TrainerError, match=r"prompts.jsonl: row 3 is nested deeper than") as raised:
        load_records(str(path), "train")
    assert (raised.value.failure.failure_class, raised.value.failure.reason) == (FailureClass.DATA, Reason.DATA_ERROR)


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt": "' + "[{" * 500 + '"}\n',
        '{"prompt": "\\"' + "[" * 500 + '"}\n',
        '{"prompt": "\\\\", "x": [' + "[], " * 500 + "[]]}\n",
        "[" + ", ".join(['{"prompt": "a"}'] * 500) + "]",
        '{"prompt": "a"}\n\n' * 500,
    ],
)
def test_brackets_in_texts_and_beside_each_other_are_not_nested(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert too_deep(tmp_path / "x.json") is None


@pytest.mark.parametrize("text", ["\n".join('{"a":' for _ in range(100)), "[\n" + nested(70), "{}\n[" + nested(70)])
def test_nesting_over_several_lines_is_followed(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert too_deep(tmp_path / "x.json") is not None


def test_it_does_not_matter_where_a_file_is_cut_into_pieces() -> None:
    chance = random.Random(1)
    text = json.dumps({"a": ['x"[\\', {"b": "\\\\"}, [1]], "c\\": nested(5)}).encode() + b"\n"
    text = text * 4 + b'{"d": ' + nested(MOST_LEVELS).encode()
    whole = Nesting().feed(text)
    assert whole == 4
    for _ in range(50):
        nesting, at, found = Nesting(), 0, None
        while at < len(text) and found is None:
            size = chance.randint(1, 40)
            found = nesting.feed(text[at : at + size])
            at += size
        assert found == whole


def records_of(tmp_path: Path, rows: list[dict[str, Any]]) -> Any:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_records(str(path), "train")


def test_gaps_are_counted_over_all_rows_and_the_first_is_named(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"q": {"text": f"p{n}"}, "kind": "a"} for n in range(3000)]
    rows[2000]["q"] = {"text": None}
    rows[2500] = {"kind": "b"}
    rows[2600]["q"] = {"text": ""}
    records = records_of(tmp_path, rows)
    texts, kinds = column(records, "q.text"), column(records, "kind")
    assert texts is not None
    assert kinds is not None
    assert empty(texts) == Gaps(3, 2000)
    assert empty(kinds) is None
    assert sorted(distinct(kinds)) == ["a", "b"]
    assert column(records, "q.none") is None
    assert column(records, "none") is None


def test_the_first_row_that_is_no_utf8_is_found_in_any_chunk() -> None:
    good, bad = pa.array(["a"] * 100), pa.array([b"a"] * 70 + [b"\xff"] + [b"a"] * 9 + [b"\xfe"]).cast(pa.binary())
    text = pa.Array.from_buffers(pa.string(), len(bad), bad.buffers())
    assert garbled(pa.chunked_array([good, text])) == 170
    assert garbled(pa.chunked_array([good, good])) is None
