"""Which teacher scores which sample."""

from __future__ import annotations

from opd_api.v1alpha1 import Routing, RoutingMode
from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import Failure, SampleError, TrainerError
from opd_trainer.sample import Sample


class SampleDroppedError(SampleError):
    """The sample has no teacher and routing.strict is false: it is left out, which is not a failure."""


def routing_value(sample: Sample, key: str) -> str | None:
    """The value of the routing key: the record's field, or the sample's data source."""
    value = sample.data_source if key == "data_source" and sample.data_source else sample.record.get(key)
    return None if value is None else str(value)


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
        """Names of the teachers that score the sample. Raises TrainerError (strict) or SampleDroppedError."""
        if self._routing.mode is RoutingMode.ENSEMBLE:
            return self._teachers
        value = routing_value(sample, self._routing.key)
        name = self._routing.map.get(value) if value is not None else None
        name = name or self._routing.default or (self._only_teacher() if not self._routing.map else None)
        if name is not None:
            return [name]
        message = (
            f"no teacher for {self._routing.key} = {value!r}; add it to routing.map, or set routing.default"
            " (or routing.strict: false to leave such samples out)"
        )
        if self._routing.strict:
            raise TrainerError(FailureClass.DATA, Reason.DATA_ERROR, message)
        raise SampleDroppedError(Failure(FailureClass.DATA, Reason.DATA_ERROR, message))

    def _only_teacher(self) -> str | None:
        return self._teachers[0] if len(self._teachers) == 1 else None
