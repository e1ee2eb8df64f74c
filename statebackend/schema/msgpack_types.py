"""The form in which the msgpack codec writes each type, and the ways to and from it.

=================================== =============================================================
type                                msgpack
=================================== =============================================================
boolean, string, binary             bool, str, bin
byte, short, int, long              int
float, double                       float 64
date, timestamp, timestamp_ntz,     int: days; microseconds
day-time interval
time                                int: nanoseconds since midnight
void                                nil
variant                             array of two bin: value, metadata
geometry, geography                 array of int and bin: srid, wkb
decimal                             int, unscaled, up to 18 digits; above, bin: the unscaled
                                    value as the shortest big-endian two's complement
array                               array of elements
map                                 map where keys are strings or integers, in the given order;
                                    else an array of [key, value]
struct                              array of fields
null                                nil
=================================== =============================================================
"""

from __future__ import annotations

from itertools import pairwise
from types import GenericAlias
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from statebackend.schema.scalars import SEQUENCES, Convert
from statebackend.schema.type_table import BoxedType, boxed_type, simple
from statebackend.schema.types import arrow_type
from statebackend.schema.value_checks import by_names, mismatch, row_maker, typed

__all__ = ["arrow_from_wire", "from_wire", "to_wire", "wire_list", "wire_type"]


def wire_type(dtype: T.DataType) -> Any:
    """The type annotation by which msgspec checks and decodes the wire form."""
    if isinstance(dtype, T.StructType):
        return GenericAlias(tuple, tuple(wire_type(f.dataType) | None for f in dtype))
    if isinstance(dtype, T.ArrayType):
        return GenericAlias(list, wire_type(dtype.elementType) | None)
    if isinstance(dtype, T.MapType):
        entry = (wire_type(dtype.keyType), wire_type(dtype.valueType) | None)
        if _direct(dtype):
            return GenericAlias(dict, entry)
        return GenericAlias(list, GenericAlias(tuple, entry))
    box = boxed_type(dtype)
    if box is not None:
        return GenericAlias(tuple, tuple(wire_type(f.dataType) for f in box.fields))
    return simple(dtype).wire


def _direct(dtype: T.MapType) -> bool:
    return isinstance(dtype.keyType, T.StringType | T.IntegralType)


def _is_big(dtype: T.DataType) -> bool:
    return isinstance(dtype, T.DecimalType) and simple(dtype).wire is bytes


def _big_to_bytes(plain: int) -> bytes:
    # As Java's BigInteger.toByteArray: one bit for the sign.
    return plain.to_bytes(
        (plain if plain >= 0 else ~plain).bit_length() // 8 + 1, "big", signed=True
    )


