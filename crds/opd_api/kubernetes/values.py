"""Names, labels, annotations and quantities, as k8s.io/apimachinery validates them. Values may be of any type."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

#: (path, what is wrong and what to write).
Problems = Iterator[tuple[str, str]]

_NAME = re.compile(r"(?:[A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_SUBDOMAIN = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,3})?")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = "KMGTPE"
_LABEL_LIMIT, _SUBDOMAIN_LIMIT = 63, 253
ANNOTATIONS_LIMIT = 256 * 1024


def short(value: Any) -> str:
    """A value for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def subdomain_problem(value: Any) -> str | None:
    """What is wrong with the name of an object."""
    if isinstance(value, str) and len(value) <= _SUBDOMAIN_LIMIT and _SUBDOMAIN.fullmatch(value):
        return None
    return f"{short(value)} is no name of an object. Write lower-case letters, digits, '-' and '.', such as my-claim."


def key_problem(value: Any) -> str | None:
    """What is wrong with the key of a label, an annotation or a taint, or the name of a resource."""
    prefix, slash, name = value.rpartition("/") if isinstance(value, str) else ("", "", "")
    whole = len(name) <= _LABEL_LIMIT and _NAME.fullmatch(name) is not None
    if whole and (not slash or subdomain_problem(prefix) is None):
        return None
    return (
        f"{short(value)} is no key. Write at most {_LABEL_LIMIT} letters, digits, '-', '_' and '.', beginning and ending with a "
        "letter or digit, perhaps after a domain and '/': example.com/pool."
    )


def value_problem(value: Any) -> str | None:
    """What is wrong with the value of a label."""
    if isinstance(value, str) and len(value) <= _LABEL_LIMIT and (not value or _NAME.fullmatch(value)):
        return None
    hint = f' In quotes it is text: "{value}".' if isinstance(value, int | float) else ""
    return (
        f"{short(value)} is no value of a label. Write text of at most {_LABEL_LIMIT} letters, digits, '-', '_' and '.', beginning "
        f"and ending with a letter or digit.{hint}"
    )


def mapping(path: str, value: Any, found: Problems) -> Problems:
    """The problems of a mapping, or that it is none; nothing for what is absent."""
    if isinstance(value, dict):
        yield from found
    elif value is not None:
        yield path, f"{short(value)} is no mapping. Write {{key: value}}."


def entries(path: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, element) of a list's elements that are mappings; `list_problems` tells of the others."""
    for index, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, dict):
            yield f"{path}[{index}]", item


def list_problems(path: str, value: Any) -> Problems:
    """That a list of mappings is none."""
    if value is not None and not isinstance(value, list):
        yield path, f"{short(value)} is no list. Write one element a line, each after '- '."
    for index, item in enumerate(value if isinstance(value, list) else ()):
        if not isinstance(item, dict):
            yield f"{path}[{index}]", f"{short(item)} is no mapping. Write {{key: value}}."


def label_problems(path: str, labels: Any) -> Problems:
    """Keys and values of labels, or of a selector."""

    def found() -> Problems:
        for key, value in labels.items():
            for problem in (key_problem(key), value_problem(value)):
                if problem is not None:
                    yield f"{path}.{key}", problem

    yield from mapping(path, labels, found())


def annotation_problems(path: str, annotations: Any) -> Problems:
    """Keys and sizes of annotations."""

    def found() -> Problems:
        size = 0
        for key, value in annotations.items():
            problem = key_problem(str(key).lower())
            if problem is not None:
                yield f"{path}.{key}", problem
            if not isinstance(value, str):
                yield f"{path}.{key}", f'{short(value)} is no text. Write it in quotes: "{value}".'
            size += len(str(key)) + len(str(value))
        if size > ANNOTATIONS_LIMIT:
            yield path, f"annotations hold {size} characters. Write at most {ANNOTATIONS_LIMIT}."

    yield from mapping(path, annotations, found())


def quantity(value: Any) -> Decimal | None:
    """The number that a quantity stands for; None when it is none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        return None
    number, suffix = Decimal(match[1]), match[2] or ""
    if suffix in _DECIMAL:
        return number.scaleb(_DECIMAL[suffix])
    if suffix.endswith("i"):
        return number * Decimal(1024) ** (_BINARY.index(suffix[0]) + 1)
    return number.scaleb(int(suffix[1:]))


def resource_name_problem(name: Any) -> str | None:
    """What is wrong with the name of a resource that a container asks for."""
    if name in ("cpu", "memory", "ephemeral-storage") or (isinstance(name, str) and name.startswith("hugepages-")):
        return None
    problem = key_problem(name)
    if problem is None and "/" not in name:
        return f"{short(name)} is no resource of a container. Write cpu, memory, ephemeral-storage or a name with its domain: nvidia.com/gpu."
    return problem
