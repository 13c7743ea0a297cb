"""Requests and answers of every wire format, on recorded shapes."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest

from opd_api.v1alpha1 import TeacherBackend
from opd_trainer.teachers.adapters import ADAPTERS
from opd_trainer.teachers.adapters.sglang import windows
from opd_trainer.teachers.wire import AnswerError, ScoreQuery, TopKShortfallError

PROMPT = np.array([5, 6, 7], dtype=np.int32)
RESPONSE = np.array([8, 9], dtype=np.int32)


def query(**more: Any) -> ScoreQuery:
    return ScoreQuery(PROMPT, RESPONSE, **more)


def sglang_meta(**more: Any) -> dict[str, Any]:
    """As SGLang 0.5.23 answers for start 2 of [5, 6, 7, 8, 9]."""
    return {
        "meta_info": {
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": 5,
            "input_token_logprobs": [[None, 7, None], [-1.5, 8, None], [-2.5, 9, None]],
            "output_token_logprobs": [[-0.5, 1, None]],
            **more,
        }
    }


def test_sglang_asks_from_the_last_prompt_position_so_that_the_prompt_stays_cached() -> None:
    (call,) = ADAPTERS[TeacherBackend.SGLANG].calls(query(), model=None)
    assert call.path == "/generate"
    assert call.body["input_ids"].tolist() == [5, 6, 7, 8, 9]
    assert call.body["logprob_start_len"] == 2
    assert call.body["sampling_params"]["max_new_tokens"] == 0


def test_sglang_drops_the_boundary_row_and_ignores_the_phantom_output_token() -> None:
    answer = ADAPTERS[TeacherBackend.SGLANG].parse(query(), [sglang_meta()])
    assert answer.sampled.tolist() == [-1.5, -2.5]


def test_sglang_without_prefix_reuse_cuts_the_response_out_of_the_whole_sequence() -> None:
    rows = [[None, 5, None], [-9.0, 6, None], [-8.0, 7, None], [-1.5, 8, None], [-2.5, 9, None]]
    adapter = ADAPTERS[TeacherBackend.SGLANG]
    (call,) = adapter.calls(query(reuse_prefix=False), model=None)
    assert call.body["logprob_start_len"] == 0
    answer = adapter.parse(query(reuse_prefix=False), [sglang_meta(input_token_logprobs=rows)])
    assert answer.sampled.tolist() == [-1.5, -2.5]


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([[None, 7, None], [-1.5, 8, None]], "rows"),
        ([[None, 7, None], [-1.5, 8, None], [-2.5, 10, None]], "differ"),
        ([[None, 7, None], [None, 8, None], [-2.5, 9, None]], "log-probability"),
        ([[None, 7, None], [float("nan"), 8, None], [-2.5, 9, None]], "log-probability"),
        ([[None, 7, None], [float("-inf"), 8, None], [-2.5, 9, None]], "log-probability"),
        ([[None, 7, None], [-9999.0, 8, None], [-2.5, 9, None]], "log-probability"),
        ([[None, 7, None], [0.7, 8, None], [-2.5, 9, None]], "log-probability"),
        ([[None, 7, None], 3, 4], "not"),
        (None, "no input_token_logprobs"),
    ],
)
def test_sglang_answers_that_are_wrong_are_errors_and_never_guessed(rows: Any, complaint: str) -> None:
    with pytest.raises(AnswerError, match=complaint):
        ADAPTERS[TeacherBackend.SGLANG].parse(query(), [sglang_meta(input_token_logprobs=rows)])


def test_an_aborted_request_is_an_error() -> None:
    with pytest.raises(AnswerError, match="aborted"):
        ADAPTERS[TeacherBackend.SGLANG].parse(query(), [sglang_meta(finish_reason={"type": "abort", "message": "x"})])


def test_sglang_echo_of_the_last_vocabulary_id_as_zero_is_understood() -> None:
    rows = [[None, 7, None], [-1.5, 8, None], [-2.5, 0, None]]
    adapter = ADAPTERS[TeacherBackend.SGLANG]
    assert adapter.parse(query(vocabulary=10), [sglang_meta(input_token_logprobs=rows)]).sampled[1] == -2.5
    with pytest.raises(AnswerError):
        adapter.parse(query(vocabulary=11), [sglang_meta(input_token_logprobs=rows)])


def flat(values: list[list[float]], ids: list[list[int]]) -> dict[str, Any]:
    return {
        "input_top_logprobs_val_flat_b64": base64.b64encode(np.array(values, "<f4").tobytes()).decode(),
        "input_top_logprobs_idx_flat_b64": base64.b64encode(np.array(ids, "<i4").tobytes()).decode(),
        "input_top_logprobs_shape": [len(values), len(values[0])],
        "input_top_logprobs_null_prefix": 1,
    }


def test_sglang_top_k_is_read_from_the_flat_arrays() -> None:
    meta = sglang_meta(**flat([[-0.1, -3.0], [-0.2, -2.0]], [[4, 3], [9, 1]]))
    top = ADAPTERS[TeacherBackend.SGLANG].parse(query(top_k=2), [meta]).top
    assert top is not None
    assert top.ids.tolist() == [[4, 3], [9, 1]]
    np.testing.assert_allclose(top.logprobs, [[-0.1, -3.0], [-0.2, -2.0]], rtol=1e-6)
    assert top.valid.all()


def test_sglang_top_k_is_read_from_nested_rows_of_an_older_server() -> None:
    nested = [None, [[-0.1, 4, None], [-3.0, 3, None]], [[-0.2, 9, None], [-2.0, 1, None]]]
    top = ADAPTERS[TeacherBackend.SGLANG].parse(query(top_k=2), [sglang_meta(input_top_logprobs=nested)]).top
    assert top is not None
    assert top.ids.tolist() == [[4, 3], [9, 1]]


def test_fewer_tokens_than_asked_for_is_a_fault_of_the_teacher() -> None:
    meta = sglang_meta(**flat([[-0.1], [-0.2]], [[4], [9]]))
    with pytest.raises(TopKShortfallError):
        ADAPTERS[TeacherBackend.SGLANG].parse(query(top_k=2), [meta])


def test_zero_probability_in_a_set_is_invalid_and_not_an_error() -> None:
    meta = sglang_meta(**flat([[-0.1, float("-inf")], [-0.2, -9999.0]], [[4, 3], [9, 1]]))
    top = ADAPTERS[TeacherBackend.SGLANG].parse(query(top_k=2), [meta]).top
    assert top is not None
    assert top.valid.tolist() == [[True, False], [True, False]]


def test_sglang_windows_cover_the_response_once() -> None:
    assert windows(300) == [(0, 128), (128, 256), (256, 300)]
    assert windows(1) == [(0, 1)]


def test_sglang_asks_for_ids_per_position_as_the_union_of_each_window() -> None:
    at = np.array([[3, 1], [1, 2]], dtype=np.int32)
    adapter = ADAPTERS[TeacherBackend.SGLANG]
    (call,) = adapter.calls(query(at_ids=at), model=None)
    assert call.body["token_ids_logprob"].tolist() == [1, 2, 3]
    rows = [
        None,
        [[-1.0, 1, None], [-2.0, 2, None], [-3.0, 3, None]],
        [[-4.0, 1, None], [-5.0, 2, None], [-6.0, 3, None]],
    ]
    answer = adapter.parse(query(at_ids=at), [sglang_meta(input_token_ids_logprobs=rows)])
    assert answer.at is not None
    assert answer.at.tolist() == [[-3.0, -1.0], [-4.0, -5.0]]


def test_sglang_window_requests_end_where_the_window_ends() -> None:
    long = ScoreQuery(PROMPT, np.full(130, 8, np.int32), at_ids=np.full((130, 1), 4, np.int32))
    first, second = ADAPTERS[TeacherBackend.SGLANG].calls(long, model=None)
    assert (len(first.body["input_ids"]), first.body["logprob_start_len"]) == (3 + 128, 2)
    assert (len(second.body["input_ids"]), second.body["logprob_start_len"]) == (3 + 130, 2 + 128)


def test_lmdeploy_takes_flat_options_and_answers_without_a_boundary_row() -> None:
    adapter = ADAPTERS[TeacherBackend.LMDEPLOY]
    (call,) = adapter.calls(query(top_k=2), model=None)
    assert call.body["max_tokens"] == 0
    assert call.body["logprob_start_len"] == 2
    assert "sampling_params" not in call.body
    document = {
        "meta_info": {
            "input_token_logprobs": [[-1.5, 8], [-2.5, 9]],
            "input_top_logprobs": [[[-0.1, 4], [-1.5, 8]], [[-0.2, 3], [-2.5, 9]]],
            "finish_reason": {"type": "length"},
        }
    }
    answer = adapter.parse(query(top_k=2), [document])
    assert answer.sampled.tolist() == [-1.5, -2.5]
    assert answer.top is not None
    assert answer.top.ids.tolist() == [[4, 8], [3, 9]]


def test_lmdeploy_with_a_boundary_row_is_refused_because_it_would_be_off_by_one() -> None:
    document = {"meta_info": {"input_token_logprobs": [[None, 7], [-1.5, 8], [-2.5, 9]]}}
    with pytest.raises(AnswerError, match="rows"):
        ADAPTERS[TeacherBackend.LMDEPLOY].parse(query(), [document])


def test_lmdeploy_cannot_score_given_ids() -> None:
    with pytest.raises(ValueError, match="LMDeploy"):
        ADAPTERS[TeacherBackend.LMDEPLOY].calls(query(at_ids=np.zeros((2, 1), np.int32)), model=None)


def vllm_rows() -> list[Any]:
    """`prompt_logprobs` of [5, 6, 7, 8, 9] with K = 2: token 8 is not among the best two, token 9 is."""
    return [
        None,
        {"6": {"logprob": -9.0, "rank": 1}, "1": {"logprob": -9.5, "rank": 2}},
        {"7": {"logprob": -9.0, "rank": 1}, "1": {"logprob": -9.5, "rank": 2}},
        {"8": {"logprob": -4.0, "rank": 7}, "3": {"logprob": -0.5, "rank": 1}, "4": {"logprob": -1.5, "rank": 2}},
        {"9": {"logprob": -0.25, "rank": 1}, "2": {"logprob": -9999.0, "rank": 2}},
    ]


def test_vllm_asks_for_one_token_and_names_the_model() -> None:
    (call,) = ADAPTERS[TeacherBackend.VLLM].calls(query(top_k=2), model="org/teacher")
    assert call.path == "/v1/completions"
    assert (call.body["max_tokens"], call.body["prompt_logprobs"], call.body["model"]) == (1, 2, "org/teacher")


def test_vllm_rows_are_aligned_without_a_shift_and_k_plus_one_entries_are_cut_by_rank() -> None:
    answer = ADAPTERS[TeacherBackend.VLLM].parse(query(top_k=2), [{"choices": [{"prompt_logprobs": vllm_rows()}]}])
    assert answer.sampled.tolist() == [-4.0, -0.25]
    assert answer.top is not None
    assert answer.top.ids.tolist() == [[3, 4], [9, 2]]
    assert answer.top.valid.tolist() == [[True, True], [True, False]]


def test_vllm_row_without_the_actual_token_is_an_error_and_not_probability_one() -> None:
    rows = vllm_rows()
    del rows[3]["8"]
    with pytest.raises(AnswerError, match="missing"):
        ADAPTERS[TeacherBackend.VLLM].parse(query(), [{"choices": [{"prompt_logprobs": rows}]}])


def test_vllm_that_caps_its_logprobs_is_found_out() -> None:
    with pytest.raises(TopKShortfallError):
        ADAPTERS[TeacherBackend.VLLM].parse(query(top_k=3), [{"choices": [{"prompt_logprobs": vllm_rows()}]}])


def npy(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def test_vllm_scores_ids_per_position_with_the_sampled_token_as_one_more_column() -> None:
    at = np.array([[3, 1], [1, 2]], dtype=np.int32)
    adapter = ADAPTERS[TeacherBackend.VLLM]
    (call,) = adapter.calls(query(at_ids=at), model="m")
    sampling = call.body["sampling_params"]
    assert call.path == "/inference/v1/generate"
    assert sampling["prompt_logprob_token_ids"].tolist() == [[3, 1, 8], [1, 2, 9]]
    assert sampling["prompt_logprob_start"] == 2
    matrix = np.array([[-3.0, -1.0, -1.5], [-1.0, -2.0, -2.5]], np.float32)
    answer = adapter.parse(query(at_ids=at), [{"prompt_token_id_logprobs": npy(matrix)}])
    assert answer.sampled.tolist() == [-1.5, -2.5]
    assert answer.at is not None
    assert answer.at.tolist() == [[-3.0, -1.0], [-1.0, -2.0]]
    with pytest.raises(AnswerError, match="shape"):
        adapter.parse(query(at_ids=at), [{"prompt_token_id_logprobs": npy(matrix[:1])}])
    with pytest.raises(AnswerError, match="V2 model runner"):
        adapter.parse(query(at_ids=at), [{"prompt_token_id_logprobs": None}])


@pytest.mark.parametrize("backend", list(ADAPTERS))
def test_every_adapter_refuses_an_answer_of_another_service(backend: TeacherBackend) -> None:
    with pytest.raises(AnswerError):
        ADAPTERS[backend].parse(query(), [{"detail": "hello"}])
