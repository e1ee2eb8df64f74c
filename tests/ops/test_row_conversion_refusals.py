"""Rows that Python yields: forms that are taken, and rows that are refused at their line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from statebackend.errors import ValueMismatchError
from statebackend.operators.rows.returned_row_checks import MisfitError
from statebackend.operators.rows.row_conversion import columns_to_python, row_type
from statebackend.operators.rows.row_writer import RowWriter
from tests.ops.rowwriters import INNER, same, schema_of, writer

# --- what does not fit ---------------------------------------------------------------------------


BAD: dict[str, tuple[T.DataType, Any]] = {
    "text in a long": (T.LongType(), "1"),
    "a boolean in a long": (T.LongType(), True),
    "out of range of an int": (T.IntegerType(), 2**31),
    "out of range of a long": (T.LongType(), 2**63),
    "out of range of a byte": (T.ByteType(), 128),
    "a number in a boolean": (T.BooleanType(), 1),
    "text in a double": (T.DoubleType(), "1.0"),
    "text in a date": (T.DateType(), "2020-01-01"),
    "text in a timestamp": (T.TimestampType(), "2020-01-01"),
    "a float in a decimal": (T.DecimalType(5, 2), 1.5),
    "too many digits": (T.DecimalType(5, 2), Decimal("12345.6")),
    "no list": (T.ArrayType(T.LongType()), 5),
    "a wrong element": (T.ArrayType(T.LongType()), [1, "x"]),
    "a null element": (T.ArrayType(T.LongType(), containsNull=False), [1, None]),
    "no map": (T.MapType(T.StringType(), T.LongType()), [1]),
    "a wrong struct": (INNER, ("x", "y")),
    "a struct of another width": (INNER, (1,)),
    "a struct of other names": (INNER, {"x": 1}),
    "a Row of other names in a struct": (INNER, T.Row(x=1, y="x")),
    "a number in text": (T.StringType(), 5),
    "a fraction": (T.LongType(), 1.5),
    "a decimal fraction": (T.LongType(), Decimal("1.5")),
    "numpy's fraction": (T.ShortType(), np.float32(1.5)),
    "numpy's boolean in a long": (T.LongType(), np.bool_(True)),
    "no number": (T.LongType(), math.nan),
    "without end": (T.LongType(), math.inf),
    "a fraction in an array": (T.ArrayType(T.LongType()), [1, 1.5]),
    "a fraction in a map": (T.MapType(T.StringType(), T.LongType()), {"a": 1.5}),
    "a fraction in a struct": (INNER, {"a": 1.5}),
    "a fraction in a timestamp": (T.TimestampType(), 1.5),
    "a null key": (T.MapType(T.StringType(), T.LongType()), [(None, 1)]),
    "a null in a map": (T.MapType(T.StringType(), T.LongType(), False), {"a": None}),
    "a null in a struct": (T.StructType([T.StructField("a", T.LongType(), False)]), {"a": None}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_value_that_does_not_fit_names_its_column_and_the_type(name: str) -> None:
    dtype, value = BAD[name]
    schema = T.StructType([T.StructField("good", T.LongType()), T.StructField("bad one", dtype)])
    out = writer(schema)
    out.rows.extend([(1, None), (2, value)])
    with pytest.raises(ValueMismatchError, match="'bad one'") as caught:
        out.take()
    assert dtype.simpleString() in str(caught.value)
    assert "operator 'op'" in str(caught.value)
    assert repr(value) in str(caught.value)
    assert caught.value.__cause__ is not None


# What Spark takes besides what it gives, with what becomes of it.
TAKEN: dict[str, tuple[T.DataType, list[Any], list[Any]]] = {
    "whole floats": (T.LongType(), [1.0, 2, None, -3.0], [1, 2, None, -3]),
    "whole decimals": (T.IntegerType(), [Decimal("2.0")], [2]),
    "numpy's integers": (T.LongType(), [np.int32(3), np.uint8(4), np.float64(5)], [3, 4, 5]),
    "numpy's floats": (T.DoubleType(), [np.float32(1.5), np.int64(2)], [1.5, 2.0]),
    "ints in a double": (T.DoubleType(), [1, 2.5], [1.0, 2.5]),
    "numpy's text": (T.StringType(), [np.str_("a")], ["a"]),
    "numpy's boolean": (T.BooleanType(), [np.bool_(True), False], [True, False]),
    "ints in a decimal": (T.DecimalType(5, 2), [5, Decimal("1.25")], [Decimal(5), Decimal("1.25")]),
    "bytearray": (T.BinaryType(), [bytearray(b"a")], [b"a"]),
    "a tuple and an ndarray in an array": (
        T.ArrayType(T.LongType()),
        [(1, 2), np.array([3, 4]), np.array([5.0])],
        [[1, 2], [3, 4], [5]],
    ),
    "dicts, pairs and Rows": (
        T.MapType(T.StringType(), INNER),
        [{"a": T.Row(b="x", a=1)}, [("a", {"b": "y"})], (("a", (3, "z")),)],
        [[("a", {"a": 1, "b": "x"})], [("a", {"a": None, "b": "y"})], [("a", {"a": 3, "b": "z"})]],
    ),
    "structs in every form": (
        INNER,
        [T.Row(a=1, b="x"), T.Row(b="x", a=1), T.Row(b="x"), {"a": 2.0}, {}, (3, "y")],
        [
            {"a": 1, "b": "x"},
            {"a": 1, "b": "x"},
            {"a": None, "b": "x"},
            {"a": 2, "b": None},
            {"a": None, "b": None},
            {"a": 3, "b": "y"},
        ],
    ),
    "unnamed Rows": (
        INNER,
        [T.Row(1, "x"), T.Row("a", "b")(2, "y")],
        [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}],
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_values_are_taken_in_the_forms_that_spark_takes(name: str) -> None:
    dtype, values, expected = TAKEN[name]
    schema = schema_of(dtype)
    out = writer(schema)
    out.rows.extend((value,) for value in values)
    (column,) = columns_to_python(pa.Table.from_batches([out.take()]), schema)
    assert len(column) == len(expected)
    assert all(map(same, column, expected)), column


def line_of(mark: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, start=1) if line.endswith(f"# {mark}")]
    return number


TWO = T.StructType([T.StructField("a", T.LongType()), T.StructField("b", T.StringType())])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (T.Row(a=1, b="x"), (1, "x")),
        (T.Row(b="x", a=1), (1, "x")),
        (T.Row(b="x"), (None, "x")),
        (T.Row(a=1), (1, None)),
        (T.Row("b", "a")("x", 1), (1, "x")),
        (T.Row("a", "b")(1, "x"), (1, "x")),
        (row_type(["b", "a"])("x", 1), (1, "x")),
        (T.Row(1, "x"), (1, "x")),
        ((1, "x"), (1, "x")),
    ],
)
def test_a_row_with_names_is_matched_by_them_and_others_by_position(
    row: Any, expected: tuple[Any, ...]
) -> None:
    for rows in ([row], [row, row], [(5, "y"), row], [T.Row(a=5, b="y"), row]):
        out = writer(TWO)
        out.rows.extend(rows)
        assert tuple(out.take().to_pylist()[-1].values()) == expected


MISNAMED = [
    (T.Row(x=1, y="x"), "the field 'x', which output_schema does not have"),
    (T.Row(A=1), "did you mean 'a'"),
    (T.Row(c=0, b="x", a=1), "the field 'c', which output_schema does not have"),
    (T.Row(a=1, bb="x"), "the field 'bb', .*did you mean 'b'"),
    (T.Row("a", "a")(1, "x"), "the field 'a', twice"),
]


@pytest.mark.parametrize(("row", "said"), MISNAMED)
def test_a_row_with_a_field_that_is_none_is_refused(row: Any, said: str) -> None:
    out = writer(TWO)
    out.rows.extend([T.Row(a=1, b="x"), row])
    with pytest.raises(ValueMismatchError, match=said) as caught:
        out.take()
    assert repr(row) in str(caught.value)
    assert "struct<a:bigint,b:string>" in str(caught.value)


@pytest.mark.parametrize("row", [row for row, _ in MISNAMED] + [(1,), (1, "x", 2), 5, T.Row(1)])
@pytest.mark.parametrize("mutable", [False, True])
def test_a_row_that_does_not_fit_is_refused_at_the_line_that_yields_it(
    row: Any, mutable: bool
) -> None:
    schema = T.StructType([*TWO.fields, T.StructField("l", T.ArrayType(T.LongType()))])
    good = (1, "x", [1]) if mutable else (1, "x")
    out = writer(schema if mutable else TWO)

    def inner() -> Iterator[Any]:
        yield row  # the line
        raise AssertionError("it goes no further")

    def outer() -> Iterator[Any]:
        yield good
        yield from inner()

    for way in (out.put, lambda rows: list(out.collect(rows))):
        if mutable and row == (1, "x", 2):
            continue  # it has the right number
        with pytest.raises(MisfitError) as caught:
            way(outer())
        assert caught.value.where == f" at {__file__}:{line_of('the line')} in inner"
        out.rows.clear()
    with pytest.raises(MisfitError) as caught:
        out.put([good, row if not mutable else T.Row(q=1)])
    assert caught.value.where == ""


def test_a_row_that_comes_late_in_a_batch_is_refused_with_the_batch() -> None:
    out = writer(TWO)
    out.put((n, "x") for n in range(5_000))
    out.put(iter([T.Row(a=1, c="x")]))
    with pytest.raises(ValueMismatchError, match="field 'c'") as caught:
        out.take()
    assert not isinstance(caught.value, MisfitError)  # whose key would be another's


@pytest.mark.parametrize("dtype", [INNER, T.ArrayType(INNER), T.MapType(T.StringType(), INNER)])
@pytest.mark.parametrize("value", [T.Row(b="x", c=1), {"a": 1, "d": 2}, T.Row("a", "a")(1, 2)])
def test_a_name_that_is_no_field_of_a_struct_is_refused(dtype: T.DataType, value: Any) -> None:
    if isinstance(dtype, T.ArrayType):
        value = [value]
    elif isinstance(dtype, T.MapType):
        value = {"k": value}
    out = writer(schema_of(dtype))
    out.rows.append((value,))
    with pytest.raises(ValueMismatchError, match=r"has no field '[cd]'|'a' comes twice"):
        out.take()


def test_a_name_that_is_no_field_beside_a_variant_is_refused_too() -> None:
    inner = T.StructType().add("v", T.VariantType()).add("n", T.LongType())
    out = writer(schema_of(inner))
    out.rows.append(({"v": None, "n": 1, "m": 2},))
    with pytest.raises(ValueMismatchError, match="has no field 'm'"):
        out.take()


@pytest.mark.parametrize("dtype", [T.LongType(), T.StringType(), INNER], ids=str)
def test_a_null_in_a_column_that_is_not_nullable_names_it(dtype: T.DataType) -> None:
    out = writer(schema_of(dtype, nullable=False))
    out.rows.extend([(None,)])
    with pytest.raises(ValueMismatchError, match="'c'"):
        out.take()


@pytest.mark.parametrize("row", [(), (1,), (1, 2, 3), [1, 2], "ab", 5, object()])
def test_what_is_no_row_of_that_width_is_shown(row: Any) -> None:
    schema = T.StructType([T.StructField(name, T.LongType()) for name in "ab"])
    out = writer(schema)
    out.rows.extend([(1, 2), row])
    with pytest.raises(ValueMismatchError, match="no row of 2 fields") as caught:
        out.take()
    assert repr(row) in str(caught.value)


@pytest.mark.parametrize("row", [{"a": 1, "b": 2}, {"a": 1}, {"x": 1, "b": 2}])
def test_a_dict_is_no_row_and_is_called_one(row: dict[str, int]) -> None:
    schema = T.StructType([T.StructField(name, T.LongType()) for name in "ab"])
    out = writer(schema)
    out.rows.extend([row])
    with pytest.raises(ValueMismatchError, match="a dict is no row, as in Spark") as caught:
        out.take()
    assert repr(row) in caught.value.what
    assert "Row(**fields)" in caught.value.todo


def test_a_none_among_the_rows_is_shown_too() -> None:
    out = writer(schema_of(T.LongType()))
    out.rows.extend([(1,), None])
    with pytest.raises(ValueMismatchError, match="returned None"):
        out.take()


def test_a_fraction_in_an_integer_column_is_not_cut_off() -> None:
    out = writer(schema_of(T.LongType()))
    out.rows.extend([(1.5,)])
    with pytest.raises(ValueMismatchError, match="'c'"):
        out.take()


def test_a_writer_is_empty_after_it_was_taken_from_even_if_that_failed() -> None:
    out = writer(schema_of(T.LongType()))
    out.rows.extend([("x",)])
    with pytest.raises(ValueMismatchError):
        out.take()
    out.rows.extend([(1,)])
    assert out.take().to_pylist() == [{"c": 1}]
    assert out.rows == []


def test_a_writer_is_full_at_its_limit() -> None:
    out = RowWriter(schema_of(T.LongType()), lambda: "x", max_rows=3)
    cut = list(out.collect([(1,), (2,)]))
    assert cut == []
    cut = list(out.collect([(3,), (4,), (5,), (6,), (7,)]))
    assert [batch.num_rows for batch in cut] == [3, 3]
    assert out.take().to_pydict() == {"c": [7]}
