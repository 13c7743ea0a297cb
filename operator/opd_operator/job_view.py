"""The OPDJob as the operator reads it: the spec with its findings, and a status that any version may have written. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from opd_api.rules import check_document
from opd_api.v1alpha1 import OPDJobStatus
from opd_operator.model import JobView, Manifest

#: Bound of status.findings.
MAX_FINDINGS = 16


def job_view(raw: Manifest) -> JobView:
    """Parse an OPDJob. A spec that breaks a rule is no exception here but a list of findings."""
    metadata = raw["metadata"]
    job, findings = check_document({key: raw[key] for key in ("apiVersion", "kind", "metadata", "spec") if key in raw})
    raw_status: Manifest = raw.get("status") or {}
    return JobView(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=int(metadata.get("generation", 1)),
        spec=job.spec if job else None,
        status=parse_status(raw_status),
        raw_status=raw_status,
        findings=tuple(finding.to_status() for finding in findings[:MAX_FINDINGS]),
        deleting=bool(metadata.get("deletionTimestamp")),
    )


def parse_status(raw: Manifest) -> OPDJobStatus:
    """The stored status. Fields that this version does not know (a newer operator wrote them) or cannot read are left out:
    everything in the status can be computed again, apart from times and counts, which are plain fields of their own."""
    known: dict[str, Any] = dict(raw)
    while True:
        try:
            return OPDJobStatus.model_validate(known)
        except ValidationError as error:
            for place in {item["loc"][0] for item in error.errors(include_url=False)}:
                known.pop(str(place), None)
