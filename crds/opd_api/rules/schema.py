"""Errors of the models as findings: what is wrong, where it stands in the YAML, and what was probably meant."""

from __future__ import annotations

import difflib
import functools
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from opd_api.rules.finding import Finding
from opd_api.v1alpha1 import OPDJob
from opd_api.vocabulary import Severity

UNKNOWN_FIELD = "UnknownField"
MISSING_FIELD = "MissingField"
UNKNOWN_VALUE = "UnknownValue"
WRONG_TYPE = "WrongType"
OUT_OF_RANGE = "OutOfRange"
BAD_TEXT = "BadText"
#: (code, summary) for the documentation.
SCHEMA_CODES = (
    (UNKNOWN_FIELD, "no field has this name here"),
    (MISSING_FIELD, "a required field is not there"),
    (UNKNOWN_VALUE, "the value is not one of those allowed"),
    (WRONG_TYPE, "the value is of another type"),
    (OUT_OF_RANGE, "a number, list or text is outside its bounds"),
    (BAD_TEXT, "a text does not have the required form"),
)
#: What other programs call a value of ours; far in letters, near in meaning. Offered only where our word is a choice.
SYNONYMS = {
    "float32": "fp32",
    "float": "fp32",
    "single": "fp32",
    "bfloat16": "bf16",
    "bfloat": "bf16",
    "float16": "fp16",
    "half": "fp16",
}
LARGEST_INTEGER = 2**63 - 1
MOST_LARGE = 8
_RANGE = ("greater_than", "less_than", "too_long", "too_short", "string_too", "finite_number")


def parse(document: Any) -> tuple[OPDJob | None, list[Finding]]:
    """The job, or findings in its place. JSON types as strict as the API server's: "200" is no number."""
    if not isinstance(document, dict):
        return None, [
            Finding(
                WRONG_TYPE, Severity.ERROR, "", "the document is no mapping. Write apiVersion, kind, metadata, spec."
            )
        ]
    try:
        document = _as_stored(document, _model_shape(OPDJob))
        if large := _large_integers(document):
            return None, large
        text = json.dumps(document, default=str)
        return OPDJob.model_validate_json(text, strict=True, by_alias=True, by_name=False), []
    except ValidationError as error:
        return None, _findings(error, document)
    except ValueError:  # json: circular reference
        return None, [
            Finding(WRONG_TYPE, Severity.ERROR, "", "an object contains itself. Remove the YAML alias in it.")
        ]


def _large_integers(document: dict[str, Any]) -> list[Finding]:
    """Integers that the API server does not keep as such; in a template it would hand them on as another number."""
    found: list[Finding] = []
    left: list[tuple[tuple[str | int, ...], Any]] = [((), document)]
    seen: set[int] = set()
    while left and len(found) < MOST_LARGE:
        place, value = left.pop()
        if id(value) in seen:  # a YAML alias, perhaps of what it stands in
            continue
        if isinstance(value, dict | list):
            seen.add(id(value))
        if isinstance(value, dict):
            left += [((*place, str(key)), item) for key, item in value.items()]
        elif isinstance(value, list):
            left += [((*place, index), item) for index, item in enumerate(value)]
        elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            message = (
                f"{_short_integer(value)} is more than an integer of Kubernetes holds. Write at most {LARGEST_INTEGER}."
            )
            found.append(Finding(OUT_OF_RANGE, Severity.ERROR, dotted(place), message))
    return found


