"""Our own teacher server: SGLang's `/generate` and, beyond it, ids per position as base64 arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from opd_trainer.teachers.adapters.sglang import PATH, meta_info, sampled_logprobs, scoring_body, top_logprobs
from opd_trainer.teachers.wire import (
    AnswerError,
    Call,
    ScoreAnswer,
    ScoreQuery,
    decode_array,
    encode_array,
    valid_entries,
)

#: Request: base64 int32 [R, K], row j belongs to response token j. Answer: base64 float32 of the same shape.
POSITION_IDS = "position_token_ids_b64"
POSITION_SHAPE = "position_token_ids_shape"
POSITION_LOGPROBS = "input_position_logprobs_b64"


class TransformersAdapter:
    """The server of `opd-trainer serve`."""

    def calls(self, query: ScoreQuery, *, model: str | None) -> Sequence[Call]:
        """Always one request."""
        body = scoring_body(query)
        if query.at_ids is not None:
            ids = query.at_ids.astype(np.int32, copy=False)
            body |= {POSITION_IDS: encode_array(ids), POSITION_SHAPE: list(ids.shape)}
        return [Call(PATH, body)]

    def parse(self, query: ScoreQuery, documents: Sequence[dict[str, Any]]) -> ScoreAnswer:
        """Read the one answer."""
        meta = meta_info(documents[0])
        at = None
        if query.at_ids is not None:
            at = decode_array(meta.get(POSITION_LOGPROBS), np.float32)
            if at.size != query.at_ids.size:
                raise AnswerError(f"{at.size} log-probabilities for {query.at_ids.size} ids")
            at = at.reshape(query.at_ids.shape).astype(np.float32)
            valid_entries(at)
        return ScoreAnswer(sampled_logprobs(meta, query), top_logprobs(meta, query), at)
