"""Oracle rules of the families about token sets and whole vocabularies."""

from __future__ import annotations

import re

import torch
from oracle_io import Case, Output
from oracle_rules import Call, Excluded, Mapped, Rule, differentiated, skipping
from torch import Tensor

from opd_trainer import core

_NOT_OUR_CLAMP = (
    "verl's clamp_min(0) is a bug we do not copy: it takes the gradient of every token whose truncated KL is negative"
)


def jsd_kind(beta: float) -> str:
    """TRL, ms-swift and Liger: 0 is forward KL and 1 reverse KL, the ends opposite to ours."""
    return {0.0: "forward_kl", 1.0: "reverse_kl"}.get(float(beta), "jsd")


# --- forward_kl_topk ------------------------------------------------------------------------------------------------
def _forward_topk(case: Case) -> core.TopKResult:
    return core.topk_divergence(
        case["student_logits"],
        case["teacher_topk_ids"],
        case["teacher_topk_logprobs"],
        "forward_kl",
        tail="trunc",
        log_prob_floor=case.params["log_prob_min_clamp"],
    )


def _forward_topk_clipped(case: Case, output: Output) -> Tensor:
    divergence = _forward_topk(case).divergence.unsqueeze(0)
    nothing = torch.zeros_like(divergence)
    loss, _ = core.distillation_loss(
        divergence, nothing, nothing, torch.ones_like(nothing), per_token_clip=output.call["loss_max_clamp"]
    )
    # XTuner's clamp has two sides. The lower one is out of reach (a truncated forward KL is at least −1/e) unless
    # log_prob_min_clamp lifts the student's mass above 1.
    return loss[0].clamp_min(-output.call["loss_max_clamp"])


def _overlap_count(case: Case, output: Output, match: re.Match[str]) -> Tensor:
    teacher_ids = case["teacher_topk_ids"]
    student_ids = case["student_logits"].topk(teacher_ids.shape[-1], dim=-1).indices
    return core.select_tokens(student_ids, teacher_ids, "intersection")[1].sum(dim=-1)


def _off_the_kink(case: Case, output: Output) -> Tensor:
    rows = torch.ones(case["student_logits"].shape[0], dtype=torch.bool)
    rows[case.flags.get("rows_at_a_clamp_kink", [])] = False
    return rows


_FORWARD_KL_TOPK: list[Rule] = [
    Mapped(
        r"out_(verl|verl_chunked|xtuner)_loss(_grad)?",
        differentiated("student_logits", lambda case, output: _forward_topk(case).divergence),
    ),
    Mapped(r"out_xtuner_loss_max", differentiated("student_logits", _forward_topk_clipped)),
    Mapped(
        r"out_xtuner_loss_max_grad",
        skipping(_off_the_kink, differentiated("student_logits", _forward_topk_clipped)),
    ),
    Mapped(
        r"out_(verl|verl_chunked|xtuner)_(student|teacher)_mass",
        lambda case, output, match: getattr(_forward_topk(case), f"{match[2]}_mass"),
    ),
    Mapped(r"out_verl_overlap_count", _overlap_count),
    Excluded(r"out_verl_overlap_token_advantage", "a monitoring metric of verl that we do not offer"),
    Excluded(
        r"out_verl_loss_clamped0(_max)?(_grad)?",
        "verl's clamp_min(0) is a bug: it takes the gradient of every token whose truncated KL is negative",
    ),
]


# --- set_divergences ------------------------------------------------------------------------------------------------
def _set_of(case: Case, name: str) -> tuple[Tensor, Tensor]:
    """(ids, valid) of a set."""
    if name == "union":
        return case["union_ids"], case["union_valid"].bool()
    ids = case[f"{name}_ids"]
    return ids, torch.ones_like(ids, dtype=torch.bool)


def set_value(case: Case, where: str, kind: str, mass: str, alpha: float = 0.5, floor: float | None = None) -> Tensor:
    ids, valid = _set_of(case, where)
    teacher = torch.log_softmax(case["teacher_logits"], -1).gather(-1, ids)
    result = core.topk_divergence(
        case["student_logits"], ids, teacher, kind, tail=mass, valid=valid, jsd_alpha=alpha, log_prob_floor=floor
    )
    return result.divergence


def _trl_set(case: Case, output: Output) -> Tensor:
    beta = output.call["beta"]
    kind = jsd_kind(beta)
    where = {"forward_kl": "teacher_topk", "reverse_kl": "student_topk"}.get(kind, "union")
    return set_value(case, where, kind, "tail" if output.call["add_tail"] else "norm", beta)


