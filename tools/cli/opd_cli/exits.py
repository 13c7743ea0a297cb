"""Exit codes of `opd`."""

from __future__ import annotations


class Exit:
    """0, 1 and 2 as everywhere; `opd run` adds those of opd-trainer."""

    OK = 0
    REFUSED = 1
    USAGE = 2


EXIT_CODES = {
    "0": "done",
    "1": "a job would be refused, or a file cannot be read",
    "2": "wrong usage, or this environment lacks what the command needs",
    "64": "run: configuration",
    "65": "run: data",
    "69": "run: teacher",
    "70": "run: internal error",
    "75": "run: stopped or infrastructure, the same command resumes",
}
