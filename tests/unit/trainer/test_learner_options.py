"""Every option of `distillation`, `task` and the loss part of `training` reaches the update of the student.

A field that is neither in a case below nor listed as somebody else's fails: an option that changes nothing cannot hide.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opd_testing.learner_update import GAE, SEQUENCES, SETS, SEVERAL, TASK, Update, update_of

from opd_api.v1alpha1 import ApiModel, Critic, Distillation, PolicyLoss, RolloutCorrection, Task, Training

#: path of the option -> (base sections, the same path's other value)
Case = tuple[dict[str, Any], Any]

DISTILLATION: dict[str, Case] = {
    "signal": ({"distillation": {"divergence": "k2"}}, "loss"),
    "coefficient": ({"distillation": {}, "task": TASK}, 0.3),
    "token_selection": ({"distillation": SETS}, "union"),
    "top_k": ({"distillation": SETS}, 2),
    "divergence": ({"distillation": SETS}, "jsd"),
    "jsd_alpha": ({"distillation": {**SETS, "divergence": "jsd"}}, 0.2),
    "mixed_forward_weight": ({"distillation": {**SETS, "divergence": "mixed"}}, 0.1),
    "tail": ({"distillation": SETS}, "norm"),
    "straight_through": ({"distillation": {"signal": "loss", "divergence": "k3"}}, True),
    "log_prob_floor": ({"distillation": SETS}, -5.0),
    "per_token_clip": ({"distillation": {}}, 0.3),
    "importance_clip": ({"distillation": {"signal": "loss", "divergence": "k2"}, "training": SEVERAL}, 1.01),
    "discount_factor": ({"distillation": {}}, 0.7),
    "proximal_teacher_alpha": ({"distillation": {}}, 0.2),
    "subtract_baseline": ({"distillation": {}}, True),
    "student_log_probs": ({"distillation": {}}, "rollout"),
    "whiten": ({"distillation": {}}, "afterDistillation"),
    "advantage_clip": ({"distillation": {}}, 0.2),
}
TASK_CASES: dict[str, Case] = {
    "task_adv_weight": ({"task": TASK}, 1.5),
    "advantage_estimator": ({"task": TASK}, "rloo"),
    "critic": ({"task": GAE}, {"model": {"source": "CRITIC"}, "learningRate": 0.5}),
    "policy_loss": ({"task": {}, "training": SEVERAL}, {"type": "reinforce"}),
}
POLICY: dict[str, Case] = {
    "type": ({"task": {"policyLoss": {}}, "training": SEVERAL}, "importance_sampling"),
    "clip_ratio_low": ({"task": {"policyLoss": {"clipRatioLow": 0.01}}, "training": SEVERAL}, 0.9),
    "clip_ratio_high": ({"task": {"policyLoss": {"clipRatioHigh": 0.01}}, "training": SEVERAL}, 5.0),
    "clip_ratio_c": (
        {"task": {"policyLoss": {"clipRatioC": 1.001}}, "training": SEVERAL},
        50.0,
    ),
    "tau_pos": ({"task": {"policyLoss": {"type": "sapo"}}, "training": {**SEVERAL, **SEQUENCES}}, 3.0),
    "tau_neg": ({"task": {"policyLoss": {"type": "sapo"}}, "training": {**SEVERAL, **SEQUENCES}}, 3.0),
}
CRITIC: dict[str, Case] = {
    "model": ({"task": GAE, "training": SEVERAL}, {"source": "OTHER"}),
    "learning_rate": ({"task": GAE, "training": SEVERAL}, 0.5),
    "clip": ({"task": {**GAE, "critic": {**GAE["critic"], "learningRate": 0.002}}, "training": SEVERAL}, 1e-4),
}
CORRECTION: dict[str, Case] = {
    "type": ({"training": {"rolloutCorrection": {"type": "none"}}}, "tis"),
    "level": ({"training": {"rolloutCorrection": {"type": "tis"}}}, "geometric"),
    "low": ({"training": {"rolloutCorrection": {"type": "icepop"}}}, 1.0),
    "high": ({"training": {"rolloutCorrection": {"type": "tis"}}}, 1.0),
    "veto": ({"training": {"rolloutCorrection": {"type": "tis"}}}, 0.95),
}
TRAINING: dict[str, Case] = {
    "updates_per_step": ({"training": {}}, 3),
    "learning_rate": ({"training": {}}, 0.02),
    "schedule": ({"training": {"updatesPerStep": 3}}, "linear"),
    "warmup_steps": ({"training": {}}, 2),
    "weight_decay": ({"training": {}}, 0.5),
    "betas": ({"training": {"updatesPerStep": 3}}, [0.2, 0.3]),
    "grad_clip": ({"training": {"gradClip": 1e9, "updatesPerStep": 3}}, 1e-3),
    "dtype": ({"training": {}}, "bf16"),
    "loss_aggregation": ({"training": {"updatesPerStep": 3, "gradClip": 1e9}}, "token-sum"),
    "steps": ({"training": {"schedule": "linear", "updatesPerStep": 3}}, 2),
}
#: Fields that other parts of the trainer read, and fields whose value may not change the update.
ELSEWHERE = {
    Task: {"reward": "rollout", "filter": "rollout"},
    Training: {
        "epochs": "controller (total steps)",
        "gpus": "placement; test_learner_ranks",
        "prompts_per_step": "controller",
        "max_tokens_per_micro_batch": "changes no gradient; test_learner_numbers",
        "activation_checkpointing": "changes no gradient; test_learner_numbers",
        "seed": "adapters; test_learner_adapters",
        "rollout_correction": "own table",
        "checkpoint": "controller",
        "evaluation": "controller",
        "weight_sync": "engines",
    },
}
TABLES: list[tuple[type[ApiModel], tuple[str, ...], dict[str, Case]]] = [
    (Distillation, ("distillation",), DISTILLATION),
    (Task, ("task",), TASK_CASES),
    (PolicyLoss, ("task", "policyLoss"), POLICY),
    (Critic, ("task", "critic"), CRITIC),
    (RolloutCorrection, ("training", "rolloutCorrection"), CORRECTION),
    (Training, ("training",), TRAINING),
]


@pytest.fixture(scope="module")
def update(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Update]:
    yield from update_of(tmp_path_factory.mktemp("update"))


def alias(model: type[ApiModel], field: str) -> str:
    return str(model.model_fields[field].alias)


def with_value(sections: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    if not path:
        return value
    return {**sections, path[0]: with_value(sections.get(path[0]) or {}, path[1:], value)}


CASES = [
    pytest.param(model, prefix, field, table[field], id=f"{'.'.join(prefix)}.{alias(model, field)}")
    for model, prefix, table in TABLES
    for field in table
]


@pytest.mark.parametrize(("model", "prefix", "field", "case"), CASES)
def test_the_option_changes_the_update(
    update: Update, model: type[ApiModel], prefix: tuple[str, ...], field: str, case: Case
) -> None:
    base, value = case
    changed = with_value(base, (*prefix, alias(model, field)), value)
    difference = (update(base) - update(changed)).abs().max()
    assert float(difference) > 1e-6, f"{alias(model, field)} changes nothing"


@pytest.mark.parametrize(
    ("model", "table"), [(model, table) for model, _, table in TABLES], ids=lambda x: getattr(x, "__name__", "")
)
def test_no_option_is_forgotten(model: type[ApiModel], table: dict[str, Case]) -> None:
    covered = set(table) | set(ELSEWHERE.get(model, {}))
    assert covered == set(model.model_fields)
