"""The one value that travels the whole way: prompt -> rollout -> reward -> teacher -> batch.

Each stage fills its own fields. P prompt tokens, R response tokens, K selected tokens per position. Response token j is
predicted at position P - 1 + j.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class SampleState(StrEnum):
    """PENDING -> RUNNING -> GENERATED -> SCORED -> READY -> CONSUMED, or one of the three other exits."""

    PENDING = "pending"
    RUNNING = "running"
    GENERATED = "generated"
    SCORED = "scored"
    READY = "ready"
    CONSUMED = "consumed"
    FAILED = "failed"
    FILTERED = "filtered"
    STALE = "stale"


#: States a sample never leaves.
EXITS = frozenset({SampleState.CONSUMED, SampleState.FAILED, SampleState.FILTERED, SampleState.STALE})


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, end) were written by weights `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenSet:
    """K candidate tokens at each of R positions, natural log-probabilities of whoever produced it."""

    ids: NDArray[np.int32]  # [R, K]
    logprobs: NDArray[np.float32]  # [R, K]
    valid: NDArray[np.bool_]  # [R, K]


@dataclass(slots=True)
class Sample:
    """One response to one prompt."""

    sample_id: int
    group_id: int
    data_source: str
    prompt_ids: NDArray[np.int32]  # [P]
    prompt_text: str = ""
    answer: Any = None
    #: The whole record of the data set, for rewards and filters.
    record: dict[str, Any] = field(default_factory=dict)
    state: SampleState = SampleState.PENDING
    #: Weight version when the rollout started.
    start_version: int = 0

    # rollout
    response_ids: NDArray[np.int32] | None = None  # [R]
    response_text: str = ""
    rollout_logprobs: NDArray[np.float32] | None = None  # [R], temperature-scaled as the engine samples
    loss_mask: NDArray[np.float32] | None = None  # [R], 1.0 = trained
    finish_reason: str = ""  # stop | length | abort
    version_spans: tuple[VersionSpan, ...] = ()
    student_topk: TokenSet | None = None  # student_topk, union, intersection

    # reward
    reward: float | None = None

    # teacher
    teacher: str | None = None
    teacher_logprobs: NDArray[np.float32] | None = None  # [R], of the sampled tokens
    #: Tokens that the set divergence compares, with the teacher's log-probabilities at them; None for student_sampled.
    selected: TokenSet | None = None

    # learner
    old_logprobs: NDArray[np.float32] | None = None  # [R], from pass 1 of the learner

    error: str | None = None

    @property
    def response_length(self) -> int:
        """R; 0 before the rollout."""
        return 0 if self.response_ids is None else len(self.response_ids)