def _big_from_bytes(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


# --- Python values -----------------------------------------------------------------------------


def to_wire(dtype: T.DataType, path: str, nullable: bool) -> Convert:
    """A function from any Python value of a field to its wire form.

    It raises ValueMismatchError naming `path` for what does not fit.
    """
    if isinstance(dtype, T.StructType):
        return _struct_to_wire(dtype, path, nullable)
    if isinstance(dtype, T.ArrayType):
        return _array_to_wire(dtype, path, nullable)
    if isinstance(dtype, T.MapType):
        return _map_to_wire(dtype, path, nullable)
    box = boxed_type(dtype)
    if box is not None:
        return _boxed_to_wire(dtype, box, path, nullable)
    plain = typed(path, dtype, nullable)
    if not _is_big(dtype):
        return plain

    def big(value: Any) -> bytes | None:
        number = plain(value)
        return None if number is None else _big_to_bytes(number)

    return big


def _struct_to_wire(dtype: T.StructType, path: str, nullable: bool) -> Convert:
    fields = [to_wire(f.dataType, f"{path}.{f.name}", f.nullable) for f in dtype]

    def convert(value: Any) -> Any:
        if value is None and nullable:
            return None
        if isinstance(value, dict):
            value = by_names(dtype, value, path)
        if not isinstance(value, tuple | list):
            raise mismatch(path, dtype, value)
        if len(value) != len(fields):
            raise mismatch(path, dtype, value, f"a {type(value).__name__} of {len(value)}")
        return [field(v) for field, v in zip(fields, value, strict=True)]

    return convert


def _array_to_wire(dtype: T.ArrayType, path: str, nullable: bool) -> Convert:
    element = to_wire(dtype.elementType, f"{path}[]", dtype.containsNull)

    def convert(value: Any) -> Any:
        if value is None and nullable:
            return None
        if not isinstance(value, SEQUENCES):
            raise mismatch(path, dtype, value)
        return [element(v) for v in value]

    return convert


def _map_to_wire(dtype: T.MapType, path: str, nullable: bool) -> Convert:
    key = to_wire(dtype.keyType, f"{path}.key", nullable=False)
    item = to_wire(dtype.valueType, f"{path}.value", dtype.valueContainsNull)
    direct = _direct(dtype)

    def convert(value: Any) -> Any:
        if value is None and nullable:
            return None
        if not isinstance(value, dict):
            raise mismatch(path, dtype, value)
        if direct:
            return {key(k): item(v) for k, v in value.items()}
        return [(key(k), item(v)) for k, v in value.items()]

    return convert


def _boxed_to_wire(dtype: T.DataType, box: BoxedType, path: str, nullable: bool) -> Convert:
    kind, names = box.kind, box.fields.names
    fields = [to_wire(f.dataType, f"{path}.{f.name}", f.nullable) for f in box.fields]
    mixed = T.GeometryType.MIXED_SRID
    srid = getattr(dtype, "srid", mixed)

    def convert(value: Any) -> Any:
        if value is None and nullable:
            return None
        # The dict is what Spark's own transformWithState shows of such a column.
        if isinstance(value, dict) and value.keys() == set(names):
            parts = [value[name] for name in names]
        elif isinstance(value, kind):
            parts = [getattr(value, name) for name in names]
        else:
            raise mismatch(path, dtype, value)
        if srid != mixed and parts[0] != srid:
            raise mismatch(path, dtype, value, f"one of reference system {parts[0]}")
        return [field(part) for field, part in zip(fields, parts, strict=True)]

    return convert


def from_wire(dtype: T.DataType) -> Convert | None:
    """The way back to Python values, as `pyspark.sql.Row` carries them; None: nothing to do."""
    if isinstance(dtype, T.StructType):
        return _row_from_wire(dtype)
    if isinstance(dtype, T.ArrayType):
        element = from_wire(dtype.elementType)
        if element is None:
            return None
        restore = _nullable(element)
        return lambda wire: [restore(v) for v in wire]
    if isinstance(dtype, T.MapType):
        return _map_from_wire(dtype)
    box = boxed_type(dtype)
    if box is not None:
        return box.make
    plain = simple(dtype).scalar.from_plain
    if plain is not None and _is_big(dtype):
        return lambda wire: plain(_big_from_bytes(wire))
    return plain


def _row_from_wire(dtype: T.StructType) -> Convert:
    make = row_maker(dtype)
    fields = [from_wire(f.dataType) for f in dtype]
    if all(field is None for field in fields):
        return make
    return lambda wire: make(
        [v if f is None or v is None else f(v) for f, v in zip(fields, wire, strict=True)]
    )


def _map_from_wire(dtype: T.MapType) -> Convert | None:
    key, item = from_wire(dtype.keyType), from_wire(dtype.valueType)
    if _direct(dtype):
        if item is None:
            return None
        restore = _nullable(item)
        return lambda wire: {k: restore(v) for k, v in wire.items()}
    of_key, of_item = _nullable(key), _nullable(item)
    return lambda wire: {of_key(k): of_item(v) for k, v in wire}


def _nullable(convert: Convert | None) -> Convert:
    if convert is None:
        return lambda wire: wire
    return lambda wire: None if wire is None else convert(wire)


# --- Arrow columns -----------------------------------------------------------------------------


def wire_list(array: pa.Array, dtype: T.DataType) -> list[Any]:
    """A column (in the type of `types.arrow_type`) as the wire forms of its values."""
    fields_of = _fields(dtype)
    if fields_of is not None:
        fields = [wire_list(array.field(i), f.dataType) for i, f in enumerate(fields_of)]
        return _only_valid(array, list(zip(*fields, strict=True)))
    if isinstance(dtype, T.ArrayType):
        return _sliced(array, wire_list(array.values, dtype.elementType))
    if isinstance(dtype, T.MapType):
        keys, items = wire_list(array.keys, dtype.keyType), wire_list(array.items, dtype.valueType)
        pairs = _sliced(array, list(zip(keys, items, strict=True)))
        return [None if p is None else dict(p) for p in pairs] if _direct(dtype) else pairs
    if isinstance(dtype, T.DecimalType):
        unscaled = to_wire(dtype, "", nullable=True)
        return [unscaled(value) for value in array.to_pylist()]
    integers = simple(dtype).as_integers
    values: list[Any] = (array if integers is None else array.view(integers)).to_pylist()
    return values


def _fields(dtype: T.DataType) -> T.StructType | None:
    """The fields of a struct, or of what is kept as one."""
    box = boxed_type(dtype)
    return dtype if isinstance(dtype, T.StructType) else box.fields if box else None


def _sliced(array: pa.Array, elements: list[Any]) -> list[Any]:
    """Elements cut up by the list (or map) array's own offsets."""
    offsets = np.frombuffer(array.buffers()[1] or bytes(4), np.int32)
    bounds = offsets[array.offset : array.offset + len(array) + 1].tolist()
    cut = [elements[a:b] for a, b in pairwise(bounds)]
    return _only_valid(array, cut)


def _only_valid(array: pa.Array, values: list[Any]) -> list[Any]:
    if not array.null_count:
        return values
    valid = pc.is_valid(array).to_pylist()
    return [v if there else None for v, there in zip(values, valid, strict=True)]


def arrow_from_wire(values: list[Any], dtype: T.DataType) -> pa.Array:
    """Wire forms (None: null) as a column in the type of `types.arrow_type`."""
    wanted = arrow_type(dtype)
    fields = _fields(dtype)
    if fields is not None or isinstance(dtype, T.ArrayType | T.MapType):
        missing = pa.array([value is None for value in values], pa.bool_())
    if fields is not None:
        blank = (None,) * len(fields.fields)
        rows = [blank if value is None else value for value in values]
        columns = zip(*rows, strict=True) if rows else [()] * len(blank)
        children = [
            arrow_from_wire(list(column), field.dataType)
            for column, field in zip(columns, fields, strict=True)
        ]
        return pa.StructArray.from_arrays(children, fields=list(wanted), mask=missing)
    if isinstance(dtype, T.ArrayType):
        inner = [element for value in values if value is not None for element in value]
        child = arrow_from_wire(inner, dtype.elementType)
        return pa.ListArray.from_arrays(_bounds(values), child, type=wanted, mask=missing)
    if isinstance(dtype, T.MapType):
        entries = [v.items() if isinstance(v, dict) else v for v in values if v is not None]
        pairs = [pair for entry in entries for pair in entry]
        keys = arrow_from_wire([key for key, _ in pairs], dtype.keyType)
        items = arrow_from_wire([item for _, item in pairs], dtype.valueType)
        return pa.MapArray.from_arrays(_bounds(values), keys, items, type=wanted, mask=missing)
    if isinstance(dtype, T.DecimalType):
        restore = _nullable(from_wire(dtype))
        return pa.array([restore(value) for value in values], wanted)
    integers = simple(dtype).as_integers
    return pa.array(values, wanted) if integers is None else pa.array(values, integers).view(wanted)


def _bounds(values: list[Any]) -> pa.Array:
    lengths = [0, *(0 if value is None else len(value) for value in values)]
    return pa.array(np.cumsum(lengths), pa.int32())
