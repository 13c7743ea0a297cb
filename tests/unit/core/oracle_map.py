"""Every output of the oracle manifest as a call of the core, or excluded with the reason.

The map reads call parameters from the manifest and case parameters from the case, so that it serves any folder of the
format: `pytest tests/unit/core/test_oracles.py --oracles DIR`.
"""

from __future__ import annotations

import re

import oracle_map_correction
import oracle_map_heads
import oracle_map_losses
import oracle_map_sets
import torch
from oracle_io import Case, Output
from oracle_rules import Answer, Excluded, Mapped, Rule, differentiated
from torch import Tensor

from opd_trainer import core

# --- kl_estimators --------------------------------------------------------------------------------------------------
_VERL_CLAMPS = {"log_ratio_clamp": 20.0, "value_clamp": 10.0}


def _verl(case: Case, output: Output) -> Tensor:
    name = output.call["kl_penalty"]
    kind = name.rstrip("+")
    clamps = _VERL_CLAMPS if kind in ("k3", "low_var_kl") else {}
    return core.sampled_kl(
        case["student_logprobs"], case["teacher_logprobs"], kind, straight_through=name.endswith("+"), **clamps
    )


def _nemo(case: Case, output: Output) -> Tensor:
    bound, weighted = output.call["output_clamp_value"], "importance_sampling_weights" in output.call
    value = core.sampled_kl(
        case["student_logprobs"],
        case["teacher_logprobs"],
        output.call["kl_type"],
        log_ratio_clamp=output.call["input_clamp_value"],
        value_clamp=None if weighted else bound,
    )
    # NeMo clamps after the product with the weight.
    return (value * case["importance_weights"]).clamp(-bound, bound) if weighted else value


def _slime(case: Case, output: Output) -> Tensor:
    kind, weighted = output.call["kl_loss_type"], "importance_ratio" in output.call
    value = core.sampled_kl(case["student_logprobs"], case["teacher_logprobs"], kind)
    value = value * case["importance_weights"] if weighted else value
    # slime clamps after the product with the weight.
    return value.clamp(-10, 10) if kind == "low_var_kl" else value


def _xtuner(case: Case, output: Output) -> Tensor:
    kind = output.call["loss_mode"]
    return core.sampled_kl(
        case["student_logprobs"],
        case["teacher_logprobs"],
        kind,
        log_ratio_clamp=20.0 if kind == "k3" else None,
        value_clamp=output.call["loss_max_clamp"],
    )


def _relax(case: Case, output: Output) -> Tensor:
    floor = output.call["log_prob_min_clamp"]
    student, teacher = case["student_logprobs"], case["teacher_logprobs"]
    if floor is not None:
        student, teacher = student.clamp_min(floor), teacher.clamp_min(floor)
    return core.sampled_kl(student, teacher, output.call["kl_type"])


def _swift_monitor(case: Case, output: Output) -> Tensor:
    value = core.sampled_kl(case["student_logprobs"], case["teacher_logprobs"], "k3")
    return torch.where(case["response_mask"] > 0, value, 0.0)


_KL_ESTIMATORS: list[Rule] = [
    Mapped(r"out_verl_.+", differentiated("student_logprobs", _verl, "response_mask")),
    Mapped(r"out_nemo_.+", differentiated("student_logprobs", _nemo, "response_mask")),
    Mapped(r"out_slime_.+", differentiated("student_logprobs", _slime, "response_mask")),
    Mapped(r"out_xtuner_.+", differentiated("student_logprobs", _xtuner, "response_mask")),
    Mapped(r"out_relax_.+", differentiated("student_logprobs", _relax, "response_mask")),
    Mapped(r"out_swift_k3", differentiated("student_logprobs", _swift_monitor)),
]


# --- tropd ----------------------------------------------------------------------------------------------------------
def _tropd_advantage(case: Case, output: Output) -> Tensor:
    mask, student, teacher = case["response_mask"], case["student_logprobs"], case["teacher_logprobs"]
    if output.name.endswith("_formula"):  # evaluated with 50 digits whatever the inputs' dtype
        student, teacher = student.double(), teacher.double()
    advantage = core.distillation_advantage(student, teacher, alpha=output.call.get("proximal_teacher_alpha", 1.0))
    moments = core.masked_moments(advantage, mask)
    if not output.call.get("subtract_global_baseline"):
        moments = moments._replace(sum=torch.zeros_like(moments.sum))
    return core.center(advantage, mask, moments)


