"""When failed samples end the run: a sliding window over the samples that ended."""

from __future__ import annotations

from collections import Counter, deque

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import Failure, TrainerError

#: Below this many ended samples a fraction says nothing.
SMALLEST_WINDOW = 20


class FailureBook:
    """Counts failures; raises once more than `max_fraction` of the last samples failed.

    The window holds the last four batches, so a teacher that goes bad late is noticed within a batch, not after hours.
    """

    def __init__(self, *, max_fraction: float, batch_samples: int) -> None:
        self._max_fraction = max_fraction
        self._window: deque[Failure | None] = deque(maxlen=max(SMALLEST_WINDOW, 4 * batch_samples))
        self._failed = 0
        self.total: Counter[FailureClass] = Counter()

    def success(self) -> None:
        """A sample became ready."""
        self._push(None)

    def failure(self, failure: Failure) -> None:
        """A sample failed. Raises TrainerError(Data | Teacher, FailedFractionExceeded)."""
        self.total[failure.failure_class] += 1
        self._push(failure)
        ended = max(len(self._window), SMALLEST_WINDOW)
        if self._failed > self._max_fraction * ended:
            self._raise()

    def _push(self, entry: Failure | None) -> None:
        if len(self._window) == self._window.maxlen and self._window[0] is not None:
            self._failed -= 1
        self._window.append(entry)
        if entry is not None:
            self._failed += 1

    def _raise(self) -> None:
        failures = [entry for entry in self._window if entry is not None]
        by_class = Counter(entry.failure_class for entry in failures)
        worst = FailureClass.TEACHER if by_class[FailureClass.TEACHER] * 2 > len(failures) else FailureClass.DATA
        teachers = Counter(entry.teacher for entry in failures if entry.teacher)
        last = failures[-1]
        raise TrainerError(
            worst,
            Reason.FAILED_FRACTION_EXCEEDED,
            f"{self._failed} of the last {len(self._window)} samples failed, data.maxFailedFraction is {self._max_fraction}; "
            f"the last one: {last.reason}: {last.message}",
            teacher=teachers.most_common(1)[0][0] if worst is FailureClass.TEACHER and teachers else None,
        )
