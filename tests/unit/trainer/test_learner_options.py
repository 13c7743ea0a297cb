"""Every option of `distillation`, `task` and the loss part of `training` reaches the update of the student.

A field that is neither in a case below nor listed as somebody else's fails: an option that changes nothing cannot hide.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opd_testing import learner as testing
from opd_testing.tiny_models import write_model

from opd_api.v1alpha1 import (
    ApiModel,
    Critic,
    Distillation,
    Divergence,
    LossAggregation,
    PolicyLoss,
    PolicyLossType,
    RolloutCorrection,
    Tail,
    Task,
    Training,
)
from opd_trainer.learner.sharding import local_tensor

SETS = {"signal": "loss", "tokenSelection": "teacher_topk", "topK": 4, "divergence": "reverse_kl"}
TASK = {"reward": "exact_match", "taskAdvWeight": 0.5, "advantageEstimator": "grpo"}
GAE = {**TASK, "advantageEstimator": "gae", "critic": {"model": {"source": "CRITIC"}}}
#: Two updates on the same samples make ratios differ from 1, so that clips and old log-probabilities matter.
SEVERAL = {"updatesPerStep": 3, "learningRate": 0.05}
SEQUENCES = {"lossAggregation": "seq-mean-token-mean"}
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
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    shape: dict[str, Any] = {"family": "qwen2", "hidden": 16, "layers": 1}
    return {
        "student": write_model(folder / "student", seed=1, **shape),
        "teacher": write_model(folder / "teacher", seed=2, scale=2.0, **shape),
    }


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    torch.set_num_threads(1)
    with testing.process_group():
        yield


def named(sections: Any, models: dict[str, Path]) -> Any:
    """CRITIC and OTHER become folders."""
    places = {"CRITIC": str(models["student"]), "OTHER": str(models["teacher"])}
    if isinstance(sections, dict):
        return {key: named(value, models) for key, value in sections.items()}
    return places.get(sections, sections) if isinstance(sections, str) else sections


class Update:
    """What steps on fixed samples do to a student."""

    def __init__(self, models: dict[str, Path], folder: Path) -> None:
        self._models = models
        self._folder = folder
        self._known: dict[str, torch.Tensor] = {}
        self.samples = testing.samples(6, teacher=models["teacher"], student=models["student"])
        for sample in self.samples:
            # The engine is a little off, sometimes by a lot.
            noise = 0.1 * torch.sin(torch.arange(sample.response_length) * 1.7 + sample.sample_id).numpy()
            sample.rollout_logprobs = sample.rollout_logprobs + noise

    def __call__(self, sections: dict[str, Any]) -> torch.Tensor:
        """All parameters, flat, after a step; after two with a critic, whose first values are 0."""
        sections = named(sections, self._models)
        key = repr(sections)
        if key not in self._known:
            self._known[key] = self._run(sections)
        return self._known[key]

    def _run(self, sections: dict[str, Any]) -> torch.Tensor:
        plain = {"steps": 10, "dtype": "fp32", "learningRate": 0.01, "activationCheckpointing": False}
        training = {**plain, **sections.get("training", {})}
        config = testing.job(self._models["student"], self._folder, **{**sections, "training": training})
        learner = testing.started(config, total_steps=config.training.steps or 10)
        options = config.distillation
        batch = testing.with_first(self.samples, options.top_k or 4)
        if options.top_k is not None:
            testing.select_like_a_server(batch, self._models["teacher"], options.token_selection)
        for _ in range(1 if config.task.critic is None else 2):
            learner.step(testing.work(config, batch))
        return torch.cat([local_tensor(p).detach().flatten() for p in learner._student.parameters()])


@pytest.fixture(scope="module")
def update(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Update:
    return Update(models, tmp_path_factory.mktemp("run"))


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


SAMPLED = ["k1", "k2", "k3", "abs"]
SET_KINDS = [
    kind.value for kind in Divergence if kind.value in ("reverse_kl", "forward_kl", "jsd", "mixed", "low_var_kl")
]


def test_every_value_of_every_choice_gives_an_update_of_its_own(update: Update) -> None:
    """Enumerations: no two values of a choice do the same, so none is an alias by accident."""
    choices: dict[str, list[dict[str, Any]]] = {
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
    for name, variants in choices.items():
        results = [update(sections) for sections in variants]
        for first in range(len(results)):
            for second in range(first):
                gap = float((results[first] - results[second]).abs().max())
                assert gap > 1e-7, f"{name}: {variants[first]} and {variants[second]} do the same"