def _tropd_metrics(case: Case, output: Output, match: re.Match[str]) -> Tensor:
    mask = case["response_mask"]
    gap = core.masked_moments(core.distillation_advantage(case["student_logprobs"], case["teacher_logprobs"]), mask)
    adv = core.masked_moments(_tropd_advantage(case, output), mask)
    count = adv.count.clamp_min(1)
    variance = (adv.sum_of_squares - adv.sum**2 / count) / (count - 1).clamp_min(1)
    by_name = {
        "teacher_student_logprob_gap_mean": gap.sum / count,
        "adv_mean": adv.sum / count,
        "adv_std": variance.clamp_min(0).sqrt(),
    }
    return torch.stack([by_name[label] for label in case.labels[output.name]])


_TROPD: list[Rule] = [
    Mapped(r"out_(opd|alpha\w+)_metrics", _tropd_metrics),
    Mapped(r"out_opd|out_alpha[0-9p]+(_baseline)?(_formula)?", lambda case, output, _: _tropd_advantage(case, output)),
]


# --- opd_advantage --------------------------------------------------------------------------------------------------
def _combined(
    case: Case, *, task: Tensor | None = None, x: Tensor | None = None, mask: str = "response_mask", **options: float
) -> Tensor:
    distillation = core.distillation_advantage(case["student_logprobs"], case["teacher_logprobs"]) if x is None else x
    options = {"task_weight": 1.0, **options}
    return core.combine_advantages(case["advantages"] if task is None else task, distillation, case[mask], **options)


def _plain_coefficient(case: Case, output: Output, match: re.Match[str]) -> Tensor:
    return _combined(case, coefficient=output.call["opd_kl_coef"])


def _swift_advantage(case: Case, output: Output, match: re.Match[str]) -> Answer:
    task = case["seq_advantages"].unsqueeze(-1).expand_as(case["response_mask"])
    # Outside the mask ms-swift leaves the sequence's advantage; ours is 0 there, and no loss reads it.
    return Answer(_combined(case, task=task, coefficient=output.call["teacher_kl_coef"]), case["response_mask"] > 0)


def _xtuner_advantage(case: Case, output: Output, match: re.Match[str]) -> Tensor:
    # The outputs are named and called by the pair of weights; positions outside the response hold 0 in the input.
    return _combined(case, task_weight=output.call["task_adv_weight"], coefficient=output.call["opd_adv_weight"])


def _sampled_sum(kind: str, mask: str, *, mean: bool = False) -> object:
    def call(case: Case, output: Output, match: re.Match[str]) -> Tensor:
        value = core.sampled_kl(case["student_logprobs"], case["teacher_logprobs"], kind)
        return core.aggregate(value, case[mask], "token-mean" if mean else "token-sum")

    return call


def _relax_advantage(case: Case, output: Output, match: re.Match[str]) -> Answer:
    options = output.call
    clip = options.get("opd_per_token_clip")
    where = None
    if options["opd_token_selection"] == "student_sampled":
        floor = options["opd_log_prob_min_clamp"]
        student, teacher = case["student_logprobs"], case["teacher_logprobs"]
        if floor is not None:
            student, teacher = student.clamp_min(floor), teacher.clamp_min(floor)
        kl = core.sampled_kl(student, teacher, options["opd_kl_type"])
        clip = None  # Relax ignores the clip for sampled tokens.
    else:
        kl = core.set_divergence(
            case["student_topk_logprobs"],
            case["teacher_topk_logprobs"],
            options["opd_kl_type"],
            tail=options["opd_norm_mode"],
            jsd_alpha=options["opd_jsd_alpha"],
        )
        if options["opd_norm_mode"] == "tail":
            where = oracle_map_losses.relax_tail_is_meaningful(case)
    return Answer(_combined(case, x=-kl, coefficient=options["opd_kl_coef"], per_token_clip=clip), where)


def _tinker_advantage(case: Case, output: Output, match: re.Match[str]) -> Answer:
    options = {"coefficient": output.call["kl_penalty_coef"], "discount": output.call["kl_discount_factor"]}
    # Discounted credit also lands on masked positions in tinker; no loss reads it there, and ours is 0.
    return Answer(_combined(case, mask="loss_mask", **options), case["loss_mask"] > 0)


_OPD_ADVANTAGE: list[Rule] = [
    Mapped(r"out_(slime|miles)_c\w+", _plain_coefficient),
    Mapped(
        r"out_slime_opd_reverse_kl",
        lambda case, output, _: torch.where(
            case["response_mask"] > 0, core.sampled_kl(case["student_logprobs"], case["teacher_logprobs"], "k1"), 0.0
        ),
    ),
    Mapped(r"out_swift_c\w+", _swift_advantage),
    Mapped(r"out_xtuner_task\w+", _xtuner_advantage),
    Mapped(r"out_xtuner_reverse_kl_sum", _sampled_sum("k1", "response_mask")),
    Mapped(r"out_xtuner_abs_logprob_loss_sum", _sampled_sum("abs", "response_mask")),
    Mapped(r"out_relax_\w+", _relax_advantage),
    Mapped(r"out_tinker_c\w+", _tinker_advantage),
    Mapped(r"out_tinker_teacher_kl", _sampled_sum("k1", "loss_mask", mean=True)),
]