def _swift_set(case: Case, output: Output) -> Tensor:
    beta = output.call["beta"]
    return set_value(case, "teacher_topk", jsd_kind(beta), "norm", beta)


def _xtuner_set(case: Case, output: Output) -> Tensor:
    return set_value(case, output.call["set"], f"{output.call['loss_mode']}_kl", "tail")


def _relax_set(case: Case, output: Output) -> Tensor:
    call = output.call
    return set_value(
        case,
        call["token_selection"],
        call["kl_type"],
        call.get("norm_mode", "trunc"),
        call.get("jsd_alpha") or 0.5,
        call.get("log_prob_min_clamp"),
    )


def _exact_set(case: Case, output: Output) -> Tensor:
    call = output.call
    kind = call["mode"] if call["mode"] == "jsd" else f"{call['mode']}_kl"
    return set_value(case, call["set"], kind, call["mass"], call["beta"] or 0.5)


def flagged(case: Case, threshold: str, where: str) -> Tensor:
    rows = torch.ones(case["student_logits"].shape[0], dtype=torch.bool)
    rows[case.flags.get(f"rows_with_tail_mass_below_{threshold}", {}).get(where, [])] = False
    return rows


def _trl_rows(case: Case, output: Output) -> Tensor:
    """TRL clamps the tail at 1e-7: below, only the same clamp gives the same number."""
    where = {"forward_kl": "teacher_topk", "reverse_kl": "student_topk"}.get(jsd_kind(output.call["beta"]), "union")
    return flagged(case, "1e-7", where)


def _relax_tail_rows(case: Case, output: Output) -> Tensor:
    """Relax forms 1 − mass in float32: meaningful above a tail of about 1e-3."""
    ids, _ = _set_of(case, output.call["token_selection"])
    tails = [
        1 - torch.log_softmax(case[f"{who}_logits"], -1).gather(-1, ids).exp().sum(-1) for who in ("student", "teacher")
    ]
    return (tails[0] > 1e-3) & (tails[1] > 1e-3)


def _exact_rows(case: Case, output: Output) -> Tensor:
    """The teacher's tail comes from K log-probabilities: 1 − Σt has nine digits above a tail of 1e-7."""
    if output.call["mass"] != "tail":
        return torch.ones(case["student_logits"].shape[0], dtype=torch.bool)
    return flagged(case, "1e-7", output.call["set"])


def _on_logits(compute: object) -> Call:
    return differentiated("student_logits", compute)


_SET_DIVERGENCES: list[Rule] = [
    Mapped(r"out_trl_b\w+_tail(_grad)?", skipping(_trl_rows, _on_logits(_trl_set))),
    Mapped(r"out_trl_b\w+_norm(_grad)?", _on_logits(_trl_set)),
    Mapped(r"out_swift_b\w+_norm(_grad)?", _on_logits(_swift_set)),
    Mapped(
        r"out_xtuner_\w+_tail(_grad)?",
        skipping(lambda case, output: flagged(case, "1e-9", output.call["set"]), _on_logits(_xtuner_set)),
    ),
    Mapped(r"out_relax_\w+_tail(_grad)?", skipping(_relax_tail_rows, _on_logits(_relax_set))),
    Mapped(r"out_relax_\w+_(norm|trunc|trunc_clampm\w+)(_grad)?", _on_logits(_relax_set)),
    Mapped(r"out_relax_low_var_kl_(teacher|student)_topk", _on_logits(_relax_set)),
    Mapped(r"out_exact_\w+", skipping(_exact_rows, _on_logits(_exact_set))),
]


# --- full_vocab_divergences -----------------------------------------------------------------------------------------
def _full(case: Case, output: Output) -> Tensor:
    beta = output.call["beta"]
    return core.full_divergence(
        case["student_logits"],
        case["teacher_logits"],
        jsd_kind(beta),
        jsd_alpha=beta,
        temperature=case.params["temperature"],
    )


def _full_reduced(mode: str, *, given_count: bool = False) -> object:
    def compute(case: Case, output: Output) -> Tensor:
        count = case.params["num_items_in_batch"] if given_count else None
        return core.aggregate(_full(case, output), case["labels"] != -100, mode, num_tokens=count)

    return compute


def _roll(kind: str, alpha: float = 0.5) -> object:
    def compute(case: Case, output: Output) -> Tensor:
        return core.full_divergence(
            case["student_logits"],
            case["teacher_logits"],
            kind,
            jsd_alpha=alpha,
            temperature=case.params["temperature"],
        )

    return compute


