"""The pairs that docs/what-is-optimised.md sends elsewhere, followed with sampled tokens (trainer environment).

The page computes expectations with the core. Here the learner's own head and objective get a micro-batch of tokens that the
student has drawn, as in a run, and plain descent follows the gradient that comes back. The student is one distribution over
the page's eight tokens. Where it ends is compared with where the page says that it ends.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from recipe import ROOT
from torch import Tensor

sys.path.insert(0, str(ROOT / "tests/unit/core"))
import enumeration as page

from opd_api.trainer_config import Run, project
from opd_api.v1alpha1 import OPDJobSpec
from opd_trainer import core
from opd_trainer.learner.batch import MicroBatch, TokenSets
from opd_trainer.learner.head import HeadKind, HeadRequest, divergence_kind, from_logits
from opd_trainer.learner.objective import Normaliser, Objective

#: Tokens of one step. The descent and its number of steps are those of the page.
TOKENS = 4096
#: Seen and expected ends may differ by this many nats: sampling.
TOLERANCE = 0.06


@dataclass(frozen=True)
class Pair:
    """One combination with the page's field of expected gradients."""

    name: str
    distillation: dict[str, Any]
    expected: page.Field
    #: Its place in the page's rows of sets; None for one sampled token.
    selection: str | None = None


@dataclass(frozen=True)
class Seen:
    """KL(s‖t), in nats: at the start, where the page's descent ends, and where this one did."""

    name: str
    start: float
    expected: float
    seen: float
    curve: list[float]

    @property
    def agrees(self) -> bool:
        return abs(self.seen - self.expected) <= TOLERANCE


def _sampled(signal: str, kind: str, **options: Any) -> Pair:
    alpha = options.get("proximalTeacherAlpha", 1.0)
    field = page.sampled_loss(kind) if signal == "loss" else page.sampled_advantage(kind, alpha=alpha)
    extra = "".join(f", α {value}" for value in options.values())
    return Pair(f"{signal}, {kind}{extra}", {"signal": signal, "divergence": kind, **options}, field)


def _set(selection: str, kind: str, tail: str, signal: str = "loss") -> Pair:
    options = {"signal": signal, "divergence": kind, "tokenSelection": selection, "topK": page.TOP_K, "tail": tail}
    field = page.set_loss(kind, tail)
    if signal == "advantage":
        field = page.divergence_as_advantage(field)
    return Pair(f"{signal}, {selection}, {kind}, {tail}", options, field, selection)


#: First those that go to the teacher, then those that do not.
PAIRS = (
    _sampled("advantage", "k1"),
    _sampled("loss", "k2"),
    _sampled("loss", "k3"),
    _sampled("advantage", "k1", proximalTeacherAlpha=page.ALPHA),
    _set("teacher_topk", "reverse_kl", "tail"),
    _sampled("loss", "k1"),
    _sampled("advantage", "k2"),
    _sampled("advantage", "abs"),
    _sampled("advantage", "k3"),
    _set("teacher_topk", "forward_kl", "norm"),
    _set("teacher_topk", "forward_kl", "trunc"),
    _set("teacher_topk", "reverse_kl", "trunc"),
    _set("intersection", "reverse_kl", "norm"),
    _set("teacher_topk", "reverse_kl", "tail", "advantage"),
)


def _objective(distillation: dict[str, Any]) -> tuple[Objective, Any]:
    """The learner's objective of a job. The rules are not asked: some of these they refuse."""
    spec = {
        "runtime": {"device": "cpu"},
        "storage": {"claimName": "claim"},
        "student": {"model": {"source": "/models/student", "dtype": "fp32"}},
        "teachers": [{"name": "teacher", "backend": "transformers", "model": {"source": "/models/teacher"}}],
        "data": {"source": "/data/prompts.jsonl"},
        "rollout": {"engine": "transformers"},
        "training": {"steps": 1, "dtype": "fp32"},
        "distillation": distillation,
    }
    run = Run(
        namespace="local", name="pair", uid8="00000000", attempt=1, directory="/run", mount_path="/run", teachers=[]
    )
    config = project(OPDJobSpec.model_validate(spec), run)
    return Objective(config), config.distillation


