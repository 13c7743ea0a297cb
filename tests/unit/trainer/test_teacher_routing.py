"""Which teacher scores which sample; nobody is scored by a teacher that was not asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from opd_api.v1alpha1 import Routing
from opd_api.vocabulary import FailureClass
from opd_trainer.errors import TrainerError
from opd_trainer.sample import Sample
from opd_trainer.teachers.routing import Router


def sample(source: str = "", **record: Any) -> Sample:
    return Sample(1, 1, source, np.array([1], np.int32), record=record)


def test_the_data_source_selects_the_teacher() -> None:
    router = Router(Routing(map={"math": "m", "code": "c"}), ["m", "c"])
    assert router.route(sample("math")) == ["m"]
    assert router.route(sample("code")) == ["c"]


def test_another_key_is_read_from_the_record() -> None:
    router = Router(Routing(key="level", map={"3": "m"}, default="c"), ["m", "c"])
    assert router.route(sample("math", level=3)) == ["m"]
    assert router.route(sample("math")) == ["c"]


def test_a_key_with_a_dot_is_a_field_of_an_object() -> None:
    router = Router(Routing(key="extra.subject", map={"algebra": "m"}, default="c"), ["m", "c"])
    assert router.route(sample(extra={"subject": "algebra"})) == ["m"]
    assert router.route(sample(extra=None)) == ["c"]
    assert router.route(sample(extra={"subject": None})) == ["c"]


def test_one_teacher_without_a_map_scores_everything() -> None:
    assert Router(Routing(), ["only"]).route(sample("anything")) == ["only"]


def test_one_teacher_with_a_map_scores_only_what_the_map_names() -> None:
    with pytest.raises(TrainerError, match="no teacher"):
        Router(Routing(map={"math": "only"}), ["only"]).route(sample("poems"))


def test_a_value_without_a_teacher_ends_a_strict_run_with_a_remedy() -> None:
    with pytest.raises(TrainerError, match=r"routing\.map") as caught:
        Router(Routing(map={"math": "m"}), ["m", "c"]).route(sample("poems"))
    assert caught.value.failure.failure_class is FailureClass.DATA


def test_an_ensemble_asks_every_teacher() -> None:
    assert Router(Routing(mode="ensemble"), ["a", "b"]).route(sample("x")) == ["a", "b"]


def test_unknown_names_in_the_map_are_refused_at_once() -> None:
    with pytest.raises(TrainerError, match="unknown teachers: nobody"):
        Router(Routing(map={"math": "nobody"}), ["m"])
