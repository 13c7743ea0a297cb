"""Rules 1 to 8: does the optimised quantity make sense? The formulas stand in docs/what-is-optimised.md."""

from __future__ import annotations

from opd_api.rules.finding import Hits, Level, rule
from opd_api.v1alpha1 import (
    SAMPLED_ESTIMATOR,
    SET_SELECTIONS,
    Distillation,
    Divergence,
    OPDJob,
    Signal,
    Tail,
    TokenSelection,
)

BASE = "spec.distillation"
SET_DIVERGENCES = frozenset(
    {Divergence.REVERSE_KL, Divergence.FORWARD_KL, Divergence.JSD, Divergence.MIXED, Divergence.LOW_VAR_KL}
)
#: Nearer to an end than this, the gradient of jsd has all but vanished.
JSD_MARGIN = 0.02


def estimator(options: Distillation) -> Divergence | None:
    """k1, k2, k3 or abs for student_sampled; None for sets and for names that only sets have."""
    if options.token_selection is not TokenSelection.STUDENT_SAMPLED:
        return None
    return SAMPLED_ESTIMATOR.get(options.divergence)


def on_set(options: Distillation) -> bool:
    """Whether positions are compared by a set with something left outside it."""
    return options.token_selection in SET_SELECTIONS


def proximal(options: Distillation) -> bool:
    """Whether the teacher is mixed with the student (TROPD)."""
    return options.proximal_teacher_alpha != 1.0


@rule(1, "SampledK1AsLoss", Level.ERROR, "signal loss with the sampled k1: the teacher drops out of the gradient")
def sampled_k1_as_loss(job: OPDJob) -> Hits:
    options = job.spec.distillation
    if options.signal is Signal.LOSS and estimator(options) is Divergence.K1 and not options.straight_through:
        yield (
            f"{BASE}.divergence",
            f"the gradient of {options.divergence} as a loss does not contain the teacher: its expectation is exactly zero. "
            "Write signal: advantage, or divergence: k2, or straightThrough: true.",
        )


@rule(2, "K3LossIsForwardKl", Level.WARNING, "signal loss with the sampled k3 optimises the forward KL")
def k3_loss_is_forward_kl(job: OPDJob) -> Hits:
    options = job.spec.distillation
    if options.signal is Signal.LOSS and estimator(options) is Divergence.K3 and not options.straight_through:
        yield (
            f"{BASE}.divergence",
            f"{options.divergence} as a loss optimises KL(teacher || student), the forward KL. "
            "For the reverse KL write divergence: k2.",
        )


@rule(2, "K3AdvantageBiased", Level.OVERRIDABLE, "signal advantage with k3 pushes the forward KL up")
def k3_advantage_biased(job: OPDJob) -> Hits:
    options = job.spec.distillation
    if options.signal is Signal.ADVANTAGE and estimator(options) is Divergence.K3:
        yield (
            f"{BASE}.divergence",
            f"{options.divergence} as an advantage follows the gradient of reverse KL minus forward KL, so it pushes the "
            "forward KL up. Write divergence: reverse_kl.",
        )


@rule(2, "AdvantageEstimatorBiased", Level.WARNING, "signal advantage with k2 or abs: no divergence has this gradient")
def advantage_estimator_biased(job: OPDJob) -> Hits:
    options = job.spec.distillation
    if options.signal is Signal.ADVANTAGE and estimator(options) in (Divergence.K2, Divergence.ABS):
        yield (
            f"{BASE}.divergence",
            f"{options.divergence} as an advantage is biased: it is the gradient of neither KL. Write divergence: reverse_kl.",
        )


@rule(3, "DivergenceNeedsSet", Level.ERROR, "forward_kl, jsd and mixed need more than the sampled token")
def divergence_needs_set(job: OPDJob) -> Hits:
    options = job.spec.distillation
    if options.token_selection is TokenSelection.STUDENT_SAMPLED and options.divergence not in SAMPLED_ESTIMATOR:
        yield (
            f"{BASE}.divergence",
            f"{options.divergence} cannot be computed from the sampled token alone. Write tokenSelection: teacher_topk with a "
            "topK, or divergence: reverse_kl.",
        )


