"""The chunked functions: exact derivatives, any chunk size, any dtype, once differentiable."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import KINDS, TAILS, Problem, problems, quick
from torch import Tensor

from opd_trainer import core
from opd_trainer.core import _rows

ROWS, VOCABULARY, SET, HIDDEN = 5, 9, 3, 4


def _inputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

    teacher, ids = torch.log_softmax(draw(ROWS, VOCABULARY).double(), -1).topk(SET)
    return {
        "logits": draw(ROWS, VOCABULARY).requires_grad_(),
        "hidden": draw(ROWS, HIDDEN).requires_grad_(),
        "weight": draw(VOCABULARY, HIDDEN).requires_grad_(),
        "ids": ids,
        "teacher": teacher.to(dtype),
        "labels": torch.tensor([0, 8, int(ids[2, 0]), -100, 3]),
        "valid": torch.tensor([[True] * 3, [True, False, True], [True] * 3, [False] * 3, [True] * 3]),
    }


def _differentiable(result: core.TopKResult) -> tuple[Tensor, Tensor]:
    return result.divergence, result.sampled_logprobs


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", KINDS)
def test_topk_divergence_passes_gradcheck(kind: str, tail: str) -> None:
    x = _inputs()

    def from_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
        return _differentiable(
            core.topk_divergence(
                logits, x["ids"], x["teacher"], kind, tail=tail, labels=x["labels"], valid=x["valid"],
                temperature=0.8, chunk_rows=2, jsd_alpha=0.3,
            )
        )  # fmt: skip

    def from_hidden(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return _differentiable(
            core.linear_topk_divergence(
                hidden, weight, x["ids"], x["teacher"], kind, tail=tail, labels=x["labels"], valid=x["valid"],
                temperature=0.8, chunk_rows=2, jsd_alpha=0.3,
            )
        )  # fmt: skip

    assert torch.autograd.gradcheck(from_logits, (x["logits"],))
    # Along random directions: entry by entry takes ten times as long, and the logits' gradient was just checked so.
    assert torch.autograd.gradcheck(from_hidden, (x["hidden"], x["weight"]), fast_mode=True)


def test_gathers_pass_gradcheck() -> None:
    x = _inputs()
    repeated = torch.cat([x["ids"], x["ids"][:, :1]], dim=1)
    assert torch.autograd.gradcheck(lambda z: core.gather_logprobs(z, repeated, temperature=0.7), (x["logits"],))
    assert torch.autograd.gradcheck(
        lambda h, w: core.linear_gather_logprobs(h, w, repeated, chunk_rows=2), (x["hidden"], x["weight"])
    )
    assert torch.autograd.gradcheck(
        lambda h, w: core.linear_logprobs(h, w, x["labels"], chunk_rows=2)[0], (x["hidden"], x["weight"])
    )


def test_losses_pass_gradcheck() -> None:
    generator = torch.Generator().manual_seed(4)

    def draw() -> Tensor:
        return torch.randn(2, 3, dtype=torch.float64, generator=generator)

    a, b, advantages, mask = draw().requires_grad_(), draw(), draw(), torch.tensor([[1.0, 0, 1], [1, 1, 0]])
    for kind in ("k1", "k2", "k3", "abs"):
        assert torch.autograd.gradcheck(lambda x, kind=kind: core.sampled_kl(x, b, kind), (a,))
    for kind in ("vanilla", "sapo", "reinforce", "importance_sampling"):
        assert torch.autograd.gradcheck(lambda x, kind=kind: core.policy_loss(kind, x, b, advantages, mask)[0], (a,))
    assert torch.autograd.gradcheck(lambda x: core.value_loss(x, b, advantages, mask, clip=0.2)[0], (a,))
    assert torch.autograd.gradcheck(
        lambda x: core.distillation_loss(x, b, advantages, mask, per_token_clip=0.4, importance_clip=1.5)[0], (a,)
    )
    for mode in core.AggregationMode:
        assert torch.autograd.gradcheck(lambda x, mode=mode: core.aggregate(x, mask, mode), (a,))
    for kind in core.SetKind:
        for tail in core.TailMode:
            logprobs = (-1 - draw().abs()).requires_grad_()
            other = -1 - draw().abs()
            assert torch.autograd.gradcheck(
                lambda x, o=other, k=kind, t=tail: core.set_divergence(x, o, k, tail=t), (logprobs,)
            )
        if kind is not core.SetKind.LOW_VAR_KL:
            assert torch.autograd.gradcheck(
                lambda x, k=kind: core.full_divergence(x, b, k, temperature=0.5), (draw().requires_grad_(),)
            )


@quick
@given(problems(), st.integers(1, 8), st.sampled_from(KINDS), st.sampled_from(TAILS))
def test_the_chunk_size_changes_nothing(problem: Problem, chunk: int, kind: str, tail: str) -> None:
    def run(chunk_rows: int) -> list[Tensor]:
        leaf = problem.student.clone().requires_grad_()
        labels = problem.ids[:, 0]
        result = core.topk_divergence(
            leaf, problem.ids, problem.teacher_logprobs, kind, tail=tail, labels=labels, chunk_rows=chunk_rows
        )
        gradient = torch.autograd.grad((result.divergence + 2 * result.sampled_logprobs).sum(), leaf)[0]
        return [*(value.detach() for value in result), gradient]

    for chunked, whole in zip(run(chunk), run(problem.student.shape[0]), strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("columns", [1, 2, 4])
@pytest.mark.parametrize("tail", TAILS)
def test_the_tiles_of_the_fused_head_change_nothing(columns: int, tail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of two rows and so many tokens: maxima, masses and the set lie in different tiles."""
    x = _inputs()

    def run() -> list[Tensor]:
        leaves = [(4 * x[name].detach()).requires_grad_() for name in ("hidden", "weight")]
        result = core.linear_topk_divergence(
            *leaves, x["ids"], x["teacher"], "reverse_kl", tail=tail, labels=x["labels"], valid=x["valid"], chunk_rows=2
        )
        gathered = core.linear_gather_logprobs(*leaves, x["ids"], chunk_rows=2, temperature=0.6)
        gradients = torch.autograd.grad(
            (result.divergence + 2 * result.sampled_logprobs).sum() + gathered.sum(), leaves
        )
        return [*(value.detach() for value in result), gathered.detach(), *gradients]

    whole = run()
    monkeypatch.setattr(_rows, "_CPU_BYTES", columns * 2 * 8)
    for tiled, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(tiled, expected, rtol=1e-9, atol=1e-9)


