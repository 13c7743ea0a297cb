"""Enumerations of the API: no two values of a choice do the same to the student, so none is an alias by accident."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opd_testing.learner_update import GAE, SEQUENCES, SETS, SEVERAL, TASK, Update, update_of

from opd_api.v1alpha1 import Divergence, LossAggregation, PolicyLossType, Tail

SAMPLED = ["k1", "k2", "k3", "abs"]
SET_KINDS = [
    kind.value for kind in Divergence if kind.value in ("reverse_kl", "forward_kl", "jsd", "mixed", "low_var_kl")
]
CHOICES: dict[str, list[dict[str, Any]]] = {
    "sampled advantage": [{"distillation": {"divergence": kind}} for kind in SAMPLED],
    "sampled loss": [{"distillation": {"signal": "loss", "divergence": kind}} for kind in SAMPLED],
    "set": [{"distillation": {**SETS, "divergence": kind}} for kind in SET_KINDS],
    "tail": [
        {"distillation": {**SETS, "tokenSelection": "student_topk", "tail": tail.value}} for tail in Tail
    ],
    "selection": [
        {"distillation": {**SETS, "tokenSelection": selection}}
        for selection in ("student_topk", "teacher_topk", "union", "intersection")
    ],
    "policy loss": [
        {"task": {"policyLoss": {"type": kind.value, "clipRatioHigh": 0.05, "clipRatioLow": 0.05}}, "training": {**SEVERAL, **SEQUENCES}}
        for kind in PolicyLossType
    ],
    "aggregation": [
        {"training": {"lossAggregation": mode.value, "gradClip": 1e9, "updatesPerStep": 2}} for mode in LossAggregation
    ],
    "estimator": [
        {"task": {**TASK, "advantageEstimator": name}}
        for name in ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    ] + [{"task": GAE}],
    "correction": [{"training": {"rolloutCorrection": {"type": kind, "low": 0.98, "high": 1.02}}} for kind in ("none", "tis", "icepop", "mis")],
    "level": [{"training": {"rolloutCorrection": {"type": "tis", "level": level}}} for level in ("token", "sequence", "geometric")],
    "whiten": [{"distillation": {"whiten": mode}, "task": TASK} for mode in ("none", "beforeDistillation", "afterDistillation")],
    "schedule": [{"training": {"schedule": mode, "updatesPerStep": 6}} for mode in ("constant", "linear", "cosine")],
}  # fmt: skip


@pytest.fixture(scope="module")
def update(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Update]:
    yield from update_of(tmp_path_factory.mktemp("update"))


@pytest.mark.parametrize("choice", CHOICES)
def test_every_value_of_a_choice_gives_an_update_of_its_own(update: Update, choice: str) -> None:
    variants = CHOICES[choice]
    results = [update(sections) for sections in variants]
    for first in range(len(results)):
        for second in range(first):
            gap = float((results[first] - results[second]).abs().max())
            assert gap > 1e-7, f"{variants[first]} and {variants[second]} do the same"
