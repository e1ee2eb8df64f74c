"""Arrow columns as the Python values and Rows that Spark's row API shows.

What a processor is given looks as in Spark, where it is pyarrow's ``as_py()``: a struct is a dict,
a map a list of pairs, a timestamp an aware datetime in the session's time zone.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Sequence
from datetime import datetime
from inspect import signature
from itertools import repeat
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from pyspark.sql.conversion import ArrowTableToRowsConversion
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    Row,
    ShortType,
    StructField,
    StructType,
    TimestampType,
)

from statebackend.schema.keys.key_codec import KeyCodec

__all__ = [
    "arrow_schema",
    "collected_rows",
    "columns_to_python",
    "make_rows",
    "row_type",
    "shown_keys",
    "struct_type",
]

_NUMPY_TYPES: Final = (ByteType, ShortType, IntegerType, LongType, FloatType, DoubleType)

# PySpark 4.1 has no such argument: it is UTC there by default.
_IN_UTC: Final[dict[str, Any]] = (
    {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
)


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema that ``mapInArrow`` must return for ``schema``, to the letter."""
    return to_arrow_schema(schema, **_IN_UTC)


def struct_type(schema: pa.Schema) -> StructType:
    """Spark's schema of Arrow columns; a timestamp without a zone is ``timestamp_ntz``.

    Raises:
        PySparkException: Spark has no such type.
    """
    # PySpark 4.1 does so when it is told to only.
    found: StructType = from_arrow_schema(schema, prefer_timestamp_ntz=True)
    return found


def columns_to_python(
    table: pa.Table, schema: StructType, *, timezone: str = "UTC"
) -> list[list[Any]]:
    """One list of Python values per field of ``schema``; ``table`` has these columns in order.

    Args:
        timezone: in which timestamps are shown: the session's.
    """
    return [
        _column_to_python(column, field, timezone)
        for column, field in zip(table.columns, schema.fields, strict=True)
    ]


def _column_to_python(column: pa.ChunkedArray, field: StructField, timezone: str) -> list[Any]:
    if isinstance(field.dataType, _NUMPY_TYPES) and column.null_count == 0:
        values: list[Any] = column.to_numpy().tolist()
        return values
    if isinstance(field.dataType, TimestampType):
        return _moments(column, timezone)
    zoned = _in_zone(column.type, timezone)
    values = (column if zoned == column.type else column.cast(zoned)).to_pylist()
    return values


def _in_zone(kind: pa.DataType, timezone: str) -> pa.DataType:
    """The type with its instants shown in a zone, however deep they are."""
    if pt.is_timestamp(kind):
        return kind if kind.tz is None else pa.timestamp(kind.unit, timezone)
    if pt.is_struct(kind):
        return pa.struct([one.with_type(_in_zone(one.type, timezone)) for one in kind])
    if pt.is_map(kind):
        return pa.map_(
            kind.key_field.with_type(_in_zone(kind.key_type, timezone)),
            kind.item_field.with_type(_in_zone(kind.item_type, timezone)),
        )
    if pt.is_list(kind):
        inner = kind.value_field
        return pa.list_(inner.with_type(_in_zone(inner.type, timezone)))
    return kind


def _moments(column: pa.ChunkedArray, timezone: str) -> list[Any]:
    """Instants as ``as_py()`` shows them, at a third of its cost."""
    zone = pa.lib.string_to_tzinfo(timezone)
    there = column.drop_null()
    micros = there.cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_numpy()
    convert = zone.fromutc
    try:
        shown = [convert(at.replace(tzinfo=zone)) for at in micros.view("M8[us]").tolist()]
    except (AttributeError, OverflowError):  # no year between 1 and 9999: it says so
        return column.cast(pa.timestamp("us", timezone)).to_pylist()  # type: ignore[no-any-return]
    if len(there) == len(column):
        return shown
    following = iter(shown)
    return [next(following) if valid else None for valid in pc.is_valid(column).to_pylist()]


def collected_rows(table: pa.Table, schema: StructType) -> list[Row]:
    """Rows as ``DataFrame.collect()`` shows them."""
    return ArrowTableToRowsConversion.convert(table, schema)


def row_type(names: Sequence[str]) -> type[Row]:
    """A pyspark Row with these fields, which its class knows: no dictionary per row.

    What pyspark's `__getattr__` and `__getitem__` do in Python, 0.6 and 0.2 us an access, gives the
    same here in a tenth and a third of that.
    """
    members: dict[str, Any] = {
        # As in Spark, what every Row has (`count`) comes before a field of that name, and of
        # fields of one name the first one wins.
        name: getter
        for name, getter in zip(reversed(names), reversed(_getters(len(names))), strict=True)
        if not name.startswith("__") and not hasattr(Row, name)
    }
    members.update(__slots__=(), __fields__=list(names), __getitem__=_item)
    return type("Row", (Row,), members)


@functools.cache
def _getters(count: int) -> list[Any]:
    """Descriptors for the places of a tuple; a named tuple's are written in C."""
    names = [f"at_{place}" for place in range(count)]
    fields = namedtuple("fields", names)  # type: ignore[misc]
    return [getattr(fields, name) for name in names]  # the class is held until all are taken


_tuple_item: Final = tuple.__getitem__
_row_item: Final = Row.__getitem__


def _item(row: Row, item: Any) -> Any:
    return _tuple_item(row, item) if type(item) is int else _row_item(row, item)


def make_rows(columns: Sequence[Sequence[Any]], row: type[Row]) -> list[Row]:
    """A Row per row of ``columns``; no Python call per row."""
    return list(map(tuple.__new__, repeat(row), zip(*columns, strict=True)))


def shown_keys(
    encoded: Sequence[bytes], codec: KeyCodec, schema: StructType, timezone: str
) -> list[Row]:
    """Encoded keys as Spark shows a timer's key: Rows, their values as :func:`columns_to_python`.

    Raises:
        CorruptionError: bytes that are no key of this schema.
    """
    decode, row = codec.decode, row_type(schema.names)
    keys: Any = [decode(key)[0] for key in encoded]
    zone = pa.lib.string_to_tzinfo(timezone)
    steps = [_shown(field.dataType, zone) for field in schema]
    if any(step is not None for step in steps) and keys:
        columns = [
            column if step is None else [None if v is None else step(v) for v in column]
            for step, column in zip(steps, zip(*keys, strict=True), strict=True)
        ]
        keys = zip(*columns, strict=True)
    return list(map(tuple.__new__, repeat(row), keys))


def _shown(dtype: DataType, zone: Any) -> Callable[[Any], Any] | None:
    """From a value as a key codec gives it to the one that is shown; None: as it is."""
    if isinstance(dtype, TimestampType):
        return lambda at: datetime.astimezone(at, zone)  # it is naive, in the process's zone
    if isinstance(dtype, ArrayType):
        step = _shown(dtype.elementType, zone)
        if step is None:
            return None
        return lambda items: [None if v is None else step(v) for v in items]
    if isinstance(dtype, StructType):
        names = dtype.names
        steps = [_shown(field.dataType, zone) for field in dtype]
        return lambda struct: {
            name: v if step is None or v is None else step(v)
            for name, step, v in zip(names, steps, struct, strict=True)
        }
    return None