# --- advantage_estimators -------------------------------------------------------------------------------------------
def _scores(case: Case) -> Tensor:
    return case["token_level_rewards"].sum(dim=-1)


def _on_mask(value: Tensor, case: Case) -> Answer:
    return Answer(value, case["response_mask"] > 0)


def _sequence_grpo(case: Case, *, normalize_std: bool, epsilon: float) -> Tensor:
    everyone = torch.ones_like(case["response_mask"][:, :1])
    return core.grpo(_scores(case), case["group_ids"], everyone, normalize_std=normalize_std, epsilon=epsilon)[:, 0]


def _in_company(case: Case, value: Tensor, *, varied: bool = False) -> Answer:
    """NeMo and ms-swift give 0 to a sequence that is alone in its group; ours and verl's keeps its reward.

    Args:
        varied: leave out groups of equal scores as well: there a float32 peer divides its rounding error by ε.
    """
    same_group = case["group_ids"].unsqueeze(0) == case["group_ids"].unsqueeze(1)
    where = same_group.sum(dim=1) > 1
    if varied:
        scores = _scores(case)
        where = where & (same_group & ((scores.unsqueeze(0) - scores.unsqueeze(1)).abs() > 1e-9)).any(dim=1)
    return Answer(value, where)


def _sequence_rloo(case: Case) -> Tensor:
    return core.rloo(_scores(case), case["group_ids"], torch.ones_like(case["response_mask"][:, :1]))[:, 0]


_ADVANTAGE_ESTIMATORS: list[Rule] = [
    Mapped(
        r"out_grpo(_nostd)?",
        lambda case, output, _: core.grpo(
            _scores(case),
            case["group_ids"],
            case["response_mask"],
            normalize_std=output.call["norm_adv_by_std_in_grpo"],
        ),
    ),
    Mapped(r"out_rloo", lambda case, *_: core.rloo(_scores(case), case["group_ids"], case["response_mask"])),
    Mapped(
        r"out_reinforce_plus_plus",
        lambda case, *_: core.reinforce_plus_plus(
            case["token_level_rewards"], case["response_mask"], gamma=case.params["gamma"]
        ),
    ),
    # verl carries running returns and values into masked positions; ours are 0 there.
    Mapped(
        r"out_reinforce_plus_plus_returns",
        lambda case, *_: _on_mask(
            core.discounted_returns(case["token_level_rewards"], case["response_mask"], gamma=case.params["gamma"]),
            case,
        ),
    ),
    Mapped(
        r"out_reinforce_plus_plus_baseline",
        lambda case, *_: core.reinforce_plus_plus_baseline(_scores(case), case["group_ids"], case["response_mask"]),
    ),
    Mapped(
        r"out_gae_(advantages|returns)",
        lambda case, output, match: _on_mask(
            core.gae(
                case["token_level_rewards"],
                case["values"],
                case["response_mask"],
                gamma=case.params["gamma"],
                lam=case.params["lam"],
            )[0 if match[1] == "advantages" else 1],
            case,
        ),
    ),
    Mapped(
        r"out_swift_grpo_(group|none)",
        lambda case, output, match: _in_company(
            case, _sequence_grpo(case, normalize_std=match[1] == "group", epsilon=1e-4)
        ),
    ),
    Mapped(r"out_swift_rloo_none|out_nemo_grpo_loo", lambda case, *_: _in_company(case, _sequence_rloo(case))),
    Mapped(
        r"out_nemo_grpo_mean(_norm)?",
        lambda case, output, match: _in_company(
            case, _sequence_grpo(case, normalize_std=match[1] is not None, epsilon=1e-6), varied=match[1] is not None
        ),
    ),
    Excluded(
        r"out_swift_(grpo|reinforce_plus_plus)_batch|out_swift_rloo_group",
        "scale_rewards is not offered: GRPO divides by its group, RLOO by nothing, REINFORCE++ whitens tokens",
    ),
    Excluded(r"out_nemo_grpo_loo_norm", "a leave-one-out baseline divided by a standard deviation is not offered"),
]

RULES: dict[str, list[Rule]] = {
    "kl_estimators": _KL_ESTIMATORS,
    "tropd": _TROPD,
    "opd_advantage": _OPD_ADVANTAGE,
    "advantage_estimators": _ADVANTAGE_ESTIMATORS,
    **oracle_map_sets.RULES,
    **oracle_map_heads.RULES,
    **oracle_map_correction.RULES,
    **oracle_map_losses.RULES,
}