def _short_integer(value: int) -> str:
    """Python refuses to print thousands of digits."""
    return str(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"


@dataclass(frozen=True)
class _Shape:
    """What of an annotation decides how a value is stored. Every pass of the operator reads a document, and looking through
    annotations for it took a quarter of a pass."""

    fields: Mapping[str, _Shape] | None = None
    items: _Shape | None = None
    integer: bool = False


_ANYTHING = _Shape()


def _shape(annotation: Any) -> _Shape:
    model, items = model_of(annotation), item_of(annotation)
    if model is not None:
        return _model_shape(model)
    return _Shape(items=_shape(items) if items is not None else None, integer=strip_optional(annotation) is int)


@functools.cache
def _model_shape(model: type[BaseModel]) -> _Shape:
    known = model.model_fields.items()
    return _Shape(fields={field.alias or name: _shape(field_annotation(field)) for name, field in known})


def _as_stored(value: Any, shape: _Shape) -> Any:
    """What the API server keeps of a document: a field of ours that is null is not there (`rollout:` with every line below it
    commented out), and 4.0 is the integer 4."""
    fields, items = shape.fields, shape.items
    if isinstance(value, dict):
        if fields is not None:
            kept = {key: item for key, item in value.items() if item is not None or key not in fields}
            return {key: _as_stored(item, fields.get(key, _ANYTHING)) for key, item in kept.items()}
        if items is not None:
            return {key: _as_stored(item, items) for key, item in value.items()}
    elif isinstance(value, list):
        if items is not None:
            return [_as_stored(item, items) for item in value]
    elif shape.integer and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _findings(error: ValidationError, document: dict[str, Any]) -> list[Finding]:
    found: dict[str, Finding] = {}
    for item in error.errors(include_url=False, include_context=True):
        location, annotation = _resolve(item["loc"], document)
        finding = _finding(str(item["type"]), dotted(location), location, annotation, item)
        # A union reports one error for each of its members: one field, one finding.
        found.setdefault(finding.path, finding)
    return list(found.values())


def _finding(kind: str, path: str, location: tuple[str | int, ...], annotation: Any, item: Any) -> Finding:
    def error(code: str, message: str) -> Finding:
        return Finding(code, Severity.ERROR, path, message)

    value = item.get("input")
    choices = choices_of(annotation)
    if kind == "extra_forbidden":
        return error(UNKNOWN_FIELD, _unknown_field(location))
    if kind == "missing":
        return error(MISSING_FIELD, f"{location[-1]} is required. {_description(location)}".strip())
    if choices and (isinstance(value, str) or kind in ("enum", "literal_error")):
        return error(UNKNOWN_VALUE, _unknown_value(value, choices, free_text(annotation)))
    if kind.startswith(_RANGE):
        return error(OUT_OF_RANGE, f"{_short(value)}: {_sentence(item['msg'])} {_description(location)}".strip())
    if kind == "string_pattern_mismatch":
        return error(
            BAD_TEXT, f"{_short(value)} does not have the form {item['ctx']['pattern']}. {_description(location)}"
        )
    return error(WRONG_TYPE, f"{_short(value)}: {_sentence(item['msg'])} {_description(location)}".strip())


def _unknown_field(location: tuple[str | int, ...]) -> str:
    parent = _model_at(location[:-1])
    names = [field.alias or name for name, field in parent.model_fields.items()] if parent else []
    written = str(location[-1])
    guess = closest(written, names)
    if guess is not None:
        return f"there is no field {written!r}. Did you mean {guess!r}?"
    elsewhere = _elsewhere(written)
    if elsewhere:
        return f"there is no field {written!r} here. Did you mean {' or '.join(elsewhere[:3])}?"
    return f"there is no field {written!r}. The fields here are {', '.join(sorted(names))}."


def _unknown_value(value: Any, choices: list[str], also_function: bool) -> str:
    synonym = SYNONYMS.get(_plain(str(value)).removeprefix("torch"))
    guess = synonym if synonym in choices else closest(str(value), choices)
    listed = ", ".join(choices) + (", or module:function" if also_function else "")
    return f"{_short(value)} is not one of {listed}." + (f" Did you mean {guess!r}?" if guess else "")


def closest(written: str, names: list[str]) -> str | None:
    """The name that was probably meant: without case and separators first, then by similarity."""
    plain = {_plain(name): name for name in names}
    if _plain(written) in plain:
        return plain[_plain(written)]
    close = difflib.get_close_matches(_plain(written), list(plain), n=1, cutoff=0.6)
    return plain[close[0]] if close else None


def dotted(location: tuple[str | int, ...]) -> str:
    """("spec", "teachers", 0, "model") -> spec.teachers[0].model."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _resolve(loc: tuple[str | int, ...], document: Any) -> tuple[tuple[str | int, ...], Any]:
    """The part of pydantic's location that exists in the document, without names of union members; and the annotation there."""
    location: tuple[str | int, ...] = ()
    annotation: Any = OPDJob
    for part in loc:
        model, items = model_of(annotation), item_of(annotation)
        if model is not None:
            field = next((f for n, f in model.model_fields.items() if (f.alias or n) == part), None)
            location += (part,)
            if field is None:
                return location, None
            annotation = field_annotation(field)
        elif items is not None and part != "[key]":
            location += (part,)
            annotation = items
        else:
            break
    return location, annotation


def field_annotation(field: Any) -> Any:
    """A field's annotation without `| None`."""
    return strip_optional(field.annotation)


def strip_optional(annotation: Any) -> Any:
    """`X | None` -> X; Annotated[X, …] -> X."""
    if get_origin(annotation) is typing.Annotated:
        return strip_optional(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        members = [item for item in get_args(annotation) if item is not type(None)]
        if len(members) == 1:
            return strip_optional(members[0])
    return annotation


def model_of(annotation: Any) -> type[BaseModel] | None:
    """The model class that an annotation stands for, if it is one."""
    plain = strip_optional(annotation)
    return plain if isinstance(plain, type) and issubclass(plain, BaseModel) else None


def item_of(annotation: Any) -> Any:
    """Annotation of the items of a list or the values of a mapping; None for anything else."""
    plain = strip_optional(annotation)
    if get_origin(plain) is list:
        return strip_optional(get_args(plain)[0])
    if get_origin(plain) is dict:
        return strip_optional(get_args(plain)[1])
    return None


def choices_of(annotation: Any) -> list[str]:
    """Values of an enumeration or of literals; empty for anything else."""
    plain = strip_optional(annotation)
    if isinstance(plain, type) and issubclass(plain, Enum):
        return [str(member.value) for member in plain]
    if get_origin(plain) is typing.Literal:
        return [str(value) for value in get_args(plain)]
    if get_origin(plain) in (Union, types.UnionType):
        return [value for member in get_args(plain) for value in choices_of(member)]
    return []


def free_text(annotation: Any) -> bool:
    """Whether a field with choices also takes text of a certain form."""
    members = get_args(strip_optional(annotation))
    return any(isinstance(member, type) and issubclass(member, str) for member in map(strip_optional, members))


def _model_at(location: tuple[str | int, ...]) -> type[BaseModel] | None:
    annotation: Any = OPDJob
    for part in location:
        model = model_of(annotation)
        if model is None:
            annotation = item_of(annotation)
            continue
        field = next((f for n, f in model.model_fields.items() if (f.alias or n) == part), None)
        if field is None:
            return None
        annotation = field_annotation(field)
    return model_of(annotation)


def _description(location: tuple[str | int, ...]) -> str:
    if not location:  # no field is wrong but the document: nested too deep, or text that is no Unicode
        return ""
    parent = _model_at(location[:-1])
    if parent is None:
        return ""
    field = next((f for n, f in parent.model_fields.items() if (f.alias or n) == location[-1]), None)
    return (field.description or "") if field is not None else ""


def _elsewhere(written: str) -> list[str]:
    """Paths of fields with this name in other places."""
    return [path for path in field_paths(OPDJob, "") if _plain(path.rpartition(".")[2]) == _plain(written)]


def field_paths(model: type[BaseModel], prefix: str) -> list[str]:
    """All field paths of a model, `[]` for list items, status left out."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        path = f"{prefix}.{field.alias or name}".lstrip(".")
        if path in ("status", "metadata"):
            continue
        found.append(path)
        annotation = field_annotation(field)
        inner = model_of(annotation) or model_of(item_of(annotation))
        if inner is not None:
            found += field_paths(inner, path + ("[]" if get_origin(strip_optional(annotation)) is list else ""))
    return found


def _plain(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter.isalnum())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _sentence(text: str) -> str:
    return text[:1].lower() + text[1:].rstrip(".") + "."
