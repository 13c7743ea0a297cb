"""Oracle rules of the families about miles' token sets and fused heads."""

from __future__ import annotations

import re

import torch
from oracle_io import Case, Output
from oracle_map_sets import flagged, jsd_kind, set_value
from oracle_rules import Excluded, Mapped, Rule, skipping
from torch import Tensor

from opd_trainer import core

# --- miles_topk_reverse_kl ------------------------------------------------------------------------------------------
_MILES_MODE = {"only_student": "student_topk", "only_teacher": "teacher_topk"}


def _miles_ids(case: Case, output: Output, match: re.Match[str]) -> Tensor:
    mode = _MILES_MODE.get(match[1], match[1])
    ids, valid = core.select_tokens(case["student_topk_ids"], case["teacher_topk_ids"], mode)
    width = 2 * case["student_topk_ids"].shape[1]
    packed = torch.full((ids.shape[0], width), -1, dtype=torch.int64)
    for row in range(ids.shape[0]):
        chosen = ids[row][valid[row]]
        packed[row, : chosen.shape[0]] = chosen
    return packed


def _miles_mixture(case: Case, output: Output, match: re.Match[str]) -> Tensor:
    teachers = torch.cat([torch.log_softmax(case["teacher_logits"], -1).unsqueeze(0), case["extra_teacher_logprobs"]])
    return core.mixture_logprobs(teachers, torch.tensor(case.params["teacher_weights"]))


_MILES: list[Rule] = [
    Mapped(r"out_(only_student|only_teacher|intersection|union)_ids", _miles_ids),
    Mapped(
        r"out_tail_bucket_student_topk",
        skipping(
            lambda case, output: flagged(case, "1e-9", "student_topk"),
            lambda case, *_: set_value(case, "student_topk", "reverse_kl", "tail"),
        ),
    ),
    Mapped(r"out_mixture_logprobs", _miles_mixture),
    Excluded(r"out_xor_ids", "the symmetric difference drops exactly the tokens that both models find likely"),
    Excluded(
        r"out_(only_student|only_teacher|intersection|union|xor)_(student_p|teacher_p|none)",
        "a weighted sum of log-ratios on a set is not a divergence (renormalised weights, un-normalised ratios); norm is",
    ),
]


# --- fused_linear ---------------------------------------------------------------------------------------------------
def _veomni(case: Case) -> core.TopKResult:
    return core.linear_topk_divergence(
        case["student_hidden"],
        case["student_weight"],
        case["teacher_topk_ids"],
        case["teacher_topk_logprobs"],
        "forward_kl",
        tail="trunc",
        labels=case["labels"],
        log_prob_floor=case.params["log_prob_min_clamp"],
        temperature=case.params["temperature"],
    )


_VEOMNI_FIELD = {
    "log_probs": "sampled_logprobs",
    "entropy": "entropy",
    "distill": "divergence",
    "student_mass": "student_mass",
    "teacher_mass": "teacher_mass",
}


def _veomni_value(case: Case, output: Output, match: re.Match[str]) -> Tensor:
    # VeOmni zeroes ignored rows itself; with us that is the mask's work.
    return torch.where(case["labels"] >= 0, getattr(_veomni(case), _VEOMNI_FIELD[match[1]]), 0.0)


def _veomni_gradient(case: Case, output: Output, match: re.Match[str]) -> Tensor:
    name = f"student_{match[1]}"
    leaf = case.leaf(name)
    divergence = _veomni(case.with_inputs(**{name: leaf})).divergence
    return torch.autograd.grad(torch.where(case["labels"] >= 0, divergence, 0.0).sum(), leaf)[0]


def _liger(case: Case, output: Output, match: re.Match[str]) -> Tensor:
    name = f"student_{match[2]}" if match[2] else "student_hidden"
    leaf = case.leaf(name)
    sides = {**case.inputs, name: leaf}
    beta = output.call["beta"]
    divergence = core.full_divergence(
        sides["student_hidden"] @ sides["student_weight"].T,
        sides["teacher_hidden"] @ sides["teacher_weight"].T,
        jsd_kind(beta),
        jsd_alpha=beta,
        temperature=case.params["temperature"],
    )
    loss = core.aggregate(divergence.unsqueeze(0), (case["labels"] >= 0).unsqueeze(0), "token-mean")
    return torch.autograd.grad(loss, leaf)[0] if match[2] else loss


_FUSED: list[Rule] = [
    Mapped(r"out_veomni_(log_probs|entropy|distill|student_mass|teacher_mass)", _veomni_value),
    Mapped(r"out_veomni_distill_grad_(hidden|weight)", _veomni_gradient),
    Mapped(r"out_liger_b([0-9p]+)(?:_grad_(hidden|weight))?", _liger),
]

RULES: dict[str, list[Rule]] = {"miles_topk_reverse_kl": _MILES, "fused_linear": _FUSED}
