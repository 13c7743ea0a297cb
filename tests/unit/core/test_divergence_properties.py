"""What must hold for every divergence, whatever the numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import KINDS, KL_KINDS, TAILS, Problem, problems, quick

from opd_trainer import core

TIGHT = {"rtol": 1e-9, "atol": 1e-9}


def _logit_gradient(problem: Problem, kind: str, tail: str, **options: object) -> torch.Tensor:
    leaf = problem.student.clone().requires_grad_()
    result = core.topk_divergence(leaf, problem.ids, problem.teacher_logprobs, kind, tail=tail, **options)
    return torch.autograd.grad(result.divergence.sum(), leaf)[0]


@quick
@given(problems(), st.sampled_from(KINDS), st.sampled_from(TAILS))
def test_equal_models_have_no_divergence(problem: Problem, kind: str, tail: str) -> None:
    same = problem._replace(teacher=problem.student)
    value = core.set_divergence(same.student_logprobs, same.teacher_logprobs, kind, tail=tail)
    torch.testing.assert_close(value, torch.zeros_like(value), **TIGHT)


@quick
@given(problems(), st.sampled_from(KL_KINDS), st.sampled_from(["tail", "norm"]))
def test_equal_models_have_no_gradient_with_tail_or_norm(problem: Problem, kind: str, tail: str) -> None:
    gradient = _logit_gradient(problem._replace(teacher=problem.student), kind, tail)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), **TIGHT)


def test_equal_models_have_a_gradient_with_trunc() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 6, dtype=torch.float64, generator=generator)
    problem = Problem(logits, logits, torch.tensor([[0, 1]]))
    s, inside = torch.softmax(logits, -1), torch.zeros(1, 6, dtype=torch.float64)
    inside[0, :2] = 1
    mass = s[:, :2].sum()
    torch.testing.assert_close(_logit_gradient(problem, "forward_kl", "trunc"), s * (mass - inside), **TIGHT)
    torch.testing.assert_close(_logit_gradient(problem, "reverse_kl", "trunc"), s * (inside - mass), **TIGHT)


@quick
@given(problems(), st.sampled_from(KL_KINDS), st.sampled_from(TAILS))
def test_the_whole_vocabulary_makes_all_tails_equal(problem: Problem, kind: str, tail: str) -> None:
    vocabulary = problem.student.shape[1]
    everything = torch.arange(vocabulary).expand_as(problem.student)
    problem = problem._replace(ids=everything)
    full = core.full_divergence(problem.student, problem.teacher, kind, jsd_alpha=0.3)
    part = core.set_divergence(problem.student_logprobs, problem.teacher_logprobs, kind, tail=tail, jsd_alpha=0.3)
    torch.testing.assert_close(part, full, **TIGHT)
    fused = core.topk_divergence(
        problem.student, everything, problem.teacher_logprobs, kind, tail=tail, jsd_alpha=0.3
    ).divergence
    torch.testing.assert_close(fused, full, **TIGHT)


@quick
@given(problems(), st.sampled_from(KL_KINDS))
def test_the_tail_bucket_bounds_the_full_divergence_and_grows_with_the_set(problem: Problem, kind: str) -> None:
    full = core.full_divergence(problem.student, problem.teacher, kind)
    previous = torch.full_like(full, -1e-9)
    for size in range(1, problem.ids.shape[1] + 1):
        part = problem._replace(ids=problem.ids[:, :size])
        value = core.topk_divergence(part.student, part.ids, part.teacher_logprobs, kind).divergence
        assert bool((value >= previous - 1e-9).all())
        assert bool((value <= full + 1e-9).all())
        previous = value


@quick
@given(problems(), st.sampled_from(KINDS), st.sampled_from(TAILS), st.randoms(use_true_random=False))
def test_the_order_of_the_set_changes_nothing(problem: Problem, kind: str, tail: str, random: object) -> None:
    order = list(range(problem.ids.shape[1]))
    random.shuffle(order)
    shuffled = problem._replace(ids=problem.ids[:, order])
    for compute in (
        lambda p: core.set_divergence(p.student_logprobs, p.teacher_logprobs, kind, tail=tail),
        lambda p: _logit_gradient(p, kind, tail),
    ):
        torch.testing.assert_close(compute(shuffled), compute(problem), **TIGHT)


@quick
@given(problems(), st.sampled_from(KINDS), st.sampled_from(TAILS), st.floats(-6, -0.5))
def test_the_closed_form_is_the_derivative_of_the_set_divergence(
    problem: Problem, kind: str, tail: str, floor: float
) -> None:
    for log_prob_floor in (None, floor):
        options = {"jsd_alpha": 0.3, "forward_weight": 0.7, "log_prob_floor": log_prob_floor}
        leaf = problem.student.clone().requires_grad_()
        gathered = torch.log_softmax(leaf, -1).gather(1, problem.ids)
        value = core.set_divergence(gathered, problem.teacher_logprobs, kind, tail=tail, **options)
        expected = torch.autograd.grad(value.sum(), leaf)[0]
        torch.testing.assert_close(_logit_gradient(problem, kind, tail, **options), expected, rtol=1e-6, atol=1e-8)


@quick
@given(problems())
def test_jsd_is_symmetric_at_one_half_and_has_the_named_ends(problem: Problem) -> None:
    s, t = problem.student_logprobs, problem.teacher_logprobs
    torch.testing.assert_close(core.set_divergence(s, t, "jsd"), core.set_divergence(t, s, "jsd"), **TIGHT)
    for alpha, kind in ((0.0, "reverse_kl"), (1.0, "forward_kl")):
        at_end = core.set_divergence(s, t, "jsd", jsd_alpha=alpha)
        torch.testing.assert_close(at_end, core.set_divergence(s, t, kind), **TIGHT)


@quick
@given(problems(), st.floats(0, 1))
def test_mixed_weighs_forward_and_reverse(problem: Problem, weight: float) -> None:
    s, t = problem.student_logprobs, problem.teacher_logprobs
    mixed = core.set_divergence(s, t, "mixed", forward_weight=weight)
    forward, reverse = (core.set_divergence(s, t, kind) for kind in ("forward_kl", "reverse_kl"))
    torch.testing.assert_close(mixed, weight * forward + (1 - weight) * reverse, **TIGHT)


@quick
@given(problems(), st.integers(1, 5), st.sampled_from(KL_KINDS))
def test_vocabularies_that_differ_by_padding_count_the_shared_ids(problem: Problem, padding: int, kind: str) -> None:
    rows, vocabulary = problem.student.shape
    junk = torch.randn(rows, padding, dtype=torch.float64)
    expected = core.full_divergence(problem.student, problem.teacher, kind)
    wide_teacher = torch.cat([problem.teacher, junk], dim=1)
    torch.testing.assert_close(core.full_divergence(problem.student, wide_teacher, kind), expected, **TIGHT)
    wide_student = torch.cat([problem.student, junk], dim=1).requires_grad_()
    value = core.full_divergence(wide_student, problem.teacher, kind)
    torch.testing.assert_close(value, expected, **TIGHT)
    gradient = torch.autograd.grad(value.sum(), wide_student)[0]
    assert bool((gradient[:, vocabulary:] == 0).all())
    masked_teacher = torch.cat([problem.teacher, torch.full_like(junk, -torch.inf)], dim=1)
    torch.testing.assert_close(core.full_divergence(wide_student, masked_teacher, kind), expected, **TIGHT)


@quick
@given(problems(), st.data())
def test_union_and_intersection_are_the_set_operations(problem: Problem, data: st.DataObject) -> None:
    vocabulary = problem.student.shape[1]
    size = data.draw(st.integers(1, vocabulary))
    other = torch.stack([torch.randperm(vocabulary)[:size] for _ in problem.ids])
    for mode, operation in (("union", set.union), ("intersection", set.intersection)):
        ids, valid = core.select_tokens(problem.ids, other, mode)
        assert torch.equal(ids, torch.cat([problem.ids, other], dim=-1))
        for row in range(ids.shape[0]):
            chosen = ids[row][valid[row]].tolist()
            assert len(chosen) == len(set(chosen))
            assert set(chosen) == operation(set(problem.ids[row].tolist()), set(other[row].tolist()))


@quick
@given(problems(), st.lists(st.floats(0.1, 5), min_size=2, max_size=4))
def test_an_ensemble_mixes_probabilities(problem: Problem, weights: list[float]) -> None:
    shares = torch.tensor(weights, dtype=torch.float64)
    teachers = torch.stack([torch.log_softmax(problem.teacher.roll(i, dims=1), -1) for i in range(len(weights))])
    mixture = core.mixture_logprobs(teachers, shares)
    expected = (teachers.exp() * (shares / shares.sum())[:, None, None]).sum(0).log()
    torch.testing.assert_close(mixture, expected, **TIGHT)
    torch.testing.assert_close(mixture.exp().sum(-1), torch.ones_like(mixture[:, 0]), **TIGHT)


def test_a_teacher_of_an_ensemble_may_rule_a_token_out() -> None:
    teachers = torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=torch.float64).log()
    mixture = core.mixture_logprobs(teachers, torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(mixture.exp(), torch.tensor([0.875, 0.125], dtype=torch.float64), **TIGHT)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda x: core.set_divergence(x, x, "kl"), "forward_kl, reverse_kl"),
        (lambda x: core.set_divergence(x, x, "jsd", jsd_alpha=1.5), "jsd_alpha"),
        (lambda x: core.set_divergence(x, x, "mixed", forward_weight=-1.0), "forward_weight"),
        (lambda x: core.set_divergence(x, x, "jsd", tail="bucket"), "tail, norm, trunc"),
        (lambda x: core.set_divergence(x, x, "jsd", log_prob_floor=1.0), "log_prob_floor"),
        (lambda x: core.full_divergence(x, x, "low_var_kl"), "forward_kl"),
        (lambda x: core.full_divergence(x, x, "jsd", temperature=0.0), "temperature"),
        (lambda x: core.sampled_kl(x, x, "k4"), "k1, k2, k3, abs"),
        (lambda x: core.sampled_kl(x, x, "k1", value_clamp=0.0), "value_clamp"),
        (lambda x: core.mixture_logprobs(x, torch.ones(3)), "one weight per teacher"),
        (lambda x: core.mixture_logprobs(x, torch.tensor([1.0, -1.0])), "negative"),
        (lambda x: core.distillation_advantage(x, x, alpha=0.0), "alpha"),
        (lambda x: core.distillation_advantage(x, x, alpha=1.01), "alpha"),
        (lambda x: core.correction_weights(x, x, x, kind="tis", low=3.0), "low"),
        (lambda x: core.select_tokens(x.long(), x.long(), "xor"), "union"),
        (lambda x: core.aggregate(x, x, "mean"), "token-mean"),
    ],
)
def test_what_is_not_offered_is_refused_with_what_is(call: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        call(torch.zeros(2, 3))


@quick
@given(st.floats(0.001, 0.999), st.floats(-30, 0), st.floats(-30, 0))
def test_the_proximal_teacher_is_bounded_below(alpha: float, student: float, teacher: float) -> None:
    advantage = core.distillation_advantage(
        torch.tensor([[student]], dtype=torch.float64), torch.tensor([[teacher]], dtype=torch.float64), alpha=alpha
    ).item()
    assert advantage >= math.log1p(-alpha) - 1e-9
    direct = math.log(alpha * math.exp(teacher) + (1 - alpha) * math.exp(student)) - student
    assert advantage == pytest.approx(direct, abs=1e-9)
