"""Rule 26: a value that nothing reads is said to have no effect, so that nobody waits for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from opd_api.rules.distillation import BASE, on_set
from opd_api.rules.finding import Hits, Level, rule
from opd_api.v1alpha1 import (
    AdvantageEstimator,
    Distillation,
    Divergence,
    OPDJob,
    OPDJobSpec,
    RoutingMode,
    Signal,
    Tail,
    Teacher,
    Whiten,
)


@dataclass(frozen=True, slots=True)
class Unread:
    """A value that was written (differs from its default) and when nothing reads it."""

    path: str
    unread: Callable[[OPDJobSpec], bool]
    reader: str


def _options(check: Callable[[Distillation], bool]) -> Callable[[OPDJobSpec], bool]:
    return lambda spec: check(spec.distillation)


UNREAD = (
    Unread(
        f"{BASE}.straightThrough",
        _options(lambda o: o.straight_through and (o.signal is Signal.ADVANTAGE or on_set(o))),
        "only signal: loss with tokenSelection: student_sampled reads it",
    ),
    Unread(
        f"{BASE}.importanceClip",
        _options(lambda o: o.importance_clip is not None and o.signal is Signal.ADVANTAGE),
        "only signal: loss reads it; the advantage signal has task.policyLoss",
    ),
    Unread(
        f"{BASE}.tail", _options(lambda o: o.tail in (Tail.NORM, Tail.TRUNC) and not on_set(o)), "only sets have a tail"
    ),
    Unread(
        f"{BASE}.jsdAlpha",
        _options(lambda o: o.jsd_alpha != 0.5 and o.divergence is not Divergence.JSD),
        "only divergence: jsd reads it",
    ),
    Unread(
        f"{BASE}.mixedForwardWeight",
        _options(lambda o: o.mixed_forward_weight != 0.5 and o.divergence is not Divergence.MIXED),
        "only divergence: mixed reads it",
    ),
    Unread(
        f"{BASE}.discountFactor",
        _options(lambda o: o.discount_factor > 0 and o.signal is Signal.LOSS),
        "only signal: advantage reads it",
    ),
    Unread(
        f"{BASE}.subtractBaseline",
        _options(lambda o: o.subtract_baseline and o.signal is Signal.LOSS),
        "only signal: advantage reads it",
    ),
    Unread(
        f"{BASE}.whiten",
        lambda spec: (
            spec.distillation.whiten is Whiten.BEFORE_DISTILLATION
            and (spec.task.task_adv_weight == 0 or spec.task.advantage_estimator is AdvantageEstimator.NONE)
        ),
        "it whitens task advantages, and taskAdvWeight or advantageEstimator leaves none",
    ),
    Unread(
        "spec.routing.map",
        lambda spec: bool(spec.routing.map) and spec.routing.mode is RoutingMode.ENSEMBLE,
        "an ensemble asks every teacher",
    ),
    Unread(
        "spec.task.advantageEstimator",
        lambda spec: spec.task.advantage_estimator is not AdvantageEstimator.NONE and spec.task.task_adv_weight == 0,
        "taskAdvWeight is 0, so the reward is only shown",
    ),
)


def _served_only(teacher: Teacher) -> list[str]:
    """Fields of an external teacher that only a server of ours would read."""
    names = {
        "image": teacher.image is not None,
        "args": bool(teacher.args),
        "tensorParallelSize": teacher.tensor_parallel_size > 1,
        "replicas": teacher.replicas > 1,
        "template": teacher.template is not None,
    }
    return [name for name, written in names.items() if written]


@rule(26, "HasNoEffect", Level.WARNING, "a written value that nothing reads")
def has_no_effect(job: OPDJob) -> Hits:
    for entry in UNREAD:
        if entry.unread(job.spec):
            yield entry.path, f"this value has no effect: {entry.reader}. Remove it."
    for index, teacher in enumerate(job.spec.teachers):
        if teacher.external:
            for name in _served_only(teacher):
                yield (
                    f"spec.teachers[{index}].{name}",
                    "this value has no effect: the teacher is somebody else's server (endpoints). Remove it.",
                )


RULES = (has_no_effect,)
