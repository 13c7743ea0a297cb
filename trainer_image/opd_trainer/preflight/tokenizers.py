"""Whether student and teacher number their tokens alike. Ids that are echoed prove nothing; the maps have to be compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd_api.vocabulary import Reason
from opd_trainer.preflight.report import Found, error, warning
from opd_trainer.teachers.facts import config_value, read_json

#: Special tokens that must agree; the padding token never reaches a teacher.
SPECIAL = ("bos_token", "eos_token", "unk_token")
EXAMPLES = 3
SAMPLE = "On-policy distillation: 3 × 7 = 21. Überprüfung, 模型, модель — done.\n\tEnd"


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """All that has to agree."""

    source: str
    vocabulary: dict[str, int]
    special: dict[str, int | None]
    padding: int | None
    end_ids: frozenset[int]
    embedding_rows: int | None
    sample: tuple[int, ...]


def read_tokenizer(folder: Path, *, model: Path | None, trust_remote_code: bool) -> TokenizerFacts:
    """Load a tokenizer; `model` is where the generation config lies. Raises OSError or ValueError."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    settings = read_json(model, "config.json")
    ids = read_json(model, "generation_config.json").get("eos_token_id", config_value(settings, "eos_token_id"))
    end_ids = ids if isinstance(ids, list) else [tokenizer.eos_token_id if ids is None else ids]
    return TokenizerFacts(
        str(folder),
        tokenizer.get_vocab(),
        {name: _id(tokenizer, name) for name in SPECIAL},
        tokenizer.pad_token_id,
        frozenset(value for value in end_ids if value is not None),
        config_value(settings, "vocab_size"),
        tuple(tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]),
    )


def _id(tokenizer: Any, name: str) -> int | None:
    value: int | None = getattr(tokenizer, f"{name}_id", None)
    return value


def compare(student: TokenizerFacts, teacher: TokenizerFacts, name: str, path: str) -> list[Found]:
    """Findings of the comparison: errors where ids mean something else, warnings where only padding differs."""
    found = []
    different = [
        f"{token!r} is {student.vocabulary.get(token)} for the student and {teacher.vocabulary.get(token)} for {name}"
        for token in sorted(student.vocabulary.keys() | teacher.vocabulary.keys())
        if student.vocabulary.get(token) != teacher.vocabulary.get(token)
    ]
    if different:
        examples = "; ".join(different[:EXAMPLES])
        message = f"{len(different)} tokens have other ids: {examples}. Use a teacher of the student's model family"
        found.append(error(Reason.TOKENIZER_MISMATCH, path, message, teacher=name))
    elif student.sample != teacher.sample:
        message = "the same text is cut into other tokens (merges or normalisation differ)"
        found.append(error(Reason.TOKENIZER_MISMATCH, path, message, teacher=name))
    for token in SPECIAL:
        ours, theirs = student.special[token], teacher.special[token]
        if ours != theirs:
            message = f"{token} is {ours} for the student and {theirs} for {name}"
            found.append(error(Reason.TOKENIZER_MISMATCH, path, message, teacher=name))
    if student.end_ids != teacher.end_ids:
        message = (
            f"responses end with {sorted(student.end_ids)} for the student and {sorted(teacher.end_ids)} for {name}:"
            " lengths would explode. Make eos_token_id in generation_config.json agree"
        )
        found.append(error(Reason.TOKENIZER_MISMATCH, path, message, teacher=name))
    if student.padding != teacher.padding:
        message = f"the padding token is {student.padding} for the student and {teacher.padding} for {name}; harmless"
        found.append(warning(Reason.TOKENIZER_MISMATCH, path, message))
    if (
        None not in (student.embedding_rows, teacher.embedding_rows)
        and student.embedding_rows != teacher.embedding_rows
    ):
        message = f"vocabularies are padded to {student.embedding_rows} and {teacher.embedding_rows} rows; harmless"
        found.append(warning(Reason.TOKENIZER_MISMATCH, path, message))
    return found
