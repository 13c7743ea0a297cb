"""LMDeploy `POST /generate` (0.18.0): a flat body, pairs instead of triples, and no boundary row.

The server must run the PyTorch engine with `--logprobs-mode raw_logprobs` and role Hybrid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from opd_trainer.alignment import score_start
from opd_trainer.sample import TokenSet
from opd_trainer.teachers.adapters.sglang import meta_info, token_set
from opd_trainer.teachers.wire import (
    AnswerError,
    Call,
    ScoreAnswer,
    ScoreQuery,
    TopKShortfallError,
    check_echo,
    check_finite,
)


class LmdeployAdapter:
    """An LMDeploy server; it knows the sampled token and the K best, never given ids."""

    def calls(self, query: ScoreQuery, *, model: str | None) -> Sequence[Call]:
        """One request with the options at the top level."""
        if query.at_ids is not None:
            raise ValueError("LMDeploy cannot score given token ids; use teacher_topk or another backend")
        body: dict[str, Any] = {
            "input_ids": query.input_ids,
            "return_logprob": True,
            "logprob_start_len": score_start(len(query.prompt_ids)) if query.reuse_prefix else 0,
            "max_tokens": 0,
            "stream": False,
        }
        if query.top_k:
            body["top_logprobs_num"] = query.top_k
        return [Call("/generate", body)]

    def parse(self, query: ScoreQuery, documents: Sequence[dict[str, Any]]) -> ScoreAnswer:
        """Pairs [logprob, id] for the tokens after `logprob_start_len`: exactly R rows when it was P - 1."""
        meta = meta_info(documents[0])
        rows = meta.get("input_token_logprobs")
        if not isinstance(rows, list):
            raise AnswerError(
                "the answer has no input_token_logprobs; does the server run --logprobs-mode raw_logprobs?"
            )
        length = len(query.response_ids)
        expected = length if query.reuse_prefix else query.tokens - 1
        if len(rows) != expected:
            raise AnswerError(f"{len(rows)} rows; {expected} were expected")
        try:
            values = np.array([row[0] for row in rows[-length:]], dtype=np.float32)
            ids = [row[1] for row in rows[-length:]]
        except (TypeError, IndexError, ValueError):
            raise AnswerError("a row of input_token_logprobs is not [logprob, token_id]") from None
        check_echo(ids, query.response_ids)
        check_finite(values, query.response_ids)
        return ScoreAnswer(values, self._top(meta, query))

    def _top(self, meta: dict[str, Any], query: ScoreQuery) -> TokenSet | None:
        if not query.top_k:
            return None
        rows = meta.get("input_top_logprobs")
        if not isinstance(rows, list) or len(rows) < len(query.response_ids):
            raise AnswerError("the answer has no input_top_logprobs for every response token")
        rows = rows[-len(query.response_ids) :]
        if min(len(row) for row in rows) < query.top_k:
            raise TopKShortfallError(f"{min(len(row) for row in rows)} tokens per position instead of {query.top_k}")
        values = np.array([[entry[0] for entry in row[: query.top_k]] for row in rows], dtype=np.float32)
        ids = np.array([[entry[1] for entry in row[: query.top_k]] for row in rows], dtype=np.int32)
        return token_set(ids, values, query.top_k)
