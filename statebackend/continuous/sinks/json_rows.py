"""Rows as JSON texts, in columns as far as Arrow can."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

__all__ = ["json_column", "json_lines", "json_texts"]

_ESCAPED: Final = r'["\\\x00-\x1f]'
# Decimals as numbers would be read as floating point by many.
_JSON: Final = msgspec.json.Encoder(decimal_format="string")


def json_texts(batch: pa.RecordBatch, end: str = "") -> pa.Array:
    """Each row as a JSON object; as `msgspec` writes it, and without one Python object a row.

    Timestamps are texts in ISO 8601, decimals texts, NaN and infinities null.

    Args:
        end: follows each object.
    """
    parts: list[Any] = []
    for number, (name, column) in enumerate(zip(batch.schema.names, batch.columns, strict=True)):
        opening = "," if number else "{"
        parts += [f"{opening}{_JSON.encode(name).decode()}:", json_column(column)]
    if not parts:
        return pa.array([f"{{}}{end}"] * batch.num_rows, pa.string())
    return pc.binary_join_element_wise(*parts, f"}}{end}", "")


def json_column(column: pa.Array) -> pa.Array:
    """Each value as a JSON text."""
    kind = column.type
    if pt.is_integer(kind) or pt.is_boolean(kind):
        texts = column.cast(pa.string())
    elif pt.is_string(kind) and not pc.any(pc.match_substring_regex(column, _ESCAPED)).as_py():
        texts = pc.binary_join_element_wise('"', column, '"', "")
    elif pt.is_floating(kind) and len(column):
        # No comma is in a number; Arrow would write them otherwise.
        return pa.array(_JSON.encode(column.to_pylist())[1:-1].decode().split(","), pa.string())
    else:
        return pa.array([_JSON.encode(value).decode() for value in column.to_pylist()], pa.string())
    return texts.fill_null("null") if texts.null_count else texts


def json_lines(batch: pa.RecordBatch) -> memoryview:
    """Each row as a JSON object on a line of its own, in UTF-8."""
    texts = json_texts(batch, "\n")
    # The texts lie one behind the other: Arrow's buffer is the file, and no Python text is made.
    starts = pa.Array.from_buffers(
        pa.int32(), len(texts) + 1, [None, texts.buffers()[1]], offset=texts.offset
    )
    return memoryview(texts.buffers()[2])[starts[0].as_py() : starts[-1].as_py()]
