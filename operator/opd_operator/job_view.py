"""The OPDJob as the operator reads it: the spec with its findings, and a status that any version may have written. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from opd_api.rules import check_document
from opd_api.rules.facts import CLAIM_ACCESS_MODE, claim_findings
from opd_api.v1alpha1 import FindingStatus, OPDJob, OPDJobStatus
from opd_operator.model import JobView, Manifest, Unwritten

#: Bound of status.findings.
MAX_FINDINGS = 16


def job_view(raw: Manifest, claim_modes: tuple[str, ...] = (), unwritten: Unwritten | None = None) -> JobView:
    """Parse an OPDJob. A spec that breaks a rule is no exception here but a list of findings. `claim_modes`: access modes of
    its claim, known before it starts. `unwritten`: its status in place of the stored one, which the API server cut short."""
    metadata = raw["metadata"]
    job, findings = check_document({key: raw[key] for key in ("apiVersion", "kind", "metadata", "spec") if key in raw})
    raw_status: Manifest = raw.get("status") or {}
    kept = unwritten is not None and unwritten.stored == raw_status
    status = parse_status(unwritten.wanted if unwritten is not None and kept else raw_status)
    found = [*(finding.to_status() for finding in findings), *_about_claim(job, status, claim_modes)]
    return JobView(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=int(metadata.get("generation", 1)),
        spec=job.spec if job else None,
        status=status,
        raw_status=raw_status,
        findings=tuple(found[:MAX_FINDINGS]),
        deleting=bool(metadata.get("deletionTimestamp")),
    )


def _about_claim(job: OPDJob | None, status: OPDJobStatus, modes: tuple[str, ...]) -> list[FindingStatus]:
    """What rule 21 says of the claim: before the start from its access modes, afterwards as it was said then."""
    if status.start_time is not None:
        return [finding for finding in status.findings if finding.code == CLAIM_ACCESS_MODE]
    return [finding.to_status() for finding in claim_findings(job.spec, modes)] if job is not None else []


def parse_status(raw: Manifest) -> OPDJobStatus:
    """The stored status. What this version does not know (a newer operator wrote it) or cannot read is left out, of a list one
    element: everything in the status can be computed again, apart from times and counts, which are plain fields of their own."""
    known: dict[str, Any] = dict(raw)
    while True:
        try:
            return OPDJobStatus.model_validate(known)
        except ValidationError as error:
            places = {item["loc"][:2] for item in error.errors(include_url=False)}
            known = {key: kept for key, value in known.items() if (kept := _readable(key, value, places)) is not None}


def _readable(key: str, value: Any, places: set[tuple[int | str, ...]]) -> Any:
    """A field without what stands at the places; None when nothing can be kept."""
    own = [place for place in places if place[0] == key]
    elements = {place[1] for place in own if len(place) == 2 and isinstance(value, list)}
    if not own:
        return value
    return [item for index, item in enumerate(value) if index not in elements] if elements else None
