"""What went wrong with one request, and therefore what happens next."""

from __future__ import annotations

from enum import StrEnum

import aiohttp

from opd_api.vocabulary import Reason

#: Longest excerpt of a server's error text that travels on.
EXCERPT = 300


class FaultKind(StrEnum):
    """Decides between giving up, trying again and waiting."""

    #: The request is wrong and will be wrong again: the sample fails.
    DATA = "data"
    #: The teacher is not what the job needs: the run ends.
    TEACHER = "teacher"
    #: A reachable replica failed or answered nonsense: the next one is tried, a retry is used up.
    INFRA = "infra"
    #: No answer in time. Counts like INFRA if the replica can be reached, like UNREACHABLE if not.
    TIMEOUT = "timeout"
    #: No connection: the sample is held, no retry is used up.
    UNREACHABLE = "unreachable"
    #: The connection broke under a running request: tried again, bounded by a count of its own.
    CUT = "cut"


class Fault(Exception):
    """A failed request as a plain exception (aiohttp's cannot cross a Ray boundary)."""

    def __init__(self, kind: FaultKind, message: str, reason: Reason = Reason.TEACHER_ERROR) -> None:
        super().__init__(message)
        self.kind = kind
        #: What is reported when the fault ends the run.
        self.reason = reason


def fault_of_status(status: int, text: str) -> Fault:
    """Classify an HTTP status that is not success."""
    message = f"status {status}: {' '.join(text.split())[:EXCERPT]}"
    if status in (400, 413, 422):
        return Fault(FaultKind.DATA, message)
    if status in (408, 425, 429) or status >= 500:
        return Fault(FaultKind.INFRA, message)
    return Fault(FaultKind.TEACHER, message)


def fault_of_exception(error: BaseException) -> Fault:
    """Classify what the HTTP client raised."""
    text = f"{type(error).__name__}: {error}"[:EXCERPT]
    if isinstance(error, aiohttp.ClientSSLError):
        return Fault(FaultKind.TEACHER, text)
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return Fault(FaultKind.UNREACHABLE, text)
    if isinstance(error, TimeoutError):
        return Fault(FaultKind.TIMEOUT, "no answer within the request timeout")
    if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | ConnectionError):
        return Fault(FaultKind.CUT, text)
    return Fault(FaultKind.INFRA, text)