@rule(
    3,
    "EstimatorNeedsSampled",
    Level.ERROR,
    "k1, k2, k3, abs and their aliases are for the sampled token",
)
def estimator_needs_sampled(job: OPDJob) -> Hits:
    options = job.spec.distillation
    if options.token_selection is TokenSelection.STUDENT_SAMPLED or options.divergence in SET_DIVERGENCES:
        return
    name = SAMPLED_ESTIMATOR[options.divergence]
    instead = {Divergence.K1: "reverse_kl", Divergence.K3: "low_var_kl"}.get(name, "reverse_kl, forward_kl or jsd")
    yield (
        f"{BASE}.divergence",
        f"{options.divergence} estimates from one sampled token, but tokenSelection is {options.token_selection}. "
        f"Write divergence: {instead}, or tokenSelection: student_sampled.",
    )


@rule(3, "FullLowVarKl", Level.ERROR, "low_var_kl is not defined over the whole vocabulary")
def full_low_var_kl(job: OPDJob) -> Hits:
    options = job.spec.distillation
    if options.token_selection is TokenSelection.FULL and options.divergence is Divergence.LOW_VAR_KL:
        yield (
            f"{BASE}.divergence",
            "low_var_kl weighs every token alike, however unlikely, so over the whole vocabulary it is none of the divergences. "
            "Write divergence: forward_kl.",
        )


@rule(4, "TopKMissing", Level.ERROR, "a set selection needs topK")
def top_k_missing(job: OPDJob) -> Hits:
    options = job.spec.distillation
    if on_set(options) and options.top_k is None:
        yield f"{BASE}.topK", f"tokenSelection: {options.token_selection} needs a set size. Write topK: 64."


@rule(4, "TopKWithoutSet", Level.ERROR, "topK is for set selections")
def top_k_without_set(job: OPDJob) -> Hits:
    options = job.spec.distillation
    if not on_set(options) and options.top_k is not None:
        yield (
            f"{BASE}.topK",
            f"tokenSelection: {options.token_selection} keeps no set. Remove topK, or write tokenSelection: teacher_topk.",
        )


@rule(5, "SetAdvantageIsZero", Level.OVERRIDABLE, "a set divergence as an advantage has no expected gradient")
def set_advantage_is_zero(job: OPDJob) -> Hits:
    options = job.spec.distillation
    sampled = options.token_selection is TokenSelection.STUDENT_SAMPLED
    if options.signal is Signal.ADVANTAGE and not sampled and options.discount_factor == 0:
        yield (
            f"{BASE}.signal",
            "a set divergence depends on the prefix only, so as an advantage its expected policy gradient is exactly zero. "
            "Write signal: loss, or a discountFactor greater than 0.",
        )


@rule(6, "TruncReverseKl", Level.OVERRIDABLE, "reverse KL on a truncated set shrinks by moving mass out of it")
def trunc_reverse_kl(job: OPDJob) -> Hits:
    options = job.spec.distillation
    if on_set(options) and options.divergence is Divergence.REVERSE_KL and options.tail is Tail.TRUNC:
        yield (
            f"{BASE}.tail",
            "reverse_kl with tail: trunc gets small when the student moves its mass out of the set. Write tail: tail.",
        )


@rule(6, "NormReverseKl", Level.WARNING, "reverse KL on a renormalised set does not see the mass outside")
def norm_reverse_kl(job: OPDJob) -> Hits:
    options = job.spec.distillation
    if on_set(options) and options.divergence is Divergence.REVERSE_KL and options.tail is Tail.NORM:
        yield f"{BASE}.tail", "reverse_kl with tail: norm does not see the mass outside the set. Write tail: tail."


@rule(6, "TruncForwardKl", Level.WARNING, "forward KL on a truncated set can be negative")
def trunc_forward_kl(job: OPDJob) -> Hits:
    options = job.spec.distillation
    if on_set(options) and options.divergence is Divergence.FORWARD_KL and options.tail is Tail.TRUNC:
        yield (
            f"{BASE}.tail",
            "forward_kl with tail: trunc is no divergence: it turns negative where the student has more mass on the set than "
            "the teacher, and we never clamp it at 0. Write tail: tail.",
        )


