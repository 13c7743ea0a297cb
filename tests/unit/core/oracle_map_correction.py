"""Oracle rules of the family about the train/rollout mismatch."""

from __future__ import annotations

import re
from typing import Any

import torch
from oracle_io import Case, Output
from oracle_rules import Answer, Call, Excluded, Mapped, Rule
from torch import Tensor

from opd_trainer import core

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
    if float(per_sequence.sum()) == 0:
        return weights
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

RULES: dict[str, list[Rule]] = {"rollout_correction": _ROLLOUT_CORRECTION}