@quick
@given(problems())
def test_masses_entropy_and_sampled_logprobs_are_those_of_the_softmax(problem: Problem) -> None:
    labels = problem.ids[:, 0]
    result = core.topk_divergence(problem.student, problem.ids, problem.teacher_logprobs, "jsd", labels=labels)
    logprobs = torch.log_softmax(problem.student, -1)
    expected = {
        "student_mass": problem.student_logprobs.exp().sum(-1),
        "teacher_mass": problem.teacher_logprobs.exp().sum(-1),
        "entropy": -(logprobs.exp() * logprobs).sum(-1),
        "sampled_logprobs": logprobs.gather(1, labels.unsqueeze(1))[:, 0],
    }
    for name, value in expected.items():
        torch.testing.assert_close(getattr(result, name), value, rtol=1e-9, atol=1e-9)


def test_the_fused_head_equals_the_logits_it_never_forms() -> None:
    x = _inputs()
    logits = x["hidden"] @ x["weight"].T
    options = {"labels": x["labels"], "valid": x["valid"], "temperature": 0.6}
    fused = core.linear_topk_divergence(x["hidden"], x["weight"], x["ids"], x["teacher"], "jsd", **options)
    plain = core.topk_divergence(logits, x["ids"], x["teacher"], "jsd", **options)
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    gathered = core.linear_gather_logprobs(x["hidden"], x["weight"], x["ids"])
    torch.testing.assert_close(gathered, core.gather_logprobs(logits, x["ids"]), rtol=1e-9, atol=1e-9)
    sampled, entropy = core.linear_logprobs(x["hidden"], x["weight"], x["labels"], temperature=0.6)
    torch.testing.assert_close(sampled, plain.sampled_logprobs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(entropy, plain.entropy, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(half: torch.dtype) -> None:
    x = _inputs(half)
    exact = {name: x[name].detach().double().requires_grad_() for name in ("logits", "hidden", "weight")}
    calls = [
        (("logits",), lambda z: core.topk_divergence(z, x["ids"], x["teacher"], "forward_kl").divergence),
        (
            ("hidden", "weight"),
            lambda h, w: core.linear_topk_divergence(h, w, x["ids"], x["teacher"], "forward_kl").divergence,
        ),
    ]
    for names, call in calls:
        value, reference = call(*(x[name] for name in names)), call(*(exact[name] for name in names))
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), reference, rtol=1e-5, atol=1e-5)
        gradients = torch.autograd.grad(value.sum(), [x[name] for name in names])
        references = torch.autograd.grad(reference.sum(), [exact[name] for name in names])
        for gradient, expected in zip(gradients, references, strict=True):
            assert gradient.dtype == half  # rounded once, at the end
            torch.testing.assert_close(gradient.double(), expected, rtol=2**-8, atol=1e-3)


