"""Structured logs: one JSON object a line, with the job, its uid and attempt where one is being worked on.

No function of the operator logs a request or response body, so a Secret's value has no way into a line.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

_context: ContextVar[dict[str, object] | None] = ContextVar("opd_log_context", default=None)
#: Attributes of a LogRecord that are not somebody's `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """time, level, logger, message, then the context and the record's `extra` fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _context.get() or {}
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


@contextmanager
def log_context(**fields: object) -> Iterator[None]:
    """Adds fields to every line that is logged inside."""
    token = _context.set({**(_context.get() or {}), **fields})
    try:
        yield
    finally:
        _context.reset(token)


def configure(level: str) -> None:
    """JSON on standard output. Libraries speak up from WARNING on: their INFO repeats what we log in our own words.
    kopf warns about what is meant here (no signals in its thread, kinds that are not served): it speaks from ERROR on."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("kopf").setLevel(logging.ERROR)
    logging.getLogger("opd_operator").setLevel(level.upper())
