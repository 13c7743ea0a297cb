"""A made-up run directory for the report: two sources, two teachers, two attempts, held-out answers before and after."""

from __future__ import annotations

import math
import random
from pathlib import Path

from opd_trainer.report.records import (
    METRICS_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
    FailureRecord,
    MetricsRecord,
    RunSummary,
    SampleRecord,
    TokenRecords,
    by_source,
    by_teacher,
)

START = 1_790_000_000.0
PROMPTS = (
    "Natalia sold 48 clips in April and half as many in May. How many altogether?",
    "Write a function that reverses a string.",
    "What is the capital of France? Answer in one word.",
)
BEFORE = (
    "Nat alia Natalia sold sold 48 clip clip clip and and and the",
    "def def return return s s s(((",
    "The the capital of of",
)
AFTER = (
    "In May she sold 48 / 2 = 24 clips.\n\nAltogether 48 + 24 = 72.",
    "def reverse(text: str) -> str:\n    return text[::-1]",
    "Paris.",
)


def write_run(directory: Path, *, steps: int = 60, seed: int = 0) -> Path:
    """Write metrics.jsonl, samples.jsonl and summary.json below `directory`/logs; returns the directory."""
    rng = random.Random(seed)
    logs = directory / "logs"
    logs.mkdir(parents=True)
    metrics, samples = [], []
    for step in range(steps + 1):
        share = math.exp(-3 * step / steps)
        kl = 0.08 + 1.1 * share
        attempt = 1 if step < steps * 0.6 else 2
        time = START + 40 * step
        if step:
            metrics.append(MetricsRecord(step, time, attempt, _metrics(rng, kl, share)))
            samples += [_sample(rng, step, time, attempt, kl, number) for number in range(4)]
        if step % 20 == 0:
            held_out = {
                "eval_opd_reverse_kl": kl * 1.05,
                "eval_response_length": 40 + 20 * share,
                "eval_reward": 0.7 - 0.6 * share,
            }
            metrics.append(MetricsRecord(step, time, attempt, held_out))
            samples += [_held_out(rng, step, time, attempt, kl, number, step == 0) for number in range(len(PROMPTS))]
    (logs / METRICS_FILE).write_text("".join(record.to_json() + "\n" for record in metrics), encoding="utf-8")
    (logs / SAMPLES_FILE).write_text("".join(record.to_json() + "\n" for record in samples), encoding="utf-8")
    (logs / SUMMARY_FILE).write_text(_summary(steps).to_json(), encoding="utf-8")
    return directory


def _metrics(rng: random.Random, kl: float, share: float) -> dict[str, float]:
    noise = rng.gauss(0, 0.06)
    return {
        "opd_reverse_kl": kl + noise,
        "loss": 0.6 * kl + noise,
        "response_length": 48 + 30 * share + rng.gauss(0, 4),
        "entropy": 0.9 + 1.4 * share + rng.gauss(0, 0.05),
        "student_mass": 0.97 - 0.25 * share,
        "teacher_mass": 0.985 + rng.gauss(0, 0.002),
        "overlap": 0.9 - 0.35 * share,
        "reward": max(0.0, 0.7 - 0.65 * share + rng.gauss(0, 0.04)),
        "staleness": rng.choice([0.0, 0.5, 1.0]),
        "staleness_max": 1.0,
        "grad_norm": 0.4 + share + abs(rng.gauss(0, 0.1)),
        "learning_rate": 1e-6,
        "seconds_rollout": 14 + rng.gauss(0, 1),
        "seconds_train": 9 + rng.gauss(0, 0.5),
        "seconds_publish": 1.5,
        "seconds_checkpoint": 0.4,
        by_source("opd_reverse_kl", "gsm8k"): kl + 0.05 + noise,
        by_source("opd_reverse_kl", "code"): 0.8 * kl + noise,
        by_teacher("opd_reverse_kl", "math"): kl + 0.05 + noise,
        by_teacher("opd_reverse_kl", "coder"): 0.8 * kl + noise,
    }


def _tokens(rng: random.Random, text: str, kl: float) -> TokenRecords:
    words = [word + ("" if word.endswith("\n") else " ") for word in text.replace("\n", "\n ").split(" ")]
    student = [-abs(rng.gauss(0, 0.7)) for _ in words]
    teacher = [value - rng.gauss(kl, 1.2) if rng.random() < 0.8 else value for value in student]
    mask = [1] * len(words)
    return TokenRecords(words, list(range(len(words))), list(student), list(teacher), mask)


def _sample(rng: random.Random, step: int, time: float, attempt: int, kl: float, number: int) -> SampleRecord:
    math_source = number % 2 == 0
    text = AFTER[0 if math_source else 1]
    return SampleRecord(
        step=step,
        time=time,
        attempt=attempt,
        sample_id=step * 4 + number,
        group_id=step * 2 + number // 2,
        data_source="gsm8k" if math_source else "code",
        teacher="math" if math_source else "coder",
        prompt_length=18,
        response_length=24,
        finish_reason="stop",
        staleness=number % 2,
        reward=float(rng.random() < 0.5),
        trained_tokens=24,
        teacher_student_logprob_gap_sum=-24 * kl,
        teacher_student_logprob_gap_mean=-kl,
        teacher_student_abs_logprob_gap_mean=kl * 1.2,
        prompt=PROMPTS[0 if math_source else 1],
        response=text,
        tokens=_tokens(rng, text, kl) if step % 5 == 0 else None,
    )


def _held_out(
    rng: random.Random, step: int, time: float, attempt: int, kl: float, number: int, first: bool
) -> SampleRecord:
    text = (BEFORE if first else AFTER)[number]
    return SampleRecord(
        step=step,
        time=time,
        attempt=attempt,
        sample_id=-1 - number,
        group_id=-1 - number,
        data_source="gsm8k",
        teacher="math",
        prompt_length=18,
        response_length=len(text.split()),
        finish_reason="stop",
        reward=0.0 if first else 1.0,
        trained_tokens=10,
        teacher_student_logprob_gap_sum=-10 * kl,
        teacher_student_logprob_gap_mean=-kl,
        evaluation=True,
        state="evaluated",
        prompt=PROMPTS[number],
        response=text,
        tokens=_tokens(rng, text, kl),
    )


def _summary(steps: int) -> RunSummary:
    return RunSummary(
        name="math",
        namespace="team-a",
        attempt=2,
        started=START,
        updated=START + 40 * steps + 90,
        step=steps,
        total_steps=steps,
        outcome="Succeeded",
        message="finished",
        checkpoint=f"/data/opd/team-a/math-0a1b2c3d/checkpoints/step-{steps}.a2",
        exported_model="/data/opd/team-a/math-0a1b2c3d/export",
        configuration={"device": "cuda", "training": {"steps": steps, "learningRate": 1e-6}},
        versions={
            "opd": "0.1.0",
            "python": "3.11.2",
            "torch": "2.14.1",
            "transformers": "5.19.0",
            "ray": "2.60.0",
            "device": "cuda",
        },
        failures=[
            FailureRecord(
                START + 900,
                1,
                22,
                "Infrastructure",
                "TeacherUnreachable",
                "teacher-math-1: connection reset by peer",
                3,
            ),
            FailureRecord(
                START + 1440, 1, 36, "Attempt", "AttemptFailed", "the Ray head is gone; resumed from step-36.a1"
            ),
        ],
        sample_states={"consumed": steps * 4, "failed": 3},
    )