def test_a_tail_far_below_one_rounding_keeps_its_digits_in_float32() -> None:
    logits = torch.tensor([[20.0, 0.0, 0.0, 0.0]])
    ids, teacher = torch.tensor([[0]]), torch.log_softmax(torch.tensor([[2.0, 0.0, 0.0, 0.0]]), -1)[:, :1]
    value = core.topk_divergence(logits, ids, teacher, "forward_kl").divergence
    exact = core.topk_divergence(logits.double(), ids, teacher.double(), "forward_kl").divergence
    torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=0)


def test_a_second_derivative_is_refused() -> None:
    x = _inputs()
    value = core.topk_divergence(x["logits"], x["ids"], x["teacher"], "jsd").divergence.sum()
    first = torch.autograd.grad(value, x["logits"], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.sum().backward()
    gathered = core.gather_logprobs(x["logits"], x["ids"]).sum()
    first = torch.autograd.grad(gathered, x["logits"], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.sum().backward()


@pytest.mark.parametrize("bad", [-1, VOCABULARY])
def test_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    x = _inputs()
    ids = x["ids"].clone()
    ids[1, 2] = bad
    with pytest.raises(IndexError, match=r"\[0, 9\)"):
        core.gather_logprobs(x["logits"], ids)
    with pytest.raises(IndexError, match=r"\[0, 9\)"):
        core.linear_topk_divergence(x["hidden"], x["weight"], ids, x["teacher"], "jsd")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"ids": torch.zeros(ROWS, dtype=torch.int64)}, r"\[N, K\]"),
        ({"teacher_logprobs": torch.zeros(ROWS, SET + 1)}, "teacher_logprobs"),
        ({"labels": torch.zeros(ROWS + 1, dtype=torch.int64)}, "labels"),
        ({"valid": torch.ones(ROWS, 1, dtype=torch.bool)}, "valid"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, object], complaint: str) -> None:
    x = _inputs()
    arguments = {"ids": x["ids"], "teacher_logprobs": x["teacher"], **change}
    with pytest.raises(ValueError, match=complaint):
        core.topk_divergence(x["logits"], kind="jsd", **arguments)
    with pytest.raises(ValueError, match=r"\[V, 4\]|" + complaint):
        core.linear_topk_divergence(x["hidden"], x["weight"].T, kind="jsd", **arguments)
