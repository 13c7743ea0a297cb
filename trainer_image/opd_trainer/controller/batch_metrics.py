"""Numbers of one batch that the controller can see. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from opd_trainer.sample import Sample


def reverse_kl_sums(sample: Sample) -> tuple[float, float]:
    """(sum over trained tokens of log s - log t, number of trained tokens); s is the learner's value where known."""
    student = sample.old_logprobs if sample.old_logprobs is not None else sample.rollout_logprobs
    if student is None or sample.teacher_logprobs is None or sample.loss_mask is None:
        return 0.0, 0.0
    mask = sample.loss_mask > 0
    gap = student[mask].astype(np.float64) - sample.teacher_logprobs[mask].astype(np.float64)
    return float(gap.sum()), float(mask.sum())


def token_mean_reverse_kl(samples: Iterable[Sample]) -> float | None:
    """Mean over all trained response tokens, in nats; None without tokens."""
    total, count = 0.0, 0.0
    for sample in samples:
        gap, tokens = reverse_kl_sums(sample)
        total, count = total + gap, count + tokens
    return total / count if count else None


def reverse_kl_by(samples: Iterable[Sample], key: str) -> dict[str, float]:
    """Token-mean reverse KL for each value of a sample attribute (`data_source`, `teacher`)."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[str(getattr(sample, key) or "")].append(sample)
    values = {name: token_mean_reverse_kl(members) for name, members in groups.items() if name}
    return {name: value for name, value in values.items() if value is not None}


def batch_metrics(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Lengths, rewards, ages and finish reasons of the samples that a step consumed at weights `version`."""
    lengths = np.array([sample.response_length for sample in samples], dtype=np.float64)
    ages = np.array([version - _oldest(sample) for sample in samples], dtype=np.float64)
    metrics = {
        "response_length": float(lengths.mean()),
        "response_length_max": float(lengths.max()),
        "prompt_length": float(np.mean([len(sample.prompt_ids) for sample in samples])),
        "truncated_fraction": float(np.mean([sample.finish_reason == "length" for sample in samples])),
        "staleness": float(ages.mean()),
        "staleness_max": float(ages.max()),
        "samples": float(len(samples)),
    }
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if rewards:
        metrics["reward"] = float(np.mean(rewards))
    reverse_kl = token_mean_reverse_kl(samples)
    if reverse_kl is not None:
        metrics["opd_reverse_kl"] = reverse_kl
    overlap = set_overlap(samples)
    if overlap is not None:
        metrics["overlap"] = overlap
    return metrics


def rounded_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Durations to a tenth of a millisecond, finer is noise of the clock; other numbers as they are."""
    return {
        name: round(value, 4) if name.startswith("seconds_") or name.endswith("_seconds") else value
        for name, value in metrics.items()
    }


def set_overlap(samples: Iterable[Sample]) -> float | None:
    """Mean share of a position's K best tokens that student and teacher have in common; None where only one side's are known.

    In a union the teacher's half is invalid where the student's has the token; of an intersection only the common ones are valid.
    """
    shares = []
    for sample in samples:
        student, chosen = sample.student_topk, sample.selected
        if student is None or chosen is None or chosen.valid.shape[1] != 2 * student.ids.shape[1]:
            continue
        first, second = np.split(chosen.valid, 2, axis=1)
        shares.append(1.0 - second.mean(axis=1) if second.any() else first.mean(axis=1))
    return float(np.concatenate(shares).mean()) if shares else None


def _oldest(sample: Sample) -> int:
    return min((span.version for span in sample.version_spans), default=sample.start_version)