@rule(6, "SampledTailNeedsStudentTopk", Level.ERROR, "tail: sampled is for the reverse KL on student_topk, as a loss")
def sampled_tail_needs_student_topk(job: OPDJob) -> Hits:
    options = job.spec.distillation
    fits = (
        options.token_selection is TokenSelection.STUDENT_TOPK
        and options.divergence is Divergence.REVERSE_KL
        and options.signal is Signal.LOSS
    )
    if options.tail is Tail.SAMPLED and not fits:
        yield (
            f"{BASE}.tail",
            "tail: sampled corrects the gradient of reverse_kl on student_topk and nothing else. Write tail: tail, or "
            "signal: loss with tokenSelection: student_topk and divergence: reverse_kl.",
        )


@rule(7, "JsdAlphaRange", Level.ERROR, "jsdAlpha lies in [0, 1]")
def jsd_alpha_range(job: OPDJob) -> Hits:
    value = job.spec.distillation.jsd_alpha
    if not 0 <= value <= 1:
        yield f"{BASE}.jsdAlpha", f"{value} is outside [0, 1]. 0 is reverse_kl, 1 is forward_kl; write jsdAlpha: 0.5."


@rule(7, "JsdAlphaNearEnd", Level.WARNING, "near its ends jsd has hardly any gradient")
def jsd_alpha_near_end(job: OPDJob) -> Hits:
    options = job.spec.distillation
    value = options.jsd_alpha
    if options.divergence is not Divergence.JSD or not 0 <= value <= 1 or value in (0, 1):
        return
    if value <= JSD_MARGIN or value >= 1 - JSD_MARGIN:
        end, name = (0, "reverse_kl") if value < 0.5 else (1, "forward_kl")
        yield (
            f"{BASE}.jsdAlpha",
            f"at {value} the gradient of jsd has nearly vanished, and its direction jumps at the end: jsdAlpha: {end} is "
            f"{name}. Write divergence: {name}, or a value nearer to 0.5.",
        )


@rule(8, "ProximalAlphaRange", Level.ERROR, "proximalTeacherAlpha lies in (0, 1]")
def proximal_alpha_range(job: OPDJob) -> Hits:
    value = job.spec.distillation.proximal_teacher_alpha
    if not 0 < value <= 1:
        yield (
            f"{BASE}.proximalTeacherAlpha",
            f"{value} is outside (0, 1]. 1 is the plain teacher. TROPD recipes write 0.2.",
        )


@rule(8, "ProximalNeedsSampledAdvantage", Level.ERROR, "TROPD is for advantages of the sampled token")
def proximal_needs_sampled_advantage(job: OPDJob) -> Hits:
    options = job.spec.distillation
    sampled = options.token_selection is TokenSelection.STUDENT_SAMPLED
    if proximal(options) and not (options.signal is Signal.ADVANTAGE and sampled):
        yield (
            f"{BASE}.proximalTeacherAlpha",
            "the proximal teacher is defined for signal: advantage with tokenSelection: student_sampled. Write both, or "
            "proximalTeacherAlpha: 1.",
        )


@rule(8, "BaselineWithoutProximal", Level.WARNING, "subtractBaseline without TROPD takes a constant gap away")
def baseline_without_proximal(job: OPDJob) -> Hits:
    options = job.spec.distillation
    if options.subtract_baseline and not proximal(options):
        yield (
            f"{BASE}.subtractBaseline",
            "the mean gap of the step is subtracted although the teacher is not mixed (proximalTeacherAlpha: 1), so a "
            "constant gap teaches nothing. Write subtractBaseline: false, or proximalTeacherAlpha: 0.2.",
        )


RULES = (
    sampled_k1_as_loss,
    k3_loss_is_forward_kl,
    k3_advantage_biased,
    advantage_estimator_biased,
    divergence_needs_set,
    estimator_needs_sampled,
    full_low_var_kl,
    top_k_missing,
    top_k_without_set,
    set_advantage_is_zero,
    trunc_reverse_kl,
    norm_reverse_kl,
    trunc_forward_kl,
    sampled_tail_needs_student_topk,
    jsd_alpha_range,
    jsd_alpha_near_end,
    proximal_alpha_range,
    proximal_needs_sampled_advantage,
    baseline_without_proximal,
)
