"""All rows of a data set at once: what single fields hold, read column by column from Arrow's memory map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True, slots=True)
class Gaps:
    """Rows that lack something."""

    count: int
    #: The first of them, from 0.
    first: int


def column(records: Sequence[dict[str, Any]], name: str) -> pa.ChunkedArray | None:
    """Values of a field in every row; `a.b` also means field b of the object in field a. None where there is no such column,
    or where the rows are no Arrow table."""
    table = getattr(records, "data", None)
    if table is None or getattr(records, "_indices", None) is not None:
        return None
    names = table.column_names
    if name in names:
        return table.column(name)
    first, *rest = name.split(".")
    if first not in names:
        return None
    values = table.column(first)
    for part in rest:
        if not pa.types.is_struct(values.type) or values.type.get_field_index(part) < 0:
            return None
        values = pc.struct_field(values, part)
    return values


def empty(values: pa.ChunkedArray) -> Gaps | None:
    """Rows without a value: null, a text of no letters, a list of nothing."""
    gaps = pc.is_null(values)
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        gaps = pc.or_(gaps, pc.fill_null(pc.equal(pc.binary_length(values), 0), False))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        gaps = pc.or_(gaps, pc.fill_null(pc.equal(pc.list_value_length(values), 0), False))
    count = int(pc.sum(gaps).as_py() or 0)
    return Gaps(count, int(pc.index(gaps, True).as_py())) if count else None


def garbled(values: pa.ChunkedArray) -> int | None:
    """The first row whose text is no UTF-8; Arrow's JSON reader does not look."""
    start = 0
    for chunk in values.chunks:
        if not _is_valid(chunk):
            low, high = 0, len(chunk)
            while high - low > 1:  # the first half that is wrong
                middle = (low + high) // 2
                low, high = (low, middle) if not _is_valid(chunk.slice(low, middle - low)) else (middle, high)
            return start + low
        start += len(chunk)
    return None


def _is_valid(chunk: pa.Array) -> bool:
    try:
        chunk.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def odd_messages(values: pa.ChunkedArray, most: int) -> list[int]:
    """The first rows of chat messages in which one has no role or no content: what a template may refuse."""
    kind = values.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return []
    found: list[int] = []
    start = 0
    for chunk in values.chunks:
        messages, parents = pc.list_flatten(chunk), pc.list_parent_indices(chunk)
        for field in ("role", "content"):
            if kind.value_type.get_field_index(field) >= 0:
                rows = pc.unique(pc.filter(parents, pc.is_null(pc.struct_field(messages, field))))
                found += [start + row for row in rows.slice(0, most).to_pylist()]
        start += len(chunk)
    return sorted(set(found))[:most]


def longest(values: pa.ChunkedArray, count: int) -> list[int]:
    """The rows with the longest texts, or none where the values are no texts."""
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        return []
    lengths = pa.table({"length": pc.fill_null(pc.binary_length(values), 0)})
    found: list[int] = pc.select_k_unstable(lengths, count, sort_keys=[("length", "descending")]).to_pylist()
    return found


def distinct(values: pa.ChunkedArray) -> list[Any]:
    """Values that occur, in no order. Of objects and lists one: no key of a map is equal to any."""
    nested = pa.types.is_nested(values.type)
    found: list[Any] = (values.slice(0, 1) if nested else pc.unique(values)).to_pylist()
    return found
