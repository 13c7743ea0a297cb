"""The gradient of every combination by enumeration, and the page that shows it."""

from __future__ import annotations

import enumeration
import pytest
import torch
import what_is_optimised as page
from enumeration import named, references, sampled_advantage, sampled_loss, student_logits
from torch import Tensor

from opd_trainer import core


@pytest.fixture(scope="module")
def sets() -> dict[tuple[str, str, str], enumeration.Row]:
    return page.set_rows()


def _start() -> Tensor:
    return student_logits().unsqueeze(0)


@pytest.mark.parametrize(
    ("field", "gradient"),
    [
        (sampled_advantage("k1"), "∇KL(s‖t)"),
        (sampled_advantage("k3"), "∇KL(s‖t) − ∇KL(t‖s)"),
        (sampled_advantage("k2"), None),
        (sampled_advantage("abs"), None),
        (sampled_loss("k1"), "0"),
        (sampled_loss("k2"), "∇KL(s‖t)"),
        (sampled_loss("k3"), "∇KL(t‖s)"),
        (sampled_loss("abs"), "2∇TV(s, t)"),
        (sampled_loss("k1", straight_through=True), "∇KL(s‖t)"),
        (sampled_loss("k3", straight_through=True), "∇KL(s‖t)"),
        (sampled_advantage("k1", alpha=0.2), "∇KL(s‖sg[0.2t + 0.8s])"),
        (enumeration.surrogate_loss(), "∇KL(s‖t)"),
        (enumeration.full_loss("forward_kl"), "∇KL(t‖s)"),
        (enumeration.full_loss("reverse_kl"), "∇KL(s‖t)"),
        (enumeration.full_loss("jsd"), "∇JSD(s, t)"),
        (enumeration.full_loss("mixed"), "½∇KL(s‖t) + ½∇KL(t‖s)"),
    ],
)
def test_the_expected_gradient_is_the_one_we_say(field: enumeration.Field, gradient: str | None) -> None:
    assert named(field(_start())[1][0]) == gradient


def test_the_references_are_what_autograd_gives() -> None:
    teacher = enumeration.teacher_logprobs()
    leaf = student_logits().requires_grad_()
    s = torch.softmax(leaf, -1)
    values = {
        "∇KL(s‖t)": (s * (s.log() - teacher)).sum(),
        "∇KL(t‖s)": (teacher.exp() * (teacher - s.log())).sum(),
        "2∇TV(s, t)": (s - teacher.exp()).abs().sum(),
    }
    for name, value in values.items():
        gradient = torch.autograd.grad(value, leaf, retain_graph=True)[0]
        torch.testing.assert_close(references()[name], gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("signal", ["advantage", "loss"])
def test_a_gradient_without_the_teacher_is_refused(signal: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    field = sampled_advantage(kind) if signal == "advantage" else sampled_loss(kind)
    gradient = field(_start())[1]
    monkeypatch.setattr(enumeration, "TEACHER", tuple(reversed(enumeration.TEACHER)))
    blind = torch.allclose(field(_start())[1], gradient, atol=1e-12)
    verdict = page.verdict(signal, "student_sampled", kind, "", {})
    assert (verdict == "refused: SampledK1AsLoss") == blind


def test_what_is_offered_without_a_word_never_moves_away_from_the_teacher(
    sets: dict[tuple[str, str, str], enumeration.Row],
) -> None:
    start = float(enumeration.full_loss("reverse_kl")(_start())[0])
    for (selection, kind, tail), row in sets.items():
        if page.verdict("loss", selection, kind, tail, {}) == "offered" and tail != "norm":
            assert row.end_reverse_kl < start
    for row, options in page.sampled_rows():
        if page.verdict(row.signal, row.selection, row.estimator, "", options) == "offered":
            assert row.end_reverse_kl < 0.1 * start


def test_a_truncated_reverse_kl_moves_mass_out_of_the_set_and_is_refused(
    sets: dict[tuple[str, str, str], enumeration.Row],
) -> None:
    row = sets["teacher_topk", "reverse_kl", "trunc"]
    before = float(
        torch.softmax(student_logits(), -1)[enumeration.teacher_logprobs().topk(enumeration.TOP_K).indices].sum()
    )
    assert row.value < 0
    assert row.end_set_mass < before
    assert page.verdict("loss", "teacher_topk", "reverse_kl", "trunc", {}) == "refused: TruncReverseKl"


@pytest.mark.parametrize("kind", page.FULL_KINDS)
def test_the_tail_bucket_ends_at_the_teachers_mass_on_the_set(
    sets: dict[tuple[str, str, str], enumeration.Row], kind: str
) -> None:
    teacher_mass = enumeration.teacher_logprobs().exp().topk(enumeration.TOP_K).values.sum().item()
    assert sets["teacher_topk", kind, "tail"].end_set_mass == pytest.approx(teacher_mass, abs=1e-3)


def test_a_divergence_as_an_advantage_has_no_expected_gradient_and_is_refused() -> None:
    assert page.advantage_gradients() < 1e-15
    for selection in enumeration.SELECTIONS:
        for kind in page.SET_KINDS:
            assert page.verdict("advantage", selection, kind, "tail", {}).startswith("refused")


@pytest.mark.parametrize(("discount", "moves"), [(0.0, False), (0.9, True)])
def test_only_a_discount_gives_a_divergence_as_advantage_something_to_credit(discount: float, moves: bool) -> None:
    """Two steps, three tokens: the first token decides which distribution the second position has."""
    teacher = torch.log_softmax(torch.tensor([0.3, 1.0, -0.5], dtype=torch.float64), -1)
    first = torch.tensor([0.2, -0.4, 0.1], dtype=torch.float64).requires_grad_()
    second = torch.tensor([[1.0, 0, 0], [0, 2, 0], [0, 0, 3]], dtype=torch.float64)
    divergence = core.full_divergence(torch.stack([first.detach(), *second]), teacher.expand(4, 3), "reverse_kl")
    distillation = -torch.stack([divergence[0].expand(3), divergence[1:]], dim=1)  # [first token, position]
    everywhere = torch.ones(3, 2)
    advantages = core.combine_advantages(
        None, distillation, everywhere, task_weight=0.0, coefficient=1.0, discount=discount
    )
    logprobs = torch.log_softmax(first, -1)
    expected = (logprobs.detach().exp() * advantages[:, 0] * logprobs).sum()
    gradient = torch.autograd.grad(expected, first)[0]
    assert (float(gradient.abs().max()) > 1e-3) == moves


def test_whitening_afterwards_removes_a_constant_gap() -> None:
    generator = torch.Generator().manual_seed(1)
    advantages, mask = torch.randn(3, 5, dtype=torch.float64, generator=generator), torch.ones(3, 5)
    plain, shifted = (
        core.whiten(values, mask, core.masked_moments(values, mask)) for values in (advantages, advantages + 2.5)
    )
    torch.testing.assert_close(plain.mean().item(), 0.0, rtol=0, atol=1e-9)
    torch.testing.assert_close(shifted, plain, rtol=1e-9, atol=1e-9)


def test_the_page_shows_what_the_enumeration_gives(request: pytest.FixtureRequest) -> None:
    text = page.PAGE.read_text()
    rendered = page.render(text)
    if request.config.getoption("--update-docs", False):
        page.PAGE.write_text(rendered)
        return
    assert text == rendered, (
        f"{page.PAGE.name} is stale: run pytest tests/unit/core/test_what_is_optimised.py --update-docs and read the difference"
    )
