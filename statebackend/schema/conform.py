"""Brings Arrow columns that users give into exactly the types of a schema, or says why not."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.types as pt
from pyspark.sql import types as T

from statebackend.errors import ValueMismatchError
from statebackend.schema.types import arrow_type

__all__ = ["conform", "conform_all"]


def conform_all(
    columns: Sequence[pa.Array | pa.ChunkedArray], schema: T.StructType
) -> list[pa.Array]:
    """`conform` for each column of a schema.

    Raises:
        ValueMismatchError: a wrong number of columns, uneven lengths, or as `conform`.
    """
    if len(columns) != len(schema.fields):
        raise ValueMismatchError(
            f"{len(columns)} columns were given for the {len(schema.fields)} fields "
            f"({', '.join(schema.names)}).",
            todo="Pass one column for each field, in the schema's order.",
        )
    arrays = [conform(column, field) for column, field in zip(columns, schema, strict=True)]
    if len({len(array) for array in arrays}) > 1:
        raise ValueMismatchError(
            f"Columns have different lengths: {', '.join(str(len(array)) for array in arrays)}.",
            todo="Pass columns of one record batch.",
        )
    return arrays


def conform(column: pa.Array | pa.ChunkedArray, field: T.StructField) -> pa.Array:
    """A column in exactly the Arrow type of its field.

    Other layouts of one type (large, view, dictionary, another time unit or zone), widening
    numbers and all-null columns are taken; nothing else is cast, and nothing is ever rounded.

    Raises:
        ValueMismatchError: another type, a value that does not fit, or a null in a field that is
            not nullable.
    """
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    wanted = arrow_type(field.dataType, field.name)
    if array.type != wanted:
        try:
            if not _fits(array.type, wanted):
                raise pa.ArrowInvalid("the types differ")
            if pt.is_dictionary(array.type):
                array = array.dictionary_decode()
            array = array.cast(wanted)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ValueMismatchError(
                f"Field {field.name!r} is {field.dataType.simpleString()}, its column is "
                f"{column.type}: {error}.",
                todo=f"Cast the column to {wanted} first.",
            ) from error
    if array.null_count and not field.nullable:
        raise ValueMismatchError(
            f"Field {field.name!r} ({field.dataType.simpleString()}) is not nullable, "
            f"but its column has {array.null_count} nulls.",
            todo="Filter the nulls out, or declare the field nullable.",
        )
    return array


def _fits(have: pa.DataType, want: pa.DataType) -> bool:
    """Whether a safe cast from `have` to `want` changes the form only, not the meaning."""
    if have == want or pt.is_null(have):
        return True
    if pt.is_dictionary(have):
        return _fits(have.value_type, want)
    if pt.is_struct(want):
        return (
            pt.is_struct(have)
            and [f.name for f in have] == [f.name for f in want]
            and all(_fits(a.type, b.type) for a, b in zip(have, want, strict=True))
        )
    if pt.is_map(want):
        return (
            pt.is_map(have)
            and _fits(have.key_type, want.key_type)
            and _fits(have.item_type, want.item_type)
        )
    if pt.is_list(want):
        lists = (pt.is_list, pt.is_large_list, pt.is_fixed_size_list, pt.is_list_view)
        return any(test(have) for test in lists) and _fits(have.value_type, want.value_type)
    return _leaf_fits(have, want)


def _leaf_fits(have: pa.DataType, want: pa.DataType) -> bool:
    if pt.is_integer(want):
        wider = want.bit_width - have.bit_width if pt.is_integer(have) else -1
        return wider >= 0 if pt.is_signed_integer(have) else wider > 0
    if pt.is_floating(want):
        if pt.is_floating(have):
            return bool(have.bit_width <= want.bit_width)
        return bool(pt.is_integer(have))
    if pt.is_timestamp(want):
        return pt.is_timestamp(have) and (have.tz is None) == (want.tz is None)
    families = (
        (pt.is_string, (pt.is_large_string, pt.is_string_view)),
        (pt.is_binary, (pt.is_large_binary, pt.is_binary_view, pt.is_fixed_size_binary)),
        (pt.is_date, (pt.is_date,)),
        (pt.is_duration, (pt.is_duration,)),
        (pt.is_decimal, (pt.is_decimal,)),
        (pt.is_time, (pt.is_time,)),
    )
    return any(of(want) and any(test(have) for test in tests) for of, tests in families)
