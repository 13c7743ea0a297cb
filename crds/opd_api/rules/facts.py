"""Rules 11, 16, 17 and 21: what follows from files and objects that the spec only names.

Whoever can read them (the input check, `opd run`, the operator for claims) collects the facts and asks here, so that code and
wording are the same everywhere. A side that cannot be read is NotChecked, never a failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opd_api.rules.finding import Finding
from opd_api.v1alpha1 import OPDJobSpec, RoutingMode
from opd_api.vocabulary import Severity


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What decides whether two models number their tokens alike."""

    #: Token -> id, added and special tokens included.
    vocabulary: Mapping[str, int]
    #: Role (bos_token, eos_token, pad_token, …) -> id.
    special_ids: Mapping[str, int | None] = field(default_factory=dict)
    #: Ids that end a response, from the generation configuration.
    eos_ids: frozenset[int] = frozenset()


PADDING = "pad_token"
TOKENIZER_MISMATCH = "TokenizerMismatch"
PADDING_DIFFERS = "PaddingDiffers"
TOKENIZER_NOT_CHECKED = "TokenizerNotChecked"
ENSEMBLE_TOKENIZERS = "EnsembleTokenizers"
RESPONSE_CAP_SHORT = "ResponseCapShort"
CLAIM_ACCESS_MODE = "ClaimAccessMode"
#: (number, code, level, summary) of the rules in this module, for the documentation.
FACT_RULES = (
    (11, TOKENIZER_MISMATCH, "E", "student and teacher have the same token ids, special ids and EOS sets"),
    (11, PADDING_DIFFERS, "W", "only the padding token differs"),
    (11, TOKENIZER_NOT_CHECKED, "NotChecked", "a tokenizer cannot be read where the check runs"),
    (16, ENSEMBLE_TOKENIZERS, "E", "the teachers of an ensemble have one tokenizer"),
    (17, RESPONSE_CAP_SHORT, "W", "responses may be as long as the teacher's usual ones"),
    (21, CLAIM_ACCESS_MODE, "E or W", "the claim can be mounted by every pod"),
)


def tokenizer_findings(
    spec: OPDJobSpec, student: TokenizerFacts | None, teachers: Mapping[str, TokenizerFacts | None]
) -> list[Finding]:
    """Compare the student's tokenizer with each teacher's (by name), and an ensemble's with each other."""
    found: list[Finding] = []
    for index, teacher in enumerate(spec.teachers):
        path = f"spec.teachers[{index}]"
        facts = teachers.get(teacher.name)
        if student is None or facts is None:
            side = "the student's" if student is None else f"{teacher.name}'s"
            hint = " Name its tokenizer (tokenizer: …) to have it compared." if teacher.external else ""
            message = f"{side} tokenizer cannot be read here, so the token ids were not compared.{hint}"
            found.append(Finding(TOKENIZER_NOT_CHECKED, Severity.NOT_CHECKED, path, message))
            continue
        found += _compare(path, f"the student and {teacher.name}", student, facts, TOKENIZER_MISMATCH)
    return found + _ensemble(spec, teachers)


def _ensemble(spec: OPDJobSpec, teachers: Mapping[str, TokenizerFacts | None]) -> list[Finding]:
    if spec.routing.mode is not RoutingMode.ENSEMBLE:
        return []
    known = [(i, t.name, f) for i, t in enumerate(spec.teachers) if (f := teachers.get(t.name)) is not None]
    if not known:
        return []
    _, first, facts = known[0]
    found: list[Finding] = []
    for index, name, other in known[1:]:
        found += _compare(f"spec.teachers[{index}]", f"{first} and {name}", facts, other, ENSEMBLE_TOKENIZERS)
    return [item for item in found if item.severity is Severity.ERROR]


def _compare(path: str, pair: str, left: TokenizerFacts, right: TokenizerFacts, code: str) -> list[Finding]:
    differing = [token for token in left.vocabulary if right.vocabulary.get(token) != left.vocabulary[token]]
    differing += [token for token in right.vocabulary if token not in left.vocabulary]
    if differing:
        examples = ", ".join(repr(token) for token in differing[:3])
        message = (
            f"{pair} number {len(differing)} tokens differently (for example {examples}), so a teacher would score other words "
            "than the student wrote. Use two models of one family."
        )
        return [Finding(code, Severity.ERROR, path, message)]
    roles = sorted({*left.special_ids, *right.special_ids})
    special = [role for role in roles if left.special_ids.get(role) != right.special_ids.get(role)]
    if [role for role in special if role != PADDING]:
        message = f"{pair} have different special tokens: {', '.join(special)}. Use two models of one family and kind."
        return [Finding(code, Severity.ERROR, path, message)]
    if left.eos_ids and right.eos_ids and left.eos_ids != right.eos_ids:
        message = (
            f"{pair} end their responses with different tokens ({sorted(left.eos_ids)} and {sorted(right.eos_ids)}), so the "
            "student would learn never to end. Pair base with base, or instruct with instruct."
        )
        return [Finding(code, Severity.ERROR, path, message)]
    if special:
        message = f"{pair} differ in the padding token only, which is masked everywhere."
        return [Finding(PADDING_DIFFERS, Severity.WARNING, path, message)]
    return []


def response_cap_findings(spec: OPDJobSpec, usual_lengths: Mapping[str, int]) -> list[Finding]:
    """`usual_lengths`: teacher -> tokens of its usual response, where known (generation configuration, reference answers)."""
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
