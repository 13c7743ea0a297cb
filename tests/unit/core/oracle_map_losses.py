"""Oracle rules of the families about per-token losses, aggregation and the train/rollout correction."""

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
    Mapped(r"out_topk_\w+?(?<!_metrics)", differentiated("student_topk_logprobs", _relax_scalar)),
]


# --- rollout_correction ---------------------------------------------------------------------------------------------
_VERL_GUARD = 1e-8

Correction = tuple[Tensor, Tensor, dict[str, Tensor]]


def _correct(case: Case, *, mask: Tensor | None = None, **options: Any) -> Correction:
    return core.correction_weights(
        case["old_logprobs"],
        case["rollout_logprobs"],
        case["response_mask"] if mask is None else mask,
        **options,
    )


def _verl_correction(case: Case, output: Output) -> Correction:
    call = output.call
    threshold = call["rollout_is_threshold"]
    options: dict[str, Any] = {"level": call["rollout_is"], "batch_normalize": call["rollout_is_batch_normalize"]}
    if isinstance(threshold, str) and "_" in threshold:
        low, high = (float(bound) for bound in threshold.split("_"))
        return _correct(case, kind="icepop", low=low, high=high, **options)
    return _correct(case, kind="tis", high=float(threshold), **options)


def _labelled(case: Case, output: Output, offered: dict[str, Tensor]) -> Answer:
    """A metrics vector, compared at the labels that we offer."""
    labels = case.labels[output.name]
    values = [offered.get(label, torch.tensor(0.0, dtype=torch.float64)).double() for label in labels]
    return Answer(torch.stack(values), torch.tensor([label in offered for label in labels]))


def _verl_weights(case: Case, output: Output, match: re.Match[str]) -> Tensor:
    weights = _verl_correction(case, output)[0]
    if not output.call["rollout_is_batch_normalize"]:
        return weights
    # verl adds 1e-8 to every count it divides by, which the float64 tolerance sees.
    lengths = (case["response_mask"] > 0).sum(dim=-1).double()
    if output.call["rollout_is"] == "token":
        return weights * (lengths.sum() + _VERL_GUARD) / lengths.sum()
    per_sequence = weights.amax(dim=-1)
    return weights * per_sequence.sum() / (per_sequence * lengths / (lengths + _VERL_GUARD)).sum()


def _verl_metrics(case: Case, output: Output, match: re.Match[str]) -> Answer:
    """The mean and the effective sample size of the weights.

    verl's other entries are not offered: they describe the truncated weights at the token level and the raw ratio at the
    sequence level, count fully masked sequences, and invent a lower bound 1/high.
    """
    metrics = _verl_correction(case, output)[2]
    offered = {
        "rollout_is_mean": metrics["weight_mean"],
        "rollout_is_eff_sample_size": metrics["effective_sample_size"],
    }
    if output.call["rollout_is"] == "sequence":
        offered |= {"rollout_is_max": metrics["ratio_max"], "rollout_is_min": metrics["ratio_min"]}
    return _labelled(case, output, offered)


def _rejected_k1(case: Case, output: Output, match: re.Match[str]) -> Tensor:
    # verl bounds −log ρ, the inverse ratio.
    low, high = (float(bound) for bound in output.call["rollout_rs_threshold"].split("_"))
    level = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric"}[match[1]]
    return _correct(case, kind="mis", level=level, low=1 / high, high=1 / low)[1]


def _rejected_metrics(case: Case, output: Output, match: re.Match[str]) -> Tensor:
    keep = _rejected_k1(case, output, match)
    mask = case["response_mask"]
    dropped = 1 - keep.sum() / mask.sum().clamp_min(1)
    sequences = ((mask - keep).amax(dim=-1) > 0).double()
    by_label = {"rollout_rs_masked_fraction": dropped, "rollout_rs_seq_masked_fraction": sequences.mean()}
    return torch.stack([by_label[label].double() for label in case.labels[output.name]])


def _offpolicy_metrics(case: Case, output: Output, match: re.Match[str]) -> Answer:
    metrics = _correct(case, kind="tis", high=1e9)[2]
    count = (case["response_mask"] > 0).sum().double()
    chi2 = (metrics["chi2"] + 1) * count / (count + _VERL_GUARD) - 1
    return _labelled(case, output, {"kl": metrics["kl"], "k3_kl": metrics["k3_kl"], "chi2_token": chi2})


_SLIME_KIND = {"truncate": "tis", "clip": "tis", "mask": "mis"}


