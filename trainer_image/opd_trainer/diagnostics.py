"""What a run records besides metrics: one record a sample, token payloads, top-k payloads. Bounded, with 1-based periods.

Names and fields follow research practice (NeMo-RL's OPD diagnostics); log-probabilities are stored, never raw logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd_api.v1alpha1 import Diagnostics, TopkStatsMode
from opd_trainer.report.records import SampleRecord, TokenRecords
from opd_trainer.sample import Sample, TokenSet

TOKEN_FORMAT = 1
TOPK_FORMAT = 2
#: Bounds of what one step may write.
SAMPLES_PER_STEP = 512
TOKEN_SAMPLES_PER_STEP = 16
TOKENS_PER_SAMPLE = 1024
TEXT_CHARACTERS = 8000
PAYLOADS_KEPT = 20

SplitTokens = Callable[[NDArray[np.int32]], list[str]]


def due(step: int, period: int) -> bool:
    """1-based: period 5 records steps 5, 10, ..."""
    return step % period == 0


def student_logprobs(sample: Sample) -> NDArray[np.float32] | None:
    """The learner's log-probabilities where known, else the engine's."""
    return sample.old_logprobs if sample.old_logprobs is not None else sample.rollout_logprobs


def sample_record(
    sample: Sample,
    *,
    step: int,
    attempt: int,
    version: int,
    text: bool,
    split: SplitTokens | None,
    evaluation: bool = False,
) -> SampleRecord:
    """The record of one sample. `split` given means that its tokens are recorded too."""
    gap = _gap(sample)
    oldest = min((span.version for span in sample.version_spans), default=sample.start_version)
    return SampleRecord(
        step=step,
        time=time.time(),
        attempt=attempt,
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        data_source=sample.data_source,
        teacher=sample.teacher,
        prompt_length=len(sample.prompt_ids),
        response_length=sample.response_length,
        finish_reason=sample.finish_reason,
        staleness=version - oldest,
        reward=sample.reward,
        trained_tokens=len(gap),
        teacher_student_logprob_gap_sum=float(gap.sum()) if len(gap) else None,
        teacher_student_logprob_gap_mean=float(gap.mean()) if len(gap) else None,
        teacher_student_abs_logprob_gap_mean=float(np.abs(gap).mean()) if len(gap) else None,
        evaluation=evaluation,
        state="evaluated" if evaluation else sample.state.value,
        error=sample.error,
        prompt=sample.prompt_text[:TEXT_CHARACTERS] if text else None,
        response=sample.response_text[:TEXT_CHARACTERS] if text else None,
        tokens=_tokens(sample, split) if split is not None else None,
    )


def _gap(sample: Sample) -> NDArray[np.float64]:
    student, teacher, mask = student_logprobs(sample), sample.teacher_logprobs, sample.loss_mask
    if student is None or teacher is None or mask is None:
        return np.zeros(0)
    return (teacher.astype(np.float64) - student.astype(np.float64))[mask > 0]


def _tokens(sample: Sample, split: SplitTokens) -> TokenRecords | None:
    if sample.response_ids is None or sample.loss_mask is None:
        return None
    ids = sample.response_ids[:TOKENS_PER_SAMPLE]
    return TokenRecords(
        text=split(ids),
        ids=ids.tolist(),
        student_logprobs=_values(student_logprobs(sample), len(ids)),
        teacher_logprobs=_values(sample.teacher_logprobs, len(ids)),
        mask=[int(value > 0) for value in sample.loss_mask[: len(ids)]],
    )


def _values(logprobs: NDArray[np.float32] | None, length: int) -> list[float | None]:
    if logprobs is None:
        return [None] * length
    return [float(value) if np.isfinite(value) else None for value in logprobs[:length].round(5)]


def token_payload(samples: Sequence[Sample], step: int) -> dict[str, NDArray[Any]]:
    """Flat arrays over all recorded tokens of a step, [N] each."""
    rows = [(index, sample) for index, sample in enumerate(samples) if sample.response_ids is not None]

    def joined(of: Callable[[Sample], NDArray[Any] | None]) -> NDArray[Any]:
        parts = [of(sample) for _, sample in rows]
        filled = [
            part if part is not None else np.full(sample.response_length, np.nan, np.float32)
            for part, (_, sample) in zip(parts, rows, strict=True)
        ]
        return np.concatenate([part[:TOKENS_PER_SAMPLE] for part in filled]) if filled else np.zeros(0)

    teacher, student = joined(lambda s: s.teacher_logprobs), joined(student_logprobs)
    return {
        "format_version": np.array(TOKEN_FORMAT),
        "step": np.array(step),
        "token_sample_index": joined(lambda s: np.full(s.response_length, s.sample_id, np.int64)),
        "token_sequence_position": joined(lambda s: np.arange(s.response_length) + len(s.prompt_ids)),
        "token_response_position": joined(lambda s: np.arange(s.response_length)),
        "token_ids": joined(lambda s: s.response_ids),
        "token_loss_mask": joined(lambda s: s.loss_mask),
        "student_prev_logprobs": student,
        "teacher_logprobs": teacher,
        "generation_logprobs": joined(lambda s: s.rollout_logprobs),
        "teacher_student_logprob_gap": teacher - student,
    }


def topk_payload(
    samples: Sequence[Sample], step: int, *, k: int, max_tokens: int, mode: TopkStatsMode, seed: int = 0
) -> dict[str, NDArray[Any]]:
    """Top-k sets of at most `max_tokens` positions; the positions are chosen before anything is copied.

    Sets that the run does not have (no engine top-k, or no teacher set) are absent; with both, their overlap is added.
    """
    with_sets = [s for s in samples if s.student_topk is not None or s.selected is not None]
    positions = [(s, position) for s in with_sets for position in range(s.response_length)]
    if len(positions) > max_tokens:
        chosen = np.random.default_rng([seed, step]).choice(len(positions), size=max_tokens, replace=False)
        positions = [positions[index] for index in sorted(chosen)]
    payload: dict[str, NDArray[Any]] = {
        "format_version": np.array(TOPK_FORMAT),
        "step": np.array(step),
        "token_sample_index": np.array([s.sample_id for s, _ in positions], np.int64),
        "token_response_position": np.array([position for _, position in positions], np.int64),
    }
    student = _rows(positions, lambda s: s.student_topk, k)
    teacher = _rows(positions, lambda s: s.selected, k) if mode is TopkStatsMode.ONLINE else None
    for name, sets in (("student", student), ("teacher", teacher)):
        if sets is not None:
            payload[f"{name}_topk_token_ids"], payload[f"{name}_topk_logprobs"] = sets
    if student is not None and teacher is not None:
        payload |= _overlap(student[0], teacher[0])
    return payload


def _rows(
    positions: list[tuple[Sample, int]], of: Callable[[Sample], TokenSet | None], k: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
    if not positions or any(of(sample) is None for sample, _ in positions):
        return None
    ids = np.full((len(positions), k), -1, np.int32)
    logprobs = np.full((len(positions), k), -np.inf, np.float32)
    for row, (sample, position) in enumerate(positions):
        tokens = of(sample)
        assert tokens is not None
        valid = tokens.valid[position]
        order = np.argsort(-tokens.logprobs[position][valid])[:k]
        ids[row, : len(order)] = tokens.ids[position][valid][order]
        logprobs[row, : len(order)] = tokens.logprobs[position][valid][order]
    return ids, logprobs


def _overlap(student: NDArray[np.int32], teacher: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
    equal = (student[:, :, None] == teacher[:, None, :]) & (student[:, :, None] >= 0)
    intersection = equal.any(axis=2).sum(axis=1)
    union = (student >= 0).sum(axis=1) + (teacher >= 0).sum(axis=1) - intersection
    return {
        "topk_intersection_size": intersection,
        "topk_jaccard": intersection / np.maximum(union, 1),
        "top1_agreement": student[:, 0] == teacher[:, 0],
    }


class Payloads:
    """Token and top-k payloads in `<run>/diagnostics`, the newest of each kind."""

    def __init__(self, directory: Path, config: Diagnostics, attempt: int) -> None:
        self._directory = directory
        self._config = config
        self._attempt = attempt

    def write(self, samples: Sequence[Sample], step: int) -> None:
        """Blocks on the disk; call it in a thread."""
        config = self._config
        if config.token_stats and due(step, config.token_period):
            self._save("tokens", step, token_payload(samples[:SAMPLES_PER_STEP], step))
        if config.topk_stats and due(step, config.topk_period):
            payload = topk_payload(
                samples, step, k=config.topk_stats_k, max_tokens=config.topk_max_tokens, mode=config.topk_stats_mode
            )
            self._save("topk", step, payload)

    def _save(self, kind: str, step: int, payload: dict[str, NDArray[Any]]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(self._directory / f"{kind}-step-{step}.a{self._attempt}.npz", **payload)  # type: ignore[arg-type]
        files = sorted(self._directory.glob(f"{kind}-step-*.npz"), key=lambda path: path.stat().st_mtime)
        for path in files[:-PAYLOADS_KEPT]:
            path.unlink(missing_ok=True)
