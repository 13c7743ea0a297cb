"""Logs survive the pod: everything on stdout and stderr also goes to `<run>/logs/attempt-n/`."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

from opd_trainer.hiding import HidingFormatter

TRAINER_LOG = "trainer.log"
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
CLOSE_SECONDS = 2.0
_BLOCK = 1 << 16


def configure_logging(level: int = logging.INFO) -> None:
    """One line a record on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(HidingFormatter(FORMAT))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "urllib3", "filelock", "fsspec", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class Tee:
    """Copies file descriptors 1 and 2 into a file, output of child processes and C libraries included."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._saved = {number: os.dup(number) for number in (1, 2)}
        self._threads = []
        sys.stdout.flush()
        sys.stderr.flush()
        for number, original in self._saved.items():
            reader, writer = os.pipe()
            os.dup2(writer, number)
            os.close(writer)
            thread = threading.Thread(target=self._copy, args=(reader, original), daemon=True, name=f"tee-{number}")
            thread.start()
            self._threads.append(thread)

    def _copy(self, reader: int, original: int) -> None:
        while block := os.read(reader, _BLOCK):
            for target in (self._file, original):
                try:
                    os.write(target, block)
                except OSError:  # a full disk or a closed terminal must not stop the other copy
                    continue
        os.close(reader)

    def close(self) -> None:
        """Restore the descriptors. Children that still hold a pipe do not delay this for more than a moment."""
        sys.stdout.flush()
        sys.stderr.flush()
        for number, original in self._saved.items():
            os.dup2(original, number)
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
