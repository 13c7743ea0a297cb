"""What the API server can answer besides yes, as exceptions that callers tell apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from opd_operator.model import WriteProblemKind

#: Answers that a later attempt may change: too many requests, the server or a proxy in trouble.
TRANSIENT_CODES = frozenset({429, 500, 502, 503, 504})
_WORDS = 512
#: Server-side apply of an object that does not fit its schema is answered with 500, and so it is every time.
_UNFIT = "failed to create typed patch object"
#: OwnerReferencesPermissionEnforcement reads the list of types twice a minute; of a newer one it says this.
_TYPE_NOT_READ = "cannot find RESTMapping"


#: etcd's refusal of an object of more than 1.5 MiB comes as a fault of the server, and does so every time.
_TOO_LARGE = "request is too large"
#: Words of an admission webhook, and of a ValidatingAdmissionPolicy, whatever code they answer with.
_DENIED = re.compile(r"denied (?:the )?request")
#: An admission webhook that does not answer: nothing is admitted until somebody repairs or removes it.
_WEBHOOK = "failed calling webhook"


class ApiError(Exception):
    """An answer of 400 or more. `message` holds the server's words, cut to 512 characters."""

    def __init__(self, code: int, reason: str, message: str, body: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{code} {reason}: {message[:_WORDS]}")
        self.code = code
        self.reason = reason
        self.message = message[:_WORDS]
        self.body = body or {}

    @property
    def retry_after(self) -> float | None:
        """Seconds that the server asks to wait, if it does."""
        value = self.body.get("details", {}).get("retryAfterSeconds")
        return float(value) if value is not None else None

    @property
    def already_exists(self) -> bool:
        """An object of this name exists."""
        return self.code == 409 and self.reason == "AlreadyExists"

    @property
    def conflict(self) -> bool:
        """A precondition (resourceVersion or uid) does not hold."""
        return self.code == 409 and not self.already_exists

    @property
    def namespace_terminating(self) -> bool:
        """The namespace is going away or gone: nothing can be created in it any more."""
        causes = self.body.get("details", {}).get("causes") or ()
        if any(cause.get("reason") == "NamespaceTerminating" for cause in causes):
            return True
        return self.code == 404 and self.body.get("details", {}).get("kind") == "namespaces"

    @property
    def no_dry_run(self) -> bool:
        """An admission webhook with side effects was not asked, so the dry run says nothing."""
        return self.code == 400 and "does not support dry run" in self.message

    @property
    def fields(self) -> tuple[str, ...]:
        """Paths of the fields that the server finds invalid, where it names them."""
        causes = self.body.get("details", {}).get("causes") or ()
        return tuple(str(cause.get("field", "")) for cause in causes)

    @property
    def problem(self) -> WriteProblemKind | None:
        """What kind of refusal of a write this is; None when trying again later may help."""
        if self.code == 403 and _TYPE_NOT_READ in str(self.body.get("message") or self.message):
            return WriteProblemKind.TYPE_NOT_READ
        if self.code == 403:
            return WriteProblemKind.QUOTA if "exceeded quota" in self.message else WriteProblemKind.FORBIDDEN
        if self.code == 500 and _WEBHOOK in self.message:
            return WriteProblemKind.FORBIDDEN
        if self.code == 404:
            return WriteProblemKind.NOT_SERVED
        if self.code in (400, 422) and _DENIED.search(self.message):
            return WriteProblemKind.FORBIDDEN
        if self.code in (400, 405, 413, 415, 422):
            return WriteProblemKind.INVALID
        return None


class Unreachable(Exception):
    """No answer: the connection failed or the time ran out, and the retries are used up."""


class NotLeader(Exception):
    """A write was about to be sent by a process that does not hold the Lease (any more)."""


def from_answer(code: int, text: str, body: Any) -> ApiError:
    """The error of an answer, whether it is a Status object or a proxy's page."""
    if isinstance(body, dict) and body.get("kind") == "Status":
        if code == 500 and _UNFIT in str(body.get("message")):
            return ApiError(422, "Invalid", body["message"], body)
        if code == 500 and _TOO_LARGE in str(body.get("message")):
            return ApiError(413, "RequestEntityTooLarge", body["message"], body)
        return ApiError(code, body.get("reason") or "", body.get("message") or "", body)
    return ApiError(code, "", text[:_WORDS])
