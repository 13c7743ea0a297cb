"""SGLang `POST /generate`, read from SGLang 0.5.23 and tried against it.

The first row of every input answer is null. `token_ids_logprob` is one list for all positions, so ids that differ from
position to position are asked for in windows: each window sends the sequence up to its end and the union of its ids, and
finds everything before it in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd_trainer.alignment import AlignmentError, expected_rows, response_rows, score_start
from opd_trainer.sample import TokenSet
from opd_trainer.teachers.wire import (
    AnswerError,
    Call,
    ScoreAnswer,
    ScoreQuery,
    TopKShortfallError,
    check_echo,
    check_finite,
    decode_array,
    valid_entries,
)

#: Response positions of one window when ids differ per position.
WINDOW = 128
PATH = "/generate"


def windows(response_length: int, size: int = WINDOW) -> list[tuple[int, int]]:
    """[start, end) of the windows over the response."""
    return [(start, min(start + size, response_length)) for start in range(0, response_length, size)]


def scoring_body(query: ScoreQuery) -> dict[str, Any]:
    """The body that scores the whole response in one request."""
    return {
        "input_ids": query.input_ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": score_start(len(query.prompt_ids)) if query.reuse_prefix else 0,
        "return_text_in_logprobs": False,
        "stream": False,
    } | flat_top_k(query.top_k)


def flat_top_k(top_k: int) -> dict[str, Any]:
    """Options that ask for the K best as two base64 arrays instead of nested lists."""
    if not top_k:
        return {}
    return {
        "top_logprobs_num": top_k,
        "return_flat_raw_top_logprobs": True,
        "return_flat_raw_top_logprobs_b64": True,
    }


def meta_info(document: dict[str, Any]) -> dict[str, Any]:
    """`meta_info` of an answer. Raises AnswerError when it is missing or the request was aborted."""
    meta = document.get("meta_info")
    if not isinstance(meta, dict):
        raise AnswerError("the answer has no meta_info")
    reason = meta.get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise AnswerError(f"the server aborted the request: {str(reason.get('message', ''))[:200]}")
    return meta


def sampled_logprobs(meta: dict[str, Any], query: ScoreQuery) -> NDArray[np.float32]:
    """[R] from `input_token_logprobs`, rows [logprob, id, text]; row 0 is the boundary. Raises AnswerError."""
    rows = meta.get("input_token_logprobs")
    if not isinstance(rows, list):
        raise AnswerError("the answer has no input_token_logprobs")
    if not query.reuse_prefix:
        if len(rows) != query.tokens:
            raise AnswerError(f"{len(rows)} rows for a sequence of {query.tokens} tokens")
        rows = rows[len(query.prompt_ids) - 1 :]
    scored = aligned(rows, len(query.response_ids))
    try:
        ids = [row[1] for row in scored]
        values = np.array([np.nan if row[0] is None else row[0] for row in scored], dtype=np.float32)
    except (TypeError, IndexError, ValueError):
        raise AnswerError("a row of input_token_logprobs is not [logprob, token_id, text]") from None
    check_echo(_unclipped(ids, query), query.response_ids)
    check_finite(values, query.response_ids)
    return values


def _unclipped(echoed: Sequence[Any], query: ScoreQuery) -> NDArray[Any]:
    """SGLang scores the last id of the vocabulary like any other, but echoes it as 0 (a guard for image placeholders)."""
    ids = np.asarray(echoed)
    if query.vocabulary is None or ids.shape != query.response_ids.shape:
        return ids
    return np.where((ids == 0) & (query.response_ids == query.vocabulary - 1), query.response_ids, ids)


def aligned(rows: Sequence[Any], response_length: int) -> Sequence[Any]:
    """`response_rows` with the error that callers of adapters expect."""
    try:
        return response_rows(rows, response_length)
    except AlignmentError as error:
        raise AnswerError(str(error)) from None


def top_logprobs(meta: dict[str, Any], query: ScoreQuery) -> TokenSet | None:
    """[R, K] best tokens, from the flat arrays when the server gave them, else from nested rows. Raises AnswerError."""
    if not query.top_k:
        return None
    rows = len(query.response_ids)
    if "input_top_logprobs_val_flat_b64" in meta:
        values = decode_array(meta["input_top_logprobs_val_flat_b64"], np.float32)
        ids = decode_array(meta["input_top_logprobs_idx_flat_b64"], np.int32)
        return flat_token_set(values, ids, meta, rows, query.top_k)
    nested = meta.get("input_top_logprobs")
    if not isinstance(nested, list):
        raise AnswerError("the answer has no input_top_logprobs")
    return nested_token_set(list(nested)[-expected_rows(rows) :], rows, query.top_k)


def flat_token_set(values: NDArray[Any], ids: NDArray[Any], meta: dict[str, Any], rows: int, top_k: int) -> TokenSet:
    """Token set from flat arrays; they hold the rows after the leading null ones."""
    try:
        count, width = (int(number) for number in meta["input_top_logprobs_shape"])
        values, ids = values.reshape(count, width), ids.reshape(count, width)
    except (KeyError, TypeError, ValueError) as error:
        raise AnswerError(f"the flat top log-probabilities do not have the shape that they name: {error}") from None
    if count < rows:
        raise AnswerError(f"{count} rows of top log-probabilities for {rows} response tokens")
    return token_set(ids[count - rows :], values[count - rows :], top_k)


def nested_token_set(rows: Sequence[Any], response_length: int, top_k: int) -> TokenSet:
    """Token set from rows of [logprob, id, …] entries, boundary row first."""
    scored = aligned(rows, response_length)
    width = {len(row) if row else 0 for row in scored}
    if len(width) != 1 or min(width) < top_k:
        raise TopKShortfallError(f"{min(width)} tokens per position instead of {top_k}")
    values = np.array([[entry[0] for entry in row] for row in scored], dtype=np.float32)
    ids = np.array([[entry[1] for entry in row] for row in scored], dtype=np.int32)
    return token_set(ids, values, top_k)


def token_set(ids: NDArray[Any], values: NDArray[Any], top_k: int) -> TokenSet:
    """The first K columns as a TokenSet. Raises TopKShortfallError when there are fewer."""
    if ids.shape[1] < top_k:
        raise TopKShortfallError(f"{ids.shape[1]} tokens per position instead of {top_k}")
    logprobs = values[:, :top_k].astype(np.float32)
    return TokenSet(ids[:, :top_k].astype(np.int32), logprobs, valid_entries(logprobs))


class SglangAdapter:
    """A stock SGLang server."""

    def calls(self, query: ScoreQuery, *, model: str | None) -> Sequence[Call]:
        """One request; with `at_ids` one for each window of 128 positions."""
        if query.at_ids is None:
            return [Call(PATH, scoring_body(query))]
        return [Call(PATH, self._window_body(query, start, end)) for start, end in windows(len(query.response_ids))]

    def _window_body(self, query: ScoreQuery, start: int, end: int) -> dict[str, Any]:
        body = scoring_body(self._window_query(query, start, end))
        assert query.at_ids is not None
        return body | {"token_ids_logprob": np.unique(query.at_ids[start:end])}

    def _window_query(self, query: ScoreQuery, start: int, end: int) -> ScoreQuery:
        """The window as a query of its own: everything before it is its prompt."""
        return ScoreQuery(
            np.concatenate([query.prompt_ids, query.response_ids[:start]]),
            query.response_ids[start:end],
            query.top_k,
            reuse_prefix=query.reuse_prefix,
            vocabulary=query.vocabulary,
        )

    def parse(self, query: ScoreQuery, documents: Sequence[dict[str, Any]]) -> ScoreAnswer:
        """Join the windows."""
        if query.at_ids is None:
            meta = meta_info(documents[0])
            return ScoreAnswer(sampled_logprobs(meta, query), top_logprobs(meta, query))
        parts = [
            self._parse_window(query, start, end, meta_info(document))
            for (start, end), document in zip(windows(len(query.response_ids)), documents, strict=True)
        ]
        tops = [part.top for part in parts if part.top is not None]
        return ScoreAnswer(
            np.concatenate([part.sampled for part in parts]),
            TokenSet(
                np.concatenate([top.ids for top in tops]),
                np.concatenate([top.logprobs for top in tops]),
                np.concatenate([top.valid for top in tops]),
            )
            if tops
            else None,
            np.concatenate([part.at for part in parts if part.at is not None]),
        )

    def _parse_window(self, query: ScoreQuery, start: int, end: int, meta: dict[str, Any]) -> ScoreAnswer:
        assert query.at_ids is not None
        window, wanted = self._window_query(query, start, end), query.at_ids[start:end]
        rows = meta.get("input_token_ids_logprobs")
        if not isinstance(rows, list):
            raise AnswerError("the answer has no input_token_ids_logprobs")
        scored = aligned(rows[-expected_rows(end - start) :], end - start)
        union = np.unique(wanted)
        try:
            ids = np.array([entry[1] for entry in scored[0]], dtype=np.int32)
            values = np.array([[entry[0] for entry in row] for row in scored], dtype=np.float32)
        except (TypeError, IndexError, ValueError):
            raise AnswerError("a row of input_token_ids_logprobs is not a list of [logprob, token_id, text]") from None
        check_echo(ids, union)
        at = np.take_along_axis(values, np.searchsorted(union, wanted), axis=1)
        valid_entries(at)
        return ScoreAnswer(sampled_logprobs(meta, window), top_logprobs(meta, window), at)
