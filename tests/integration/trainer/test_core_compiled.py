"""torch.compile takes the core; the compiler itself needs seconds to start."""

from __future__ import annotations

import torch
from torch import Tensor

from opd_trainer import core

ROWS, VOCABULARY, SET, HIDDEN = 5, 9, 3, 4


def _inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    teacher, ids = torch.log_softmax(draw(ROWS, VOCABULARY), -1).topk(SET)
    return {
        "hidden": draw(ROWS, HIDDEN).requires_grad_(),
        "weight": draw(VOCABULARY, HIDDEN).requires_grad_(),
        "ids": ids,
        "teacher": teacher,
        "labels": torch.tensor([0, 8, int(ids[2, 0]), -100, 3]),
    }


def test_the_compiler_takes_the_whole_loss_as_one_graph() -> None:
    x = _inputs()
    mask = torch.ones(1, ROWS)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        result = core.linear_topk_divergence(
            2 * hidden, weight, x["ids"], x["teacher"], "reverse_kl", labels=x["labels"], chunk_rows=2
        )
        sampled = core.sampled_kl(result.sampled_logprobs, x["teacher"][:, 0], "k3", straight_through=True)
        policy, _ = core.policy_loss("vanilla", sampled[None], sampled[None], x["teacher"][None, :, 1], mask)
        return core.aggregate(policy + result.divergence, mask, "token-mean")

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for function in (compiled, loss):
        for name in ("hidden", "weight"):
            x[name].grad = None
        value = function(x["hidden"], x["weight"])
        value.backward()
        gradients = [x["hidden"].grad.clone(), x["weight"].grad.clone()]
        if function is compiled:
            expected = [value.detach(), *gradients]
    for ours, theirs in zip([value.detach(), *gradients], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
