"""JSON that is nested deeper than Arrow holds: found before Arrow's reader meets it, which ends the whole process on some of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

#: Objects and lists within each other, the row among them. Arrow's C interface ends at 64 levels of a type.
MOST_LEVELS = 60
_CHUNK_BYTES = 8 << 20
_QUOTE, _BACKSLASH, _NEWLINE = ord('"'), ord("\\"), ord("\n")
_OPEN, _CLOSE = (ord("["), ord("{")), (ord("]"), ord("}"))


def too_deep(path: Path) -> int | None:
    """The first line (from 0; of JSON lines: the row) that goes deeper than MOST_LEVELS, None when none does.

    JSON lines, an object a line, cost one look at each line. Anything else is followed bracket by bracket.
    """
    suspicious = None
    with path.open("rb") as file:
        for number, line in enumerate(file):
            text = line.strip()
            if not text:
                continue
            if not (text.startswith(b"{") and text.endswith(b"}")):
                return _follow(path)
            brackets = line.count(b"{") + line.count(b"[")
            if suspicious is None and brackets > MOST_LEVELS and Nesting().feed(line) is not None:
                suspicious = number
    return suspicious


def _follow(path: Path) -> int | None:
    nesting = Nesting()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            line = nesting.feed(chunk)
            if line is not None:
                return line
    return None


class Nesting:
    """Follows brackets outside of texts through pieces of a file. No JSON text holds a line break, so each line begins outside."""

    def __init__(self) -> None:
        self.depth = 0
        self.line = 0
        self._inside = False
        self._escape = False

    def feed(self, piece: bytes) -> int | None:
        """The line in which this piece goes too deep, if it does."""
        data = np.frombuffer(piece, dtype=np.uint8)
        newline = data == _NEWLINE
        inside = self._texts(data, newline)
        delta = np.isin(data, _OPEN).astype(np.int64) - np.isin(data, _CLOSE)
        depth = self.depth + np.cumsum(np.where(inside, 0, delta))
        deep = np.flatnonzero(depth > MOST_LEVELS)
        if len(deep):
            return self.line + int(np.count_nonzero(newline[: deep[0]]))
        self.depth = max(int(depth[-1]), 0)
        self.line += int(np.count_nonzero(newline))
        return None

    def _texts(self, data: NDArray[np.uint8], newline: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """True where a byte stands within a text. [N] -> [N]"""
        quote = (data == _QUOTE) & ~self._escaped(data)
        count = np.cumsum(quote) + self._inside
        # An even number at the beginning of each line, whatever came before.
        base = np.maximum.accumulate(np.where(newline, count, 0))
        inside = (count - base) % 2 == 1
        self._inside = bool(inside[-1])
        return inside

    def _escaped(self, data: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """True behind an odd number of backslashes. [N] -> [N]"""
        place = np.arange(len(data))
        other = np.maximum.accumulate(np.where(data != _BACKSLASH, place, -1))
        # Backslashes that end at each byte; a run that goes back to the beginning goes on from the piece before.
        run = place - other
        run[other == -1] += self._escape
        escaped = np.empty(len(data), dtype=np.bool_)
        escaped[0] = self._escape
        escaped[1:] = run[:-1] % 2 == 1
        self._escape = bool(run[-1] % 2 == 1)
        return escaped
