"""Rules 11, 16, 17 and 21: what follows from files and objects that the spec only names.

Rules 11, 16 and 17 are kept by the input check (opd_trainer.preflight), which reads tokenizers and generation configs; rule 21
by the operator, which reads the claim.
"""

from __future__ import annotations

from collections.abc import Sequence

from opd_api.rules.finding import Finding
from opd_api.v1alpha1 import OPDJobSpec
from opd_api.vocabulary import Reason, Severity

CLAIM_ACCESS_MODE = "ClaimAccessMode"
#: (number, code, level, summary) of the rules about facts, for the documentation.
FACT_RULES = (
    (11, Reason.TOKENIZER_MISMATCH.value, "E", "student and teacher have the same token ids, special ids and EOS sets"),
    (11, Reason.TOKENIZER_MISMATCH.value, "W", "only the padding differs"),
    (11, Reason.TOKENIZER_MISMATCH.value, "NotChecked", "a tokenizer cannot be read where the check runs"),
    (16, Reason.TOKENIZER_MISMATCH.value, "E", "the teachers of an ensemble have one tokenizer: the student's"),
    (17, Reason.RESPONSE_CAP_SHORT.value, "W", "responses may be as long as the teacher's usual ones, where known"),
    (21, CLAIM_ACCESS_MODE, "E or W", "the claim can be mounted by every pod"),
)


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
