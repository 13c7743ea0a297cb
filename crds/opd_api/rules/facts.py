"""Rules 11, 16, 17 and 21: what follows from files and objects that the spec only names.

Tokenizers are compared by the input check (opd_trainer.preflight), which reads them. The functions here are for whoever has
read a claim or a generation configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opd_api.rules.finding import Finding
from opd_api.v1alpha1 import OPDJobSpec
from opd_api.vocabulary import Reason, Severity

RESPONSE_CAP_SHORT = "ResponseCapShort"
CLAIM_ACCESS_MODE = "ClaimAccessMode"
#: (number, code, level, summary) of the rules about facts, for the documentation.
FACT_RULES = (
    (11, Reason.TOKENIZER_MISMATCH.value, "E", "student and teacher have the same token ids, special ids and EOS sets"),
    (11, Reason.TOKENIZER_MISMATCH.value, "W", "only the padding differs"),
    (11, Reason.TOKENIZER_MISMATCH.value, "NotChecked", "a tokenizer cannot be read where the check runs"),
    (16, Reason.TOKENIZER_MISMATCH.value, "E", "the teachers of an ensemble have one tokenizer: the student's"),
    (17, RESPONSE_CAP_SHORT, "W", "responses may be as long as the teacher's usual ones, where known"),
    (21, CLAIM_ACCESS_MODE, "E or W", "the claim can be mounted by every pod"),
)


def response_cap_findings(spec: OPDJobSpec, usual_lengths: Mapping[str, int]) -> list[Finding]:
    """`usual_lengths`: teacher -> tokens of its usual response, where known (max_new_tokens of its generation configuration)."""
    cap = spec.rollout.max_response_tokens
    return [
        Finding(
            RESPONSE_CAP_SHORT,
            Severity.WARNING,
            "spec.rollout.maxResponseTokens",
            f"{cap} tokens are fewer than the {usual_lengths[teacher.name]} that {teacher.name} usually writes, so the student "
            f"mostly learns beginnings. Write maxResponseTokens: {usual_lengths[teacher.name]}.",
        )
        for teacher in spec.teachers
        if usual_lengths.get(teacher.name, 0) > cap
    ]


def claim_findings(spec: OPDJobSpec, access_modes: Sequence[str]) -> list[Finding]:
    """`access_modes` of the PersistentVolumeClaim: every role mounts it, on several nodes."""
    path = "spec.storage.claimName"
    if "ReadWriteMany" in access_modes or not access_modes:
        return []
    if "ReadWriteOnce" in access_modes:
        message = (
            f"claim {spec.storage.claim_name} is ReadWriteOnce, so all pods of the job must run on one node. Use a "
            "ReadWriteMany claim, or keep the pods together with nodeSelector."
        )
        return [Finding(CLAIM_ACCESS_MODE, Severity.WARNING, path, message)]
    modes = ", ".join(access_modes)
    message = (
        f"claim {spec.storage.claim_name} is {modes}; several pods write to it at once. Use a ReadWriteMany claim."
    )
    return [Finding(CLAIM_ACCESS_MODE, Severity.ERROR, path, message)]
