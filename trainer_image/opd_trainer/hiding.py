"""Secrets that this process was given never leave it in a text: not in logs, documents or termination messages."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping

#: Names of environment variables that hold secrets.
_NAMES = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|_KEY(_|$)", re.IGNORECASE
)
#: Shapes of well-known tokens, for those that come from a file or an answer.
_SHAPES = re.compile(r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|(?<=Bearer )[A-Za-z0-9._~+/=-]{8,}")
#: Shorter values (`1`, `true`, `default`) are no secrets, and hiding them would garble every text.
_SHORTEST = 8
HIDDEN = "***"


def hide(text: str, environ: Mapping[str, str] | None = None) -> str:
    """The text with every secret replaced by ***."""
    for name, value in (os.environ if environ is None else environ).items():
        if len(value) >= _SHORTEST and value in text and _NAMES.search(name) and not os.path.isabs(value):
            text = text.replace(value, HIDDEN)
    return _SHAPES.sub(HIDDEN, text)


class HidingFormatter(logging.Formatter):
    """Formats a record, traceback included, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return hide(super().format(record))
