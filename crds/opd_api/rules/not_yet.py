"""Options that are designed but do not train yet: refused, never ignored. An entry goes when the trainer learns it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from opd_api.rules.finding import Hits, Level, rule
from opd_api.v1alpha1 import OPDJob, OPDJobSpec, WeightSync


@dataclass(frozen=True, slots=True)
class NotYet:
    """One option and what to write until it trains."""

    path: str
    used: Callable[[OPDJobSpec], bool]
    advice: str


NOT_YET: tuple[NotYet, ...] = (
    NotYet(
        "spec.training.weightSync",
        lambda spec: spec.training.weight_sync is WeightSync.NCCL,
        "weightSync: nccl is not trained yet. Write weightSync: disk.",
    ),
)


@rule(25, "NotYet", Level.ERROR, "options that do not train yet")
def not_yet(job: OPDJob) -> Hits:
    for entry in NOT_YET:
        if entry.used(job.spec):
            yield entry.path, entry.advice


RULES = (not_yet,)