_FULL_VOCABULARY: list[Rule] = [
    Mapped(r"out_trl_b\w+_token", _on_logits(_full)),
    Mapped(r"out_(trl|swift)_b[0-9p]+(_sum|_grad)", _on_logits(_full_reduced("token-sum"))),
    Mapped(r"out_(trl|liger)_b[0-9p]+_batchmean(_grad)?", _on_logits(_full_reduced("token-mean"))),
    Mapped(r"out_trl_b[0-9p]+_num_items", _on_logits(_full_reduced("token-mean", given_count=True))),
    Mapped(
        r"out_roll_(forward|reverse)_kl(_grad)?",
        lambda case, output, match: differentiated("student_logits", _roll(f"{match[1]}_kl"), "response_mask")(
            case, output, match
        ),
    ),
    Mapped(r"out_roll_js(_divergence)?(_grad)?", differentiated("student_logits", _roll("jsd"), "response_mask")),
    Excluded(
        r"out_roll_(skewed_\w+|adaptive_\w+)",
        "skewed and head/tail-adaptive KL are not offered: jsd covers the mixture, and no OPD system uses them",
    ),
]


# --- nemo_distillation_loss -----------------------------------------------------------------------------------------
def _nemo_token(case: Case, output: Output) -> Tensor:
    logits, ids = case["student_logits"], case["teacher_topk_ids"]
    kind = output.call["kl_type"]
    result = core.topk_divergence(
        logits.flatten(0, 1),
        ids.flatten(0, 1),
        case["teacher_topk_logprobs"].flatten(0, 1),
        kind if kind == "mixed" else f"{kind}_kl",
        tail="trunc",
        forward_weight=case.params["mixed_kl_weight"],
    )
    return result.divergence.reshape(ids.shape[:2])


def _nemo_loss(case: Case, output: Output) -> Tensor:
    mask = case["token_mask"][:, 1:] * case["sample_mask"].unsqueeze(-1)
    # The 1e-8 in NeMo's denominator is below the tolerance.
    return core.aggregate(
        _nemo_token(case, output), mask, "token-mean", num_tokens=case.params["global_valid_toks"] + 1e-8
    )


_NEMO_DISTILLATION: list[Rule] = [
    Mapped(r"out_(forward|reverse|mixed)_token(_grad)?", _on_logits(_nemo_token)),
    Mapped(r"out_(forward|reverse|mixed)_loss(_grad)?", _on_logits(_nemo_loss)),
    Excluded(
        r"out_(reverse|mixed)_zero_(token|loss)(_grad)?",
        "zero_outside_topk (a teacher log-probability of −100 outside the set) is not offered: the tail bucket is",
    ),
]


# --- nemo_student_topk_reverse_kl -----------------------------------------------------------------------------------
def _surrogate(case: Case, output: Output) -> Tensor:
    return core.student_topk_surrogate(
        case["student_logits"],
        case["student_topk_ids"],
        case["teacher_logprobs_at_student_ids"],
        case["sampled_ids"],
        case["teacher_target_logprobs"],
    )


def _expected_surrogate_gradient(case: Case, output: Output, match: re.Match[str]) -> Tensor:
    logits = case["student_logits"]
    teacher, probabilities = torch.log_softmax(case["teacher_logits"], -1), torch.log_softmax(logits, -1).exp()
    total = torch.zeros_like(logits)
    for token in range(logits.shape[1]):
        sampled = torch.full_like(case["sampled_ids"], token)
        leaf = case.leaf("student_logits")
        loss = _surrogate(
            case.with_inputs(student_logits=leaf, sampled_ids=sampled, teacher_target_logprobs=teacher[:, token]),
            output,
        )
        total += torch.autograd.grad((loss * probabilities[:, token]).sum(), leaf)[0]
    return total


def _full_reverse(case: Case, output: Output) -> Tensor:
    return core.full_divergence(case["student_logits"], case["teacher_logits"], "reverse_kl")


_NEMO_SURROGATE: list[Rule] = [
    Mapped(r"out_loss(_grad)?", _on_logits(_surrogate)),
    Mapped(r"out_expected_grad", _expected_surrogate_gradient),
    Mapped(r"out_full_reverse_kl_grad", _on_logits(_full_reverse)),
]


RULES: dict[str, list[Rule]] = {
    "forward_kl_topk": _FORWARD_KL_TOPK,
    "set_divergences": _SET_DIVERGENCES,
    "full_vocab_divergences": _FULL_VOCABULARY,
    "nemo_distillation_loss": _NEMO_DISTILLATION,
    "nemo_student_topk_reverse_kl": _NEMO_SURROGATE,
}
