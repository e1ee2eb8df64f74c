"""Keys in tests: their schema, taken from the first one that is used, and where they belong."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

from pyspark.sql import types as T
from pyspark.sql.conversion import LocalDataToArrowConversion

from statebackend.errors import UsageError, ValueMismatchError
from statebackend.key_hashing import key_groups
from statebackend.keygroups import check_parallelism
from statebackend.operators.declared_states import parse_schema
from statebackend.schema.keys.key_codec import KeyCodec

__all__ = ["KeySpace"]

Key = tuple[Any, ...]

# In this order: a bool is an int, a datetime is a date. Decimals as Spark takes them from Python.
_TYPES: Final[tuple[tuple[type, T.DataType], ...]] = (
    (bool, T.BooleanType()),
    (int, T.LongType()),
    (float, T.DoubleType()),
    (str, T.StringType()),
    (datetime, T.TimestampType()),
    (date, T.DateType()),
    (timedelta, T.DayTimeIntervalType()),
    (Decimal, T.DecimalType(38, 18)),
    (bytes, T.BinaryType()),
    (bytearray, T.BinaryType()),
)
_UNKNOWN: Final = T.StructType([T.StructField("key", T.StringType())])


class KeySpace:
    """Turns keys, as tests give them, into key tuples, key groups and bytes.

    Args:
        schema: of the key, a StructType or DDL; without one it follows from the first key.
        max_parallelism: key groups.

    Raises:
        SchemaError, UnsupportedTypeError: the schema does not parse, or cannot be a key.
        ParallelismError: ``max_parallelism`` is outside 1 to 32768.
    """

    def __init__(self, schema: T.StructType | str | None, max_parallelism: int) -> None:
        check_parallelism(1, max_parallelism)
        self.max_parallelism = max_parallelism
        self._codec: KeyCodec | None = None
        if schema is not None:
            self._codec = KeyCodec(parse_schema(schema, "the key"))

    @property
    def schema(self) -> T.StructType:
        """Of the key; before one was seen there is no state that it could matter to."""
        return _UNKNOWN if self._codec is None else self._codec.schema

    def place(self, key: Any) -> tuple[Key, int, bytes]:
        """The key as the processor sees it, its key group, and its bytes.

        Args:
            key: a value, or a tuple of several.

        Raises:
            UsageError: no schema is known for a key like this.
            ValueMismatchError, NullKeyError: it does not fit the schema.
        """
        values = tuple(key) if isinstance(key, tuple) else (key,)
        if self._codec is None:
            self._codec = KeyCodec(_inferred(values))
        codec = self._codec
        encoded = codec.encode(tuple([_plain(value) for value in values]))
        try:  # the very way that the rows of a query take
            table = LocalDataToArrowConversion.convert([values], _nullable(codec.schema), False)
        except Exception as error:
            raise ValueMismatchError(
                f"Key {key!r} is none of {codec.schema.simpleString()} ({error}).",
                todo="Give keys of one type, or a keySchema= that they fit.",
            ) from error
        columns = [column.combine_chunks() for column in table.columns]
        return values, int(key_groups(columns, self.max_parallelism)[0]), encoded


def _nullable(schema: T.StructType) -> T.StructType:
    return T.StructType([T.StructField(field.name, field.dataType) for field in schema])


def _plain(value: Any) -> Any:
    """A numpy scalar as a Python value."""
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return value.item()
    return value


def _inferred(values: Key) -> T.StructType:
    fields = []
    for number, value in enumerate(values):
        plain = _plain(value)
        kind = next((kind for type_, kind in _TYPES if isinstance(plain, type_)), None)
        if kind is None:
            raise UsageError(
                f"The type of a key column cannot be told from {value!r}.",
                todo="Give keySchema=, such as keySchema='user string, day date'.",
            )
        fields.append(T.StructField("key" if len(values) == 1 else f"key{number + 1}", kind))
    return T.StructType(fields)