def _batch(logits: Tensor, selection: str | None, generator: torch.Generator) -> MicroBatch:
    """One response of TOKENS tokens, each drawn from the student."""
    labels = torch.multinomial(torch.softmax(logits, -1), TOKENS, replacement=True, generator=generator)
    teacher = page.teacher_logprobs()
    sets = None
    if selection is not None:
        ids, valid = page.token_sets(logits.expand(len(page.SELECTIONS), -1))
        row = page.SELECTIONS.index(selection)
        ids, valid = ids[0].expand(TOKENS, -1), valid[row].expand(TOKENS, -1)
        sets = TokenSets(ids, torch.where(valid, teacher[ids], -torch.inf), valid)
    everywhere = torch.ones(1, TOKENS, dtype=torch.bool)
    return MicroBatch(
        sample_ids=[0],
        lengths=[TOKENS],
        input_ids=torch.zeros(1, TOKENS, dtype=torch.long),
        position_ids=torch.arange(TOKENS).unsqueeze(0),
        rows=torch.arange(TOKENS),
        labels=labels,
        computed=everywhere,
        trained=everywhere,
        rollout=torch.log_softmax(logits, -1)[labels].unsqueeze(0),
        teacher=teacher[labels].unsqueeze(0),
        selected=sets,
        student_top=None,
        task=None,
        token_rewards=torch.zeros(1, TOKENS, dtype=logits.dtype),
        teacher_of=["teacher"],
    )


def gradient(objective: Objective, options: Any, batch: MicroBatch, logits: Tensor) -> Tensor:
    """[V]: what one update of the learner back-propagates to the student's logits."""
    leaf = logits.clone().requires_grad_()
    kind = divergence_kind(options) if objective.compares_sets else HeadKind.SAMPLED
    output = from_logits(leaf.expand(TOKENS, -1), batch, HeadRequest(kind, 1.0, options))
    logprobs = batch.to_grid(output.logprobs)
    divergence = None if output.divergence is None else batch.to_grid(output.divergence)
    if objective.advantage_signal:
        signal = objective.distillation_advantages(batch, logprobs.detach(), divergence)
        batch.advantages = objective.combine(batch, None, signal)
    loss, _ = objective.loss(batch, logprobs, logprobs.detach(), divergence, Normaliser(TOKENS, 1, 1))
    return torch.autograd.grad(loss, leaf)[0]


def follow(pair: Pair) -> Seen:
    """Descent on sampled gradients, with the page's steps."""
    objective, options = _objective(pair.distillation)
    generator = torch.Generator().manual_seed(0)
    logits = page.student_logits()
    curve = [_reverse_kl(logits)]
    for _ in range(page.STEPS):
        logits = page.step(logits, gradient(objective, options, _batch(logits, pair.selection, generator), logits))
        curve.append(_reverse_kl(logits))
    selections = ("student_sampled",) if pair.selection is None else page.SELECTIONS
    rows = page.evaluate("", "", "", pair.expected, selections)
    row = rows[0 if pair.selection is None else page.SELECTIONS.index(pair.selection)]
    return Seen(pair.name, curve[0], row.end_reverse_kl, curve[-1], curve)


def _reverse_kl(logits: Tensor) -> float:
    return float(core.full_divergence(logits, page.teacher_logprobs(), "reverse_kl"))


def main() -> None:
    """Write all pairs as JSON."""
    out = Path(json.loads(sys.argv[1])["out"])
    seen = [asdict(result) | {"agrees": result.agrees} for result in map(follow, PAIRS)]
    out.write_text(json.dumps(seen, indent=1))
    for result in seen:
        print(f"{result['name']}: expected {result['expected']:.2f}, seen {result['seen']:.2f}")


if __name__ == "__main__":
    main()
