"""Oracle rules of the families about per-token losses and aggregation."""

from __future__ import annotations

import re
from typing import Any

import torch
from oracle_io import Case, Output
from oracle_rules import Answer, Call, Excluded, Mapped, Rule, differentiated
from torch import Tensor

from opd_trainer import core


# --- agg_loss -------------------------------------------------------------------------------------------------------
def _aggregated(case: Case, output: Output) -> Tensor:
    params = case.params
    return core.aggregate(
        case["loss_mat"],
        case["response_mask"],
        output.call["loss_agg_mode"],
        num_tokens=params["batch_num_tokens"],
        num_sequences=params["global_batch_size"],
        horizon=params["loss_scale_factor"],
        data_parallel_size=params["dp_size"],
    )


_AGG_LOSS: list[Rule] = [
    Mapped(r"out_(token|seq)_\w+", differentiated("loss_mat", _aggregated)),
]


# --- policy_losses --------------------------------------------------------------------------------------------------
_SEQUENCE_MEAN = "seq-mean-token-mean"


def _policy(case: Case, kind: str, *, weighted: bool = True, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    params = case.params
    settings = {
        "clip_low": params["clip_ratio_low"],
        "clip_high": params["clip_ratio_high"],
        "clip_c": params["clip_ratio_c"],
        "tau_pos": params["tau_pos"],
        "tau_neg": params["tau_neg"],
        "mask": case["response_mask"],
        "advantages": case["advantages"],
        "weights": case["rollout_is_weights"] if weighted and params["uses_rollout_is_weights"] else None,
        **options,
    }
    advantages, mask = settings.pop("advantages"), settings.pop("mask")
    return core.policy_loss(kind, case["student_logprobs"], case["old_logprobs"], advantages, mask, **settings)


def _policy_scalar(case: Case, output: Output) -> Tensor:
    kind = re.fullmatch(r"out_(\w+?)_(loss|grad)", output.name)[1]
    mode = _SEQUENCE_MEAN if kind in ("gspo", "sapo") else case.params["loss_agg_mode"]
    counts = case.params["global_batch_info"] or {}
    return core.aggregate(
        _policy(case, kind)[0],
        case["response_mask"],
        mode,
        num_tokens=counts.get("batch_num_tokens"),
        num_sequences=counts.get("global_batch_size"),
        horizon=counts.get("loss_scale_factor"),
        data_parallel_size=counts.get("dp_size", 1),
    )


_POLICY_LABELS = {
    "pg_clipfrac": "clip_fraction",
    "ppo_kl": "approx_kl",
    "pg_clipfrac_lower": "clip_fraction_lower",
}


def _policy_metrics(case: Case, output: Output, match: re.Match[str]) -> Tensor:
    metrics = _policy(case, match[1])[1]
    return torch.stack([metrics[_POLICY_LABELS[label]] for label in case.labels[output.name]])


def _slime_token(kind: str, **options: Any) -> Call:
    """Per-token losses of slime ignore the mask; ours are 0 where masked, so ours runs with a mask of ones."""

    def compute(case: Case, output: Output) -> Tensor:
        everywhere = torch.ones_like(case["response_mask"])
        return _policy(case, kind, weighted=False, mask=everywhere, **options)[0]

    return differentiated("student_logprobs", compute, "response_mask")


def _slime_clip_indicator(kind: str, **options: Any) -> Call:
    """Our clip fraction is a mean over a mask: with one trained token it is that token's indicator."""

    def call(case: Case, output: Output, match: re.Match[str]) -> Tensor:
        shape = case["response_mask"].shape
        indicator = torch.zeros(shape)
        for index in range(indicator.numel()):
            only = torch.zeros(shape).view(-1)
            only[index] = 1
            metrics = _policy(case, kind, weighted=False, mask=only.view(shape), **options)[1]
            indicator.view(-1)[index] = metrics["clip_fraction"]
        return indicator

    return call


def _slime_gspo_kl(case: Case, output: Output, match: re.Match[str]) -> Answer:
    """With A = −1 and no clip GSPO's loss is the sequence ratio itself."""
    loss, _ = _policy(
        case, "gspo", weighted=False, advantages=-torch.ones_like(case["advantages"]), clip_low=1.0, clip_high=1e9
    )
    trained = case["response_mask"] > 0
    return Answer(-torch.where(trained, loss, 1.0).log(), trained)


_NO_DUAL_CLIP = {"clip_c": 1e30}

_POLICY_LOSSES: list[Rule] = [
    Mapped(r"out_(vanilla|gspo|sapo|cispo|reinforce)_(loss|grad)", differentiated("student_logprobs", _policy_scalar)),
    Mapped(r"out_(vanilla|gspo|sapo|cispo)_metrics", _policy_metrics),
    Mapped(r"out_slime_ppo_token(_grad)?", _slime_token("vanilla", **_NO_DUAL_CLIP)),
    Mapped(r"out_slime_ppo_dual_token(_grad)?", _slime_token("vanilla")),
    Mapped(r"out_slime_cispo_token(_grad)?", _slime_token("cispo")),
    Mapped(r"out_slime_ppo_clipfrac_token", _slime_clip_indicator("vanilla", **_NO_DUAL_CLIP)),
    Mapped(r"out_slime_cispo_clipfrac_token", _slime_clip_indicator("cispo")),
    Mapped(r"out_slime_gspo_kl", _slime_gspo_kl),
    Excluded(r"out_geo_mean_(loss|grad|metrics)", "GMPO is not offered: it averages the advantages of a sequence"),
]


# --- value_loss -----------------------------------------------------------------------------------------------------
def _value(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    return core.value_loss(
        case["vpreds"], case["values"], case["returns"], case["response_mask"], clip=case.params["cliprange_value"]
    )


def _value_scalar(case: Case, output: Output) -> Tensor:
    return core.aggregate(_value(case)[0], case["response_mask"], case.params["loss_agg_mode"])


_VALUE_LOSS: list[Rule] = [
    Mapped(r"out_(loss|grad)", differentiated("vpreds", _value_scalar)),
    Mapped(r"out_clipfrac", lambda case, *_: _value(case)[1]["clip_fraction"]),
]


# --- relax_policy_opd_loss ------------------------------------------------------------------------------------------
_RELAX_LABELS = {
    "opd_per_token_clip_frac": "per_token_clip_fraction",
    "opd_is_clip_frac": "importance_clip_fraction",
}


def relax_tail_is_meaningful(case: Case) -> Tensor:
    """[B, T]: Relax forms 1 − mass in float32 and keeps it above 1e-7; smaller tails are its rounding, not a quantity."""
    tails = [1 - case[f"{who}_topk_logprobs"].double().exp().sum(dim=-1) for who in ("student", "teacher")]
    return (tails[0] > 1e-5) & (tails[1] > 1e-5)


def _where_tails_allow(call: Call) -> Call:
    """Gradients are compared where the tail is meaningful, a scalar when it is so on every trained token."""

    def wrapped(case: Case, output: Output, match: re.Match[str]) -> Answer:
        value = call(case, output, match)
        assert isinstance(value, Tensor)
        if output.call["opd_norm_mode"] != "tail":
            return Answer(value)
        meaningful = relax_tail_is_meaningful(case) | (case["response_mask"] == 0)
        return Answer(value, meaningful.unsqueeze(-1) if value.dim() else meaningful.all())

    return wrapped


def _relax_loss(case: Case, output: Output, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    call = output.call
    if call["opd_token_selection"] == "student_sampled":
        divergence = core.sampled_kl(case["student_logprobs"], case["teacher_logprobs"], call["opd_kl_type"])
    else:
        divergence = core.set_divergence(
            case["student_topk_logprobs"],
            case["teacher_topk_logprobs"],
            call["opd_kl_type"],
            tail=call["opd_norm_mode"],
            jsd_alpha=call["opd_jsd_alpha"],
        )
    return core.distillation_loss(
        divergence,
        case["student_logprobs"],
        case["old_logprobs"],
        mask,
        per_token_clip=call["opd_per_token_clip"],
        importance_clip=call["opd_is_clip"],
    )


def _relax_scalar(case: Case, output: Output) -> Tensor:
    loss, _ = _relax_loss(case, output, case["response_mask"])
    return output.call["opd_loss_coef"] * core.aggregate(loss, case["response_mask"], "token-mean")


def _relax_metrics(case: Case, output: Output, match: re.Match[str]) -> Tensor:
    # Relax averages over all tokens; ours over the mask, here a mask of ones.
    _, metrics = _relax_loss(case, output, torch.ones_like(case["response_mask"]))
    return torch.stack([metrics[_RELAX_LABELS[label]] for label in case.labels[output.name]])


_RELAX_LOSS: list[Rule] = [
    Mapped(r"out_\w+_metrics", _relax_metrics),
    Mapped(r"out_sampled_\w+?(?<!_metrics)", differentiated("student_logprobs", _relax_scalar)),
    Mapped(r"out_topk_\w+?(?<!_metrics)", _where_tails_allow(differentiated("student_topk_logprobs", _relax_scalar))),
]


RULES: dict[str, list[Rule]] = {
    "agg_loss": _AGG_LOSS,
    "policy_losses": _POLICY_LOSSES,
    "value_loss": _VALUE_LOSS,
    "relax_policy_opd_loss": _RELAX_LOSS,
}
