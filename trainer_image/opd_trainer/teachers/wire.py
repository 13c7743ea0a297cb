"""What a score is, independent of any server's wire format."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from opd_trainer.sample import TokenSet

#: vLLM writes -9999.0 where a probability is zero, because JSON has no infinity.
ZERO_PROBABILITY = -9000.0


class AnswerError(Exception):
    """A server answered with success, but the answer cannot be used. The message says what is wrong with it."""


class TopKShortfallError(AnswerError):
    """The server gave fewer tokens per position than it was asked for."""


@dataclass(frozen=True, slots=True)
class ScoreQuery:
    """One sequence to score: P prompt tokens, R response tokens, and which log-probabilities are wanted."""

    prompt_ids: NDArray[np.int32]  # [P]
    response_ids: NDArray[np.int32]  # [R]
    #: The teacher's K best tokens per position.
    top_k: int = 0
    #: Further ids at each position, for example the student's best tokens.
    at_ids: NDArray[np.int32] | None = None  # [R, K]
    #: False scores from position 0, which keeps a server from using its prefix cache.
    reuse_prefix: bool = True
    #: Size of the teacher's vocabulary, where known.
    vocabulary: int | None = None

    @property
    def tokens(self) -> int:
        """P + R: what the request costs a server."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """Prompt and response, [P + R]."""
        return np.concatenate([self.prompt_ids, self.response_ids]).astype(np.int32, copy=False)


@dataclass(frozen=True, slots=True)
class ScoreAnswer:
    """Aligned natural log-probabilities."""

    sampled: NDArray[np.float32]  # [R]
    top: TokenSet | None = None  # [R, K]
    at: NDArray[np.float32] | None = None  # [R, K]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP POST with a JSON body."""

    path: str
    body: dict[str, Any]


class Adapter(Protocol):
    """Builds requests and reads answers; no I/O, no state."""

    def calls(self, query: ScoreQuery, *, model: str | None) -> Sequence[Call]:
        """The requests of a query, to be sent one after the other. `model` is the served id where the protocol wants it."""

    def parse(self, query: ScoreQuery, documents: Sequence[dict[str, Any]]) -> ScoreAnswer:
        """The answer from the documents of `calls`, in order. Raises AnswerError."""


def decode_array(text: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """A little-endian array from base64. Raises AnswerError."""
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), dtype=np.dtype(dtype).newbyteorder("<"))
    except (TypeError, ValueError) as error:
        raise AnswerError(f"an array in the answer is not base64: {error}") from None


def encode_array(array: NDArray[Any]) -> str:
    """Base64 of the little-endian bytes."""
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(little.tobytes()).decode()


def check_echo(echoed: Sequence[int] | NDArray[Any], sent: NDArray[np.int32]) -> None:
    """Raise AnswerError unless the server scored exactly the tokens that were sent."""
    got = np.asarray(echoed)
    if got.shape != sent.shape or not np.array_equal(got, sent):
        first = "the count" if got.shape != sent.shape else f"position {int(np.argmax(got != sent))}"
        raise AnswerError(f"the echoed token ids differ from the ones that were sent, first at {first}")


def check_finite(logprobs: NDArray[np.float32], ids: NDArray[np.int32]) -> None:
    """Raise AnswerError on NaN, infinity, a positive value, or probability zero at a sampled token."""
    bad = ~np.isfinite(logprobs) | (logprobs <= ZERO_PROBABILITY) | (logprobs > 1e-3)
    if bad.any():
        at = int(np.argmax(bad))
        raise AnswerError(f"log-probability {logprobs[at]} at response position {at} (token {int(ids[at])})")


def valid_entries(logprobs: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which entries of a set have a usable log-probability. NaN is an error, probability zero is merely unusable."""
    if np.isnan(logprobs).any():
        raise AnswerError("NaN among the log-probabilities of a token set")
    return np.isfinite(logprobs) & (logprobs > ZERO_PROBABILITY)
