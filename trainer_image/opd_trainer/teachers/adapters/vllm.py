"""vLLM: `/v1/completions` with `prompt_logprobs`, and `/inference/v1/generate` where ids per position are wanted.

`prompt_logprobs[i]` scores token i, so the response is rows P..P+R-1 without a shift. A row is a mapping from the id as
text to {logprob, rank}; the actual token is always among them, ranked or not, so a row has K or K + 1 entries.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd_trainer.alignment import score_start
from opd_trainer.sample import TokenSet
from opd_trainer.teachers.wire import (
    AnswerError,
    Call,
    ScoreAnswer,
    ScoreQuery,
    TopKShortfallError,
    check_finite,
    valid_entries,
)


class VllmAdapter:
    """A vLLM server. `max_tokens` is 1 because vLLM refuses 0."""

    def calls(self, query: ScoreQuery, *, model: str | None) -> Sequence[Call]:
        """One request to the endpoint that can answer it."""
        if query.at_ids is None:
            body: dict[str, Any] = {
                "prompt": query.input_ids,
                "max_tokens": 1,
                "temperature": 1.0,
                "prompt_logprobs": query.top_k,
                "stream": False,
            }
            return [Call("/v1/completions", body | ({"model": model} if model else {}))]
        candidates = np.concatenate([query.at_ids, query.response_ids[:, None]], axis=1)
        sampling: dict[str, Any] = {
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprob_token_ids": candidates.astype(np.int32),
            "prompt_logprob_start": score_start(len(query.prompt_ids)),
        }
        if query.top_k:
            sampling["prompt_logprobs"] = query.top_k
        body = {"token_ids": query.input_ids, "sampling_params": sampling, "stream": False}
        return [Call("/inference/v1/generate", body | ({"model": model} if model else {}))]

    def parse(self, query: ScoreQuery, documents: Sequence[dict[str, Any]]) -> ScoreAnswer:
        """Read the one answer of either endpoint."""
        document = documents[0]
        if query.at_ids is None:
            choices = document.get("choices")
            if not isinstance(choices, list) or not choices:
                raise AnswerError("the answer has no choices")
            sampled, top = _from_rows(choices[0].get("prompt_logprobs"), query)
            return ScoreAnswer(sampled, top)
        matrix = _matrix(document.get("prompt_token_id_logprobs"), (len(query.response_ids), query.at_ids.shape[1] + 1))
        check_finite(matrix[:, -1], query.response_ids)
        valid_entries(matrix)
        top = _from_rows(document.get("prompt_logprobs"), query)[1] if query.top_k else None
        return ScoreAnswer(np.ascontiguousarray(matrix[:, -1]), top, np.ascontiguousarray(matrix[:, :-1]))


def _from_rows(rows: Any, query: ScoreQuery) -> tuple[NDArray[np.float32], TokenSet | None]:
    if not isinstance(rows, list):
        raise AnswerError("the answer has no prompt_logprobs")
    if len(rows) != query.tokens:
        raise AnswerError(f"{len(rows)} rows of prompt_logprobs for a sequence of {query.tokens} tokens")
    scored = rows[len(query.prompt_ids) :]
    sampled = np.empty(len(scored), dtype=np.float32)
    for position, (row, token) in enumerate(zip(scored, query.response_ids, strict=True)):
        entry = (row or {}).get(str(int(token)))
        if entry is None:
            raise AnswerError(f"token {int(token)} is missing from the row of response position {position}")
        sampled[position] = np.nan if entry["logprob"] is None else entry["logprob"]
    check_finite(sampled, query.response_ids)
    return sampled, _top(scored, query.top_k) if query.top_k else None


def _top(rows: Sequence[dict[str, dict[str, Any]]], top_k: int) -> TokenSet:
    """The K entries of best rank of each row; the actual token drops out when it is not among them."""
    ids = np.empty((len(rows), top_k), dtype=np.int32)
    logprobs = np.empty((len(rows), top_k), dtype=np.float32)
    for position, row in enumerate(rows):
        best = sorted(row.items(), key=lambda item: item[1]["rank"])[:top_k]
        if len(best) < top_k or best[-1][1]["rank"] > top_k:
            raise TopKShortfallError(f"{len(row) - 1} tokens at response position {position} instead of {top_k}")
        ids[position] = [int(token) for token, _ in best]
        logprobs[position] = [entry["logprob"] for _, entry in best]
    return TokenSet(ids, logprobs, valid_entries(logprobs))


def _matrix(text: Any, shape: tuple[int, int]) -> NDArray[np.float32]:
    """A base64 .npy array of exactly `shape`. Raises AnswerError."""
    if not isinstance(text, str):
        raise AnswerError("the answer has no prompt_token_id_logprobs; it needs vLLM's V2 model runner")
    try:
        array = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise AnswerError(f"prompt_token_id_logprobs is not an array: {error}") from None
    if array.shape != shape:
        raise AnswerError(f"prompt_token_id_logprobs has shape {array.shape}; {shape} was expected")
    return np.asarray(array, dtype=np.float32)
