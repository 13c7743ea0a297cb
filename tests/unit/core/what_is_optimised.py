"""Renders the generated blocks of docs/what-is-optimised.md from the enumeration and from the rules of the API."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from enumeration import (
    ALPHA,
    SELECTIONS,
    STUDENT,
    TEACHER,
    TOP_K,
    Row,
    cosine,
    divergence_as_advantage,
    evaluate,
    full_loss,
    named,
    sampled_advantage,
    sampled_loss,
    set_loss,
    student_logits,
    surrogate_loss,
)

from opd_api import rules as api_rules
from opd_api.rules.distillation import RULES as DISTILLATION_RULES

PAGE = Path(__file__).parents[3] / "docs" / "what-is-optimised.md"
SET_KINDS = ("forward_kl", "reverse_kl", "jsd", "mixed", "low_var_kl")
FULL_KINDS = SET_KINDS[:4]
TAILS = ("tail", "norm", "trunc")

_REVERSE, _FORWARD = "∇KL(s‖t)", "∇KL(t‖s)"
_CODES = {rule.code for rule in DISTILLATION_RULES}


def render(page: str) -> str:
    """The page with every generated block replaced."""
    for name, block in BLOCKS.items():
        pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)"
        text = block().replace("\\", r"\\")
        page, count = re.subn(pattern, rf"\g<1>{text}\n\g<2>", page, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{PAGE.name} must hold the block {name!r} exactly once, it does {count} times")
    return page


# --- rows -----------------------------------------------------------------------------------------------------------
@cache
def sampled_rows() -> list[tuple[Row, dict[str, object]]]:
    """Rows of the sampled token with the options that ask for them."""
    chosen = [
        ("advantage", "k1", {}, sampled_advantage("k1")),
        ("loss", "k2", {}, sampled_loss("k2")),
        ("loss", "k3", {}, sampled_loss("k3")),
        ("loss", "abs", {}, sampled_loss("abs")),
        ("loss", "k1", {"straightThrough": True}, sampled_loss("k1", straight_through=True)),
        ("loss", "k3", {"straightThrough": True}, sampled_loss("k3", straight_through=True)),
        ("loss", "abs", {"straightThrough": True}, sampled_loss("abs", straight_through=True)),
        ("loss", "k1", {}, sampled_loss("k1")),
        ("advantage", "k2", {}, sampled_advantage("k2")),
        ("advantage", "k3", {}, sampled_advantage("k3")),
        ("advantage", "abs", {}, sampled_advantage("abs")),
        ("advantage", "k1", {"proximalTeacherAlpha": ALPHA}, sampled_advantage("k1", alpha=ALPHA)),
    ]
    return [
        (evaluate(signal, kind, "", field, ("student_sampled",))[0], options) for signal, kind, options, field in chosen
    ]


@cache
def set_rows() -> dict[tuple[str, str, str], Row]:
    """Rows of every selection, divergence and tail as a loss."""
    rows = [
        row
        for kind in SET_KINDS
        for tail in TAILS
        for row in evaluate("loss", kind, tail, set_loss(kind, tail), SELECTIONS)
    ]
    return {(row.selection, row.estimator, row.tail): row for row in rows}


def advantage_gradients() -> float:
    """The largest entry of any expected gradient when a divergence serves as an advantage."""
    largest = 0.0
    for kind in SET_KINDS:
        for tail in TAILS:
            _, gradient = divergence_as_advantage(set_loss(kind, tail))(student_logits().expand(len(SELECTIONS), -1))
            largest = max(largest, float(gradient.abs().max()))
    for kind in FULL_KINDS:
        _, gradient = divergence_as_advantage(full_loss(kind))(student_logits().unsqueeze(0))
        largest = max(largest, float(gradient.abs().max()))
    return largest


def verdict(signal: str, selection: str, divergence: str, tail: str, options: dict[str, object]) -> str:
    """What the API says of the combination: offered, or the codes of the rules that warn or refuse."""
    distillation: dict[str, object] = {
        "signal": signal,
        "tokenSelection": selection,
        "divergence": divergence,
        **options,
    }
    if selection not in ("student_sampled", "full"):
        distillation |= {"topK": 64, "tail": tail}
    document = {
        "apiVersion": "opd.dev/v1alpha1",
        "kind": "OPDJob",
        "metadata": {"name": "math"},
        "spec": {
            "student": {"model": {"source": "org/student"}},
            "teachers": [{"name": "teacher", "model": {"source": "org/teacher"}}],
            "data": {"source": "/data/prompts.jsonl"},
            "training": {"steps": 1},
            "storage": {"claimName": "opd"},
            "distillation": distillation,
        },
    }
    _, findings = api_rules.check_document(document)
    own = [finding for finding in findings if finding.code in _CODES]
    words = {"error": "refused", "warning": "warned"}
    return "; ".join(f"{words[finding.severity.value.lower()]}: {finding.code}" for finding in own) or "offered"


# --- blocks ---------------------------------------------------------------------------------------------------------
def example() -> str:
    tokens = " | ".join(f"v{index}" for index in range(len(STUDENT)))
    rows = [
        f"| {name} | " + " | ".join(f"{p:.2f}" for p in values) + " |"
        for name, values in (("s", STUDENT), ("t", TEACHER))
    ]
    return "\n".join([f"| | {tokens} |", "| --- |" + " --- |" * len(STUDENT), *rows])


_USE = {
    ("advantage", "k1", ""): "the default: reverse KL from one log-probability per token",
    ("loss", "k2", ""): "reverse KL without a policy-gradient loss",
    ("loss", "k3", ""): "only if forward KL from the student's own samples is wanted",
    ("loss", "abs", ""): "robust to outliers; flat near the end",
    ("loss", "k1", "straightThrough"): "k2's training with k1 in the curves",
    ("loss", "k3", "straightThrough"): "k2's training with a non-negative value in the curves",
    ("loss", "abs", "straightThrough"): "k2's training with the absolute log-ratio in the curves",
    ("loss", "k1", ""): "never: the teacher drops out",
    ("advantage", "k2", ""): "never: log-ratios of both signs are punished alike",
    ("advantage", "k3", ""): "never: it climbs the forward KL",
    ("advantage", "abs", ""): "never: log-ratios of both signs are punished alike",
    ("advantage", "k1", "proximalTeacherAlpha"): "TROPD: bounded steps towards a distant teacher",
}


def sampled() -> str:
    lines = [
        "| signal | divergence | expected value | expected gradient | cos with ∇KL(s‖t) | descent ends at KL(s‖t) | the API | when |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row, options in sampled_rows():
        option = next(iter(options), "")
        extra = "".join(f", {name}: {str(value).lower()}" for name, value in options.items())
        judged = verdict(row.signal, row.selection, row.estimator, "", options)
        lines.append(
            f"| {row.signal} | {row.estimator}{extra} | {row.value:.4f} | {_gradient(row)} | {_cosine(row, _REVERSE)} | "
            f"{_end(row)} | {judged} | {_USE[row.signal, row.estimator, option]} |"
        )
    return "\n".join(lines)


def full() -> str:
    lines = [
        "| signal | divergence | value | gradient | descent ends at KL(s‖t) | when |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    when = {
        "forward_kl": "cover everything that the teacher does",
        "reverse_kl": "concentrate on what the teacher does well",
        "jsd": "in between, bounded by log 2; weak far from the teacher",
        "mixed": "in between, without a bound",
    }
    for kind in FULL_KINDS:
        [row] = evaluate("loss", kind, "", full_loss(kind), ("full",))
        lines.append(f"| loss | {kind} | {row.value:.4f} | {_gradient(row)} | {_end(row)} | {when[kind]} |")
    [row] = evaluate("loss", "reverse_kl", "sampled", surrogate_loss(), ("student_topk",))
    lines.append(
        f"| loss | student_topk, reverse_kl, tail: sampled | {row.value:.4f} (not the KL) | {_gradient(row)} | {_end(row)} | "
        "the full reverse KL from K + 1 teacher log-probabilities |"
    )
    return "\n".join(lines)


def sets() -> str:
    rows = set_rows()
    lines = [
        "| selection | divergence | tail | value | cos with ∇KL(s‖t) | cos with ∇KL(t‖s) | descent ends at KL(s‖t) | "
        "student mass on the set then | the API |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for selection in SELECTIONS:
        for kind in SET_KINDS:
            for tail in TAILS:
                row = rows[selection, kind, tail]
                lines.append(
                    f"| {selection} | {kind} | {tail} | {row.value:.4f} | {_cosine(row, _REVERSE)} | {_cosine(row, _FORWARD)} | "
                    f"{_end(row)} | {row.end_set_mass:.2f} | {verdict('loss', selection, kind, tail, {})} |"
                )
    return "\n".join(lines)


def advantages() -> str:
    combinations = len(SELECTIONS) * len(SET_KINDS) * len(TAILS) + len(FULL_KINDS)
    size = "zero to rounding (below 1e-15)" if advantage_gradients() < 1e-15 else f"{advantage_gradients():.2g}"
    [true] = evaluate("loss", "reverse_kl", "", full_loss("reverse_kl"), ("full",))
    return (
        f"All {combinations} combinations of selection, divergence and tail as an advantage: the largest entry of the expected "
        f"gradient is {size}; the largest entry of ∇KL(s‖t) at the same point is {float(true.gradient.abs().max()):.3f}. "
        f"The API: {verdict('advantage', 'teacher_topk', 'reverse_kl', 'tail', {})}."
    )


def _gradient(row: Row) -> str:
    name = named(row.gradient)
    return "none of the references" if name is None else f"**{name}**"


def _cosine(row: Row, name: str) -> str:
    value = cosine(row.gradient, name)
    return "–" if value is None else f"{value:.2f}"


def _end(row: Row) -> str:
    if named(row.gradient) == "0":
        return "does not move"
    return "0" if row.end_reverse_kl < 5e-4 else f"{row.end_reverse_kl:.2f}"


BLOCKS = {"example": example, "sampled": sampled, "full": full, "sets": sets, "advantages": advantages}

__all__ = ["BLOCKS", "PAGE", "TOP_K", "render", "sampled_rows", "set_rows"]
