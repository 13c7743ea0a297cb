"""`POST /generate` of the teacher server: from JSON to tasks, from scores to JSON. No I/O.

The subset of SGLang's protocol that scoring needs, answered in SGLang's shapes, and ids per position beside it.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd_trainer.teachers.adapters.transformers import POSITION_IDS, POSITION_LOGPROBS, POSITION_SHAPE
from opd_trainer.teachers.scoring import ScoreRows, ScoreTask
from opd_trainer.teachers.wire import encode_array

#: Options of SGLang's request that change nothing here.
IGNORED = {"rid", "stream", "return_text_in_logprobs", "extra_key", "priority", "routed_dp_rank", "log_metrics"}
KNOWN = IGNORED | {
    "input_ids",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_flat_raw_top_logprobs",
    "return_flat_raw_top_logprobs_b64",
    POSITION_IDS,
    POSITION_SHAPE,
}


class RequestError(ValueError):
    """The request cannot be served; answered with status 400."""


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed request: one task for each sequence."""

    tasks: tuple[ScoreTask, ...]
    batched: bool
    flat: bool
    base64: bool


def parse_request(body: Any, *, vocabulary: int, context: int) -> Request:
    """Raises RequestError with a message for the caller. `context` is the longest sequence, in tokens."""
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    if unknown := set(body) - KNOWN:
        raise RequestError(f"this server does not know {', '.join(sorted(unknown))}")
    if body.get("stream"):
        raise RequestError("this server does not stream")
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict) or sampling.get("max_new_tokens") != 0:
        raise RequestError("this server only scores: sampling_params.max_new_tokens must be 0")
    if body.get("return_logprob") is not True:
        raise RequestError("return_logprob must be true")
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids:
        raise RequestError("input_ids must be a list of token ids, or a list of such lists")
    batched = isinstance(ids[0], list)
    sequences = ids if batched else [ids]
    if batched and POSITION_IDS in body:
        raise RequestError(f"{POSITION_IDS} needs one sequence a request")
    tasks = tuple(_task(sequence, body, vocabulary, context) for sequence in sequences)
    return Request(
        tasks,
        batched,
        bool(body.get("return_flat_raw_top_logprobs")),
        bool(body.get("return_flat_raw_top_logprobs_b64")),
    )


def _task(sequence: Any, body: dict[str, Any], vocabulary: int, context: int) -> ScoreTask:
    ids = _ids(sequence, vocabulary, "input_ids")
    if len(ids) < 2:
        raise RequestError("a sequence needs at least two tokens to be scored")
    if len(ids) > context:
        raise RequestError(f"the sequence has {len(ids)} tokens, the context is {context}")
    start = body.get("logprob_start_len", 0)
    if not isinstance(start, int) or not 0 <= start < len(ids) - 1:
        raise RequestError(f"logprob_start_len must be between 0 and {len(ids) - 2}")
    top_k = body.get("top_logprobs_num") or 0
    if not isinstance(top_k, int) or not 0 <= top_k <= vocabulary:
        raise RequestError(f"top_logprobs_num must be between 0 and {vocabulary}")
    broadcast = body.get("token_ids_logprob")
    task = ScoreTask(ids, start, top_k, None if broadcast is None else _ids(broadcast, vocabulary, "token_ids_logprob"))
    if POSITION_IDS not in body:
        return task
    return ScoreTask(ids, start, top_k, task.broadcast_ids, _position_ids(body, vocabulary, task.rows))


def _ids(values: Any, vocabulary: int, name: str) -> NDArray[np.int64]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise RequestError(f"{name} must hold whole numbers")
    array = np.asarray(values, dtype=np.int64)
    if array.size and (array.min() < 0 or array.max() >= vocabulary):
        raise RequestError(f"{name} must be at least 0 and below {vocabulary}, the size of the vocabulary")
    return array


def _position_ids(body: dict[str, Any], vocabulary: int, rows: int) -> NDArray[np.int64]:
    """[R, K] for the last R scored tokens, as [rows, K]: earlier rows are padded with id 0 and cut away again."""
    try:
        flat = np.frombuffer(base64.b64decode(body[POSITION_IDS], validate=True), dtype="<i4")
        count, width = (int(number) for number in body[POSITION_SHAPE])
        array = flat.reshape(count, width).astype(np.int64)
    except (KeyError, TypeError, ValueError, binascii.Error):
        raise RequestError(f"{POSITION_IDS} must be base64 of int32 with the shape in {POSITION_SHAPE}") from None
    if not 0 < count <= rows or width < 1:
        raise RequestError(f"{POSITION_SHAPE} has {count} rows; the request scores {rows} tokens")
    if array.min() < 0 or array.max() >= vocabulary:
        raise RequestError(f"{POSITION_IDS} must be at least 0 and below {vocabulary}, the size of the vocabulary")
    return np.concatenate([np.zeros((rows - count, width), np.int64), array])


def answer(request: Request, results: list[ScoreRows], seconds: float, body: dict[str, Any]) -> Any:
    """The JSON document in SGLang's shape."""
    documents = [
        {"text": "", "output_ids": [], "meta_info": _meta(task, rows, request, seconds, body)}
        for task, rows in zip(request.tasks, results, strict=True)
    ]
    return documents if request.batched else documents[0]


def _meta(task: ScoreTask, rows: ScoreRows, request: Request, seconds: float, body: dict[str, Any]) -> dict[str, Any]:
    ids = task.ids[task.start :].tolist()
    meta: dict[str, Any] = {
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(task.ids),
        "completion_tokens": 0,
        "cached_tokens": 0,
        "e2e_latency": seconds,
        "input_token_logprobs": [
            [None, ids[0], None],
            *([value, token, None] for value, token in zip(rows.sampled.tolist(), ids[1:], strict=True)),
        ],
        "output_token_logprobs": [],
    }
    if rows.top_ids is not None and rows.top_logprobs is not None:
        meta |= _top(rows.top_ids, rows.top_logprobs, request)
    if rows.broadcast is not None and task.broadcast_ids is not None:
        columns = task.broadcast_ids.tolist()
        meta["input_token_ids_logprobs"] = [
            None,
            *(
                [[value, token, None] for value, token in zip(row, columns, strict=True)]
                for row in rows.broadcast.tolist()
            ),
        ]
    if rows.position is not None:
        meta[POSITION_LOGPROBS] = encode_array(rows.position[len(rows.position) - int(body[POSITION_SHAPE][0]) :])
    return meta


def _top(ids: NDArray[np.int32], logprobs: NDArray[np.float32], request: Request) -> dict[str, Any]:
    if not request.flat:
        rows = [
            [[value, token, None] for value, token in zip(values, tokens, strict=True)]
            for values, tokens in zip(logprobs.tolist(), ids.tolist(), strict=True)
        ]
        return {"input_top_logprobs": [None, *rows]}
    fields: dict[str, Any] = {"input_top_logprobs_shape": list(ids.shape), "input_top_logprobs_null_prefix": 1}
    if request.base64:
        return fields | {
            "input_top_logprobs_val_flat_b64": encode_array(logprobs),
            "input_top_logprobs_idx_flat_b64": encode_array(ids),
            "input_top_logprobs_val_flat_b64_dtype": "float32",
            "input_top_logprobs_idx_flat_b64_dtype": "int32",
        }
    return fields | {
        "input_top_logprobs_val_flat": logprobs.reshape(-1).tolist(),
        "input_top_logprobs_idx_flat": ids.reshape(-1).tolist(),
    }
