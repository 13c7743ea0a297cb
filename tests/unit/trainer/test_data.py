"""The prompt stream: order, epochs, policies and exact resumption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from controller_fakes import FakeTokenizer, encode_text
from hypothesis import given, settings
from hypothesis import strategies as st

from opd_api.v1alpha1 import Data
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError
from opd_trainer.rollout.data import PromptEncoder, PromptStream, load_records, steps_of_epochs


def stream(size: int = 7, **options: Any) -> PromptStream:
    records = [{"prompt": f"p{row}", "data_source": "s"} for row in range(size)]
    return PromptStream(records, encode_text, Data(source="x.jsonl", **options))


def texts(source: PromptStream, count: int) -> list[str]:
    return [source.take().text for _ in range(count)]


def test_an_epoch_has_every_prompt_once_and_the_next_one_another_order() -> None:
    source = stream(50)
    first, second = texts(source, 50), texts(source, 50)
    assert sorted(first) == sorted(second) == sorted(f"p{row}" for row in range(50))
    assert first != second


def test_the_order_depends_on_the_seed_only() -> None:
    assert texts(stream(20, seed=5), 45) == texts(stream(20, seed=5), 45)
    assert texts(stream(20, seed=5), 20) != texts(stream(20, seed=6), 20)


def test_without_shuffle_the_order_is_the_file_s() -> None:
    assert texts(stream(3, shuffle=False), 7) == ["p0", "p1", "p2", "p0", "p1", "p2", "p0"]


def test_a_file_shorter_than_a_batch_repeats() -> None:
    assert sorted(texts(stream(2), 8)) == ["p0"] * 4 + ["p1"] * 4


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 9),
    before=st.integers(0, 25),
    outstanding=st.sets(st.integers(0, 24), max_size=6),
    data=st.data(),
)
def test_a_resume_anywhere_in_an_epoch_goes_on_exactly(
    size: int, before: int, outstanding: set[int], data: st.DataObject
) -> None:
    source = stream(size)
    taken = [source.take() for _ in range(before)]
    outstanding = {ticket for ticket in outstanding if ticket < before}
    state = json.loads(json.dumps(source.state_dict(outstanding)))
    resumed = stream(size)
    resumed.load_state_dict(state)
    again = [resumed.take() for _ in range(len(outstanding))]
    assert [prompt.ticket for prompt in again] == sorted(outstanding)
    assert [prompt.text for prompt in again] == [taken[ticket].text for ticket in sorted(outstanding)]
    assert texts(resumed, 12) == texts(source, 12)


def test_a_second_resume_before_the_list_is_used_up_keeps_it() -> None:
    source = stream(5)
    texts(source, 4)
    resumed = stream(5)
    resumed.load_state_dict(source.state_dict([1, 3]))
    assert resumed.take().ticket == 1
    assert resumed.state_dict([1])["reissue"] == [1, 3]


def test_other_data_than_the_checkpoint_s_is_refused() -> None:
    state = stream(5).state_dict([])
    with pytest.raises(TrainerError, match="other prompts") as error:
        stream(6).load_state_dict(state)
    assert error.value.failure.failure_class is FailureClass.DATA


def test_long_prompts_are_dropped_and_counted() -> None:
    records = [{"prompt": "x" * length} for length in (2, 9, 3)]
    source = PromptStream(records, encode_text, Data(source="x.jsonl", max_prompt_tokens=5, shuffle=False))
    assert [len(source.take().ids) for _ in range(4)] == [2, 3, 2, 3]
    assert source.dropped == 2
    assert source.usable() == 2


def test_long_prompts_keep_their_end_when_truncated() -> None:
    options: dict[str, Any] = {"max_prompt_tokens": 3, "overlong": "truncate", "shuffle": False}
    source = PromptStream([{"prompt": "abcdef"}], encode_text, Data(source="x.jsonl", **options))
    assert bytes(source.take().ids.astype("uint8")) == b"def"
    assert source.truncated == 1


def test_a_long_prompt_ends_the_run_when_asked_to() -> None:
    options: dict[str, Any] = {"max_prompt_tokens": 3, "overlong": "error"}
    source = PromptStream([{"prompt": "abcdef"}], encode_text, Data(source="x.jsonl", **options))
    with pytest.raises(TrainerError, match="row 0 has 6 tokens"):
        source.take()


def test_a_file_of_long_prompts_only_is_an_error_not_an_endless_search() -> None:
    source = PromptStream([{"prompt": "abcdef"}] * 3, encode_text, Data(source="x.jsonl", max_prompt_tokens=3))
    with pytest.raises(TrainerError, match="all 3 prompts are longer"):
        source.take()


def test_a_missing_field_is_named_together_with_those_that_exist() -> None:
    with pytest.raises(TrainerError, match=r"data\.promptField is 'prompt'.*fields: question, source") as error:
        PromptStream([{"question": "?", "source": "s"}], encode_text, Data(source="x.jsonl"))
    assert error.value.failure.reason is Reason.FIELD_NOT_FOUND


def test_nested_fields_are_reached_with_a_dot() -> None:
    records = [{"prompt": "p", "reward_model": {"ground_truth": "42"}}]
    source = PromptStream(records, encode_text, Data(source="x.jsonl", answer_field="reward_model.ground_truth"))
    assert source.take().answer == "42"


def test_chat_messages_go_through_the_template_and_text_does_not() -> None:
    tokenizer = FakeTokenizer()
    tokenizer.chat_template = "given"  # type: ignore[assignment]
    encode = PromptEncoder(tokenizer, None)
    assert encode([{"role": "user", "content": "hi"}])[1] == "<user>hi<assistant>"
    assert encode("hi")[1] == "hi"


def test_an_explicit_template_wraps_text_as_a_user_turn() -> None:
    assert PromptEncoder(FakeTokenizer(), "template")("hi")[1] == "<user>hi<assistant>"


def test_chat_messages_without_a_template_say_what_to_set() -> None:
    with pytest.raises(TrainerError, match=r"data\.chatTemplate"):
        PromptEncoder(FakeTokenizer(), None)([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(("epochs", "usable", "batch", "steps"), [(1, 10, 4, 3), (2, 8, 4, 4), (1, 2, 64, 1)])
def test_epochs_become_steps_that_see_everything(epochs: int, usable: int, batch: int, steps: int) -> None:
    assert steps_of_epochs(epochs, usable, batch) == steps


def test_jsonl_and_parquet_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"p{row}", "answer": str(row)} for row in range(3)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    for name in ("a.jsonl", "a.parquet"):
        records = load_records(str(tmp_path / name), "train")
        assert [dict(records[row]) for row in range(3)] == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("absent.jsonl", None, "does not exist"), ("a.csv", "x", "no known ending"), ("bad.jsonl", "{", "cannot be read")],
)
def test_unreadable_data_is_a_data_failure(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(TrainerError, match=message) as error:
        load_records(str(tmp_path / name), "train")
    assert error.value.failure.failure_class is FailureClass.DATA
