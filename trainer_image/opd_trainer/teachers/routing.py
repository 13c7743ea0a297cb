"""Which teacher scores which sample, and which rows of the data have one: the input check and the run ask the same functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from opd_api.v1alpha1 import Data, Routing, RoutingMode
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError
from opd_trainer.rollout.columns import column, distinct, garbled
from opd_trainer.rollout.data import data_error, field_of, row_at
from opd_trainer.sample import Sample

#: The key that stands for the field that data.dataSourceField names.
DATA_SOURCE = "data_source"
#: Types of values that select a teacher; an object, a list or nothing does not.
SELECTING = (str, int, float)
#: Values without a teacher that a message shows.
SHOWN = 5


def routing_field(routing: Routing, data: Data) -> tuple[str, str] | None:
    """(path in the spec, field of the data) of what selects the teacher; None where no value is looked at."""
    if routing.mode is RoutingMode.ENSEMBLE or not routing.map:
        return None
    if routing.key == DATA_SOURCE:
        return "data.dataSourceField", data.data_source_field
    return "routing.key", routing.key


def teacher_of(routing: Routing, value: Any) -> str | None:
    """The teacher of a value of the routing field, None when it has none."""
    name = routing.map.get(str(value)) if isinstance(value, SELECTING) else None
    return name or routing.default


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """A data set by whether a teacher scores the row."""

    #: Rows with a teacher, from 0.
    rows: Sequence[int]
    left_out: int
    #: What is wrong with the others, and what to write; empty when there are none.
    complaint: str


def route_rows(routing: Routing, data: Data, records: Sequence[dict[str, Any]]) -> RoutedRows | None:
    """Look at every row; None where all have a teacher whatever they hold. Raises TrainerError(DataError)."""
    field = routing_field(routing, data)
    if field is None or routing.default is not None:
        return None
    values = column(records, field[1])
    try:
        if values is not None and all(teacher_of(routing, value) for value in distinct(values)):
            return RoutedRows(range(len(records)), 0, "")
        return _split(routing, field[1], _each(records, field[1], values))
    except UnicodeDecodeError as error:
        where = f"row {garbled(values)}" if values is not None else "a row"
        raise data_error(Reason.DATA_ERROR, f"{where} is not UTF-8 in {field[1]!r}; correct it") from error


def _each(records: Sequence[dict[str, Any]], name: str, values: Any) -> Iterator[Any]:
    """A field of every row; from its Arrow column where there is one, a chunk at a time."""
    if values is None:
        return (field_of(row_at(records, row), name) for row in range(len(records)))
    return (value for chunk in values.chunks for value in chunk.to_pylist())


def _split(routing: Routing, name: str, values: Iterator[Any]) -> RoutedRows:
    rows: list[int] = []
    others: list[int] = []
    unknown: set[str] = set()
    for row, value in enumerate(values):
        routed = teacher_of(routing, value) is not None
        (rows if routed else others).append(row)
        if not routed and len(unknown) < SHOWN:
            unknown.add(_shown(value))
    if not others:
        return RoutedRows(rows, 0, "")
    if routing.strict:
        remedy = "add them to routing.map, set routing.default, or leave such rows out with routing.strict: false"
    elif rows:
        remedy = "they are left out (routing.strict is false)"
    else:
        remedy = "no row is left to train on: add them to routing.map, or set routing.default"
    complaint = (
        f"{len(others)} of {len(rows) + len(others)} rows, the first is row {others[0]}, have no teacher for"
        f" {name} = {', '.join(sorted(unknown))}; {remedy}"
    )
    return RoutedRows(rows, len(others), complaint)


def _shown(value: Any) -> str:
    return repr(str(value)) if isinstance(value, SELECTING) else "nothing"


class Router:
    """`routing` as a function."""

    def __init__(self, routing: Routing, teachers: list[str]) -> None:
        self._routing = routing
        self._teachers = teachers
        unknown = {name for name in [*routing.map.values(), routing.default] if name and name not in teachers}
        if unknown:
            raise TrainerError(
                FailureClass.CONFIG,
                Reason.CONFIG_ERROR,
                f"routing names unknown teachers: {', '.join(sorted(unknown))}",
            )

    def route(self, sample: Sample) -> list[str]:
        """Names of the teachers that score the sample.

        Raises TrainerError(Data) when it has none: rows without one never become samples, see `route_rows`.
        """
        if self._routing.mode is RoutingMode.ENSEMBLE:
            return self._teachers
        key = self._routing.key
        value = sample.data_source if key == DATA_SOURCE else field_of(sample.record, key)
        name = teacher_of(self._routing, value) or (self._only_teacher() if not self._routing.map else None)
        if name is None:
            message = f"no teacher for {key} = {_shown(value)}; add it to routing.map, or set routing.default"
            raise TrainerError(FailureClass.DATA, Reason.DATA_ERROR, message)
        return [name]

    def _only_teacher(self) -> str | None:
        return self._teachers[0] if len(self._teachers) == 1 else None