def _slime_mis(case: Case, output: Output) -> Correction:
    call = output.call
    low = None if call["tis_mode"] == "truncate" else call["tis_lower_bound"]
    return _correct(
        case,
        kind=_SLIME_KIND[call["tis_mode"]],
        level=call["tis_level"],
        low=low,
        high=call["tis_upper_bound"],
        batch_normalize=call["tis_batch_normalize"],
    )


def _slime_mis_weights(case: Case, output: Output, match: re.Match[str]) -> Answer:
    weights, keep, _ = _slime_mis(case, output)
    # slime leaves weights at dropped tokens, which no loss reads; ours are 0 there.
    comparable = keep > 0
    if output.call["tis_batch_normalize"] and output.call["tis_level"] != "token":
        # slime's mean over sequences counts fully masked ones; ours and verl's does not.
        comparable = comparable & (case["response_mask"] > 0).any(dim=-1).all()
    return Answer(weights, comparable)


def _slime_mis_mask(case: Case, output: Output, match: re.Match[str]) -> Tensor:
    return _slime_mis(case, output)[1]


def _slime_mis_metrics(case: Case, output: Output, match: re.Match[str]) -> Answer:
    metrics = _slime_mis(case, output)[2]
    return _labelled(
        case,
        output,
        {
            "kl": metrics["kl"],
            "k3_kl": metrics["k3_kl"],
            "chi2_token": metrics["chi2"],
            "tis_weight_before_bound": metrics["ratio_mean"],
            "tis_truncate_fraction": metrics["fraction_high"],
            "tis_weight_after_bound": metrics["weight_mean"],
        },
    )


def _slime_rejection(case: Case, output: Output) -> tuple[Tensor, Tensor]:
    """slime's two stages: weights by TIS, the mask by a rejection level and a veto."""
    call = output.call
    weights, _, _ = _slime_mis(case, output)
    _, keep, _ = _correct(
        case,
        kind="mis",
        level=call["rs_level"],
        low=call["rs_lower_bound"],
        high=call["rs_upper_bound"],
        veto=call["rs_veto_threshold"],
    )
    return weights, keep


def _slime_plain(kind: str) -> Call:
    """slime's two built-in functions act on all tokens."""

    def call(case: Case, output: Output, match: re.Match[str]) -> Tensor:
        everywhere = torch.ones_like(case["response_mask"])
        low, high = output.call["tis_clip_low"], output.call["tis_clip"]
        weights, _, _ = _correct(case, mask=everywhere, kind=kind, low=low, high=high)
        if not match[1]:
            return weights
        return (weights != torch.exp(case["old_logprobs"] - case["rollout_logprobs"])).double()

    return call


_ROLLOUT_CORRECTION: list[Rule] = [
    Mapped(r"out_(tis|icepop)_(token|sequence)_[0-9p_]+(_norm)?", _verl_weights),
    Mapped(r"out_(tis|icepop)_(token|sequence)_\w+_metrics", _verl_metrics),
    Mapped(r"out_rs_(token|seq_sum|seq_mean)_k1", _rejected_k1),
    Mapped(r"out_rs_(token|seq_sum|seq_mean)_k1_metrics", _rejected_metrics),
    Excluded(
        r"out_rs_((token|seq_sum|seq_mean|seq_max)_k[23]|token_k1_and_seq_max_k3)(_metrics)?",
        "rejection by k2, k3 or a sequence maximum is not offered: mis bounds the ratio itself",
    ),
    Mapped(r"out_offpolicy_metrics", _offpolicy_metrics),
    Mapped(r"out_mis_metrics", _slime_mis_metrics),
    Mapped(r"out_mis_(token|sequence|geometric)_(truncate|clip|mask)(_norm)?", _slime_mis_weights),
    Mapped(r"out_mis_(token|sequence|geometric)_(truncate|clip|mask)(_norm)?_mask", _slime_mis_mask),
    Mapped(
        r"out_mis_rs_(geometric|veto)",
        lambda case, output, _: Answer(_slime_rejection(case, output)[0], _slime_rejection(case, output)[1] > 0),
    ),
    Mapped(r"out_mis_rs_(geometric|veto)_mask", lambda case, output, _: _slime_rejection(case, output)[1]),
    Mapped(r"out_slime_tis(_clipfrac_token)?", _slime_plain("tis")),
    Mapped(r"out_slime_icepop(_clipfrac_token)?", _slime_plain("icepop")),
]

RULES: dict[str, list[Rule]] = {
    "agg_loss": _AGG_LOSS,
    "policy_losses": _POLICY_LOSSES,
    "value_loss": _VALUE_LOSS,
    "relax_policy_opd_loss": _RELAX_LOSS,
    "rollout_correction": _ROLLOUT_CORRECTION,
}
