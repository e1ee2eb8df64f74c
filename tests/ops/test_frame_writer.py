"""What becomes of the frames that a pandas processor returns: what Spark makes of each alone."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import conversion
from pyspark.sql import types as T

from statebackend.errors import ValueMismatchError
from statebackend.operators.pandas_frames import frame_writer
from statebackend.operators.pandas_frames.frame_writer import (
    FrameWriter,
    choose_copier,
    inner_copy,
    public_copy,
)
from statebackend.operators.rows.returned_row_checks import MisfitError
from statebackend.operators.rows.row_conversion import arrow_schema

ZONE = "America/New_York"
K_N = T.StructType([T.StructField("k", T.StringType()), T.StructField("n", T.LongType())])


def line_of(mark: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, start=1) if line.endswith(f"# {mark}")]
    return f" at {__file__}:{number}"


@pytest.fixture(autouse=True, params=[inner_copy, public_copy])
def copier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of getting values out of a frame."""
    monkeypatch.setattr(frame_writer, "_copier", lambda: request.param)


def writer(schema: T.StructType = K_N, **options: Any) -> FrameWriter:
    return FrameWriter(schema, lambda: "The processor of operator 'x'", timezone=ZONE, **options)


def written(
    frames: Iterable[Any], schema: T.StructType = K_N, **options: Any
) -> list[dict[str, Any]]:
    """The rows that come out."""
    one = writer(schema, **options)
    batches = list(one.collect(frames))
    if one.pending:
        batches.append(one.take())
    rows = []
    for batch in batches:
        assert batch.schema.equals(arrow_schema(schema))
        batch.validate(full=True)
        rows += batch.to_pylist()
    assert one.pending == 0
    return rows


def spark_says(frames: Iterable[pd.DataFrame], schema: T.StructType) -> list[dict[str, Any]]:
    """Each frame alone through pyspark's conversion, as its worker calls it."""
    if not hasattr(conversion, "PandasToArrowConversion"):
        pytest.skip("PySpark 4.1 has no such conversion to compare with")
    rows = []
    for frame in frames:
        batch = conversion.PandasToArrowConversion.convert(
            [frame],
            T.StructType([T.StructField("_0", schema)]),
            timezone=ZONE,
            safecheck=True,
            arrow_cast=True,
            assign_cols_by_name=True,
        )
        rows += [row["_0"] for row in batch.to_pylist()]
    return rows


def test_frames_of_many_keys_come_out_as_rows_in_their_order() -> None:
    frames = [pd.DataFrame({"k": [f"key {i}"] * (i % 4), "n": i}) for i in range(40)]
    rows = written(frames)
    assert rows == [{"k": f"key {i}", "n": i} for i in range(40) for _ in range(i % 4)]


NOW = pd.Timestamp("2024-07-01 12:00:00.000005")
SAME: dict[str, tuple[T.DataType, list[list[Any]]]] = {
    # name: (type, values of one frame after the other)
    "int": (T.IntegerType(), [[1], [2, None], [None], np.array([7], "i1"), pd.array([None, 3])]),
    "int of float": (T.LongType(), [[1.0], [np.nan, 2.0]]),
    "int of text": (T.LongType(), [["1"], ["2", "3"]]),
    "int of both": (T.LongType(), [["1"], np.array([5], object), [2.0]]),
    "byte of int": (T.ByteType(), [[1], [127, -128]]),
    "double": (T.DoubleType(), [[1.5], [np.nan, None], [1]]),
    "float": (T.FloatType(), [[1.5], [None, np.float32(2.5)]]),
    "bool": (T.BooleanType(), [[True], [False, None], pd.array([True, None], "boolean")]),
    "text": (T.StringType(), [["a"], [None, "b"], [None], pd.array(["x"], "string")]),
    "text of category": (T.StringType(), [pd.Categorical(["a", "b"]), pd.Categorical(["c"])]),
    "time": (T.TimestampType(), [[NOW], [pd.NaT, NOW], [NOW.tz_localize("UTC")], [None]]),
    "time of second": (T.TimestampType(), [np.array([5, 6], "M8[s]"), [NOW]]),
    "time of datetime": (T.TimestampType(), [np.array([NOW.to_pydatetime()], object)]),
    "time, no zone": (T.TimestampNTZType(), [[NOW], [pd.NaT]]),
    "date": (T.DateType(), [[dt.date(2024, 1, 2)], [None], [pd.Timestamp("2024-01-02")]]),
    "decimal": (T.DecimalType(10, 2), [[Decimal("1.25")], [None, Decimal("3")]]),
    "binary": (T.BinaryType(), [[b"x"], [bytearray(b"yz"), None]]),
    "array": (T.ArrayType(T.LongType()), [[[1, 2]], [np.array([3, 4])], [None, []]]),
    "array of arrays": (T.ArrayType(T.ArrayType(T.StringType())), [[[["a"], []]], [[None]]]),
    "array of times": (T.ArrayType(T.TimestampType()), [[[NOW.to_pydatetime()]]]),
    "map": (T.MapType(T.StringType(), T.LongType()), [[{"a": 1}], [None, {"b": None}]]),
    "struct": (
        T.StructType().add("x", "integer").add("y", "string"),
        [[{"x": 1, "y": "a"}], [None]],
    ),
    "struct of row": (T.StructType().add("x", "integer"), [[T.Row(x=1)], [(2,)]]),
    "duration": (T.DayTimeIntervalType(), [[pd.Timedelta(5, "us")], [None]]),
}


@pytest.mark.parametrize("case", SAME)
def test_values_become_what_spark_makes_of_each_frame(case: str) -> None:
    kind, pieces = SAME[case]
    schema = T.StructType([T.StructField("c", kind)])
    frames = [pd.DataFrame({"c": pd.Series(piece)}) for piece in pieces]
    assert written(frames * 2, schema) == spark_says(frames * 2, schema)


@pytest.mark.parametrize(
    "values", [[7, -12345678], np.array([7, 8], "u1"), pd.array([7, None], "Int64"), [7, 2**26]]
)
def test_integers_are_taken_for_decimals_that_hold_them(values: Any) -> None:
    """Spark does so with ``pythonUDF.pandas.intToDecimalCoercionEnabled`` only."""
    schema = T.StructType([T.StructField("c", T.DecimalType(10, 2))])
    found = [row["c"] for row in written([pd.DataFrame({"c": values})], schema)]
    assert found == [None if pd.isna(one) else Decimal(int(one)) for one in values]
    full = T.StructType([T.StructField("c", T.DecimalType(20, 0))])
    most = np.array([2**64 - 1], np.uint64)
    assert written([pd.DataFrame({"c": most})], full) == [{"c": Decimal(2**64 - 1)}]


def test_an_integer_that_a_decimal_cannot_hold_is_refused() -> None:
    schema = T.StructType([T.StructField("c", T.DecimalType(10, 2))])
    for safe in (True, False):
        with pytest.raises(ValueMismatchError, match="no decimal"):
            written([pd.DataFrame({"c": [10**8]})], schema, safe=safe)


WRONG: dict[str, tuple[T.DataType, list[Any]]] = {
    "text for a number": (T.LongType(), ["x"]),
    "a fraction for a number": (T.LongType(), [1.5]),
    "a number too large": (T.IntegerType(), [2**40]),
    "a number for a time": (T.TimestampType(), ["when"]),
    "text for a decimal": (T.DecimalType(10, 2), ["1.2"]),
    "nanoseconds": (T.TimestampType(), [pd.Timestamp(5)]),
    "a number for an array": (T.ArrayType(T.LongType()), [5]),
    "text for a struct": (T.StructType().add("x", "integer"), ["x"]),
    "a number for text": (T.StringType(), [1]),
    "a list for text": (T.StringType(), [["x"]]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_value_that_spark_refuses_is_refused_with_its_column(case: str) -> None:
    kind, values = WRONG[case]
    schema = T.StructType([T.StructField("the_column", kind)])
    frame = pd.DataFrame({"the_column": values})
    with pytest.raises((PySparkException, AssertionError, TypeError)):
        spark_says([frame], schema)
    with pytest.raises(ValueMismatchError, match="the_column"):
        written([frame], schema)


def test_one_bad_value_among_good_frames_is_refused() -> None:
    frames = [pd.DataFrame({"k": ["a"], "n": [value]}) for value in (1, 2, "x", 3)]
    with pytest.raises(ValueMismatchError, match="column 'n' that is no bigint"):
        written(frames)


def test_a_null_where_none_is_declared_is_refused() -> None:
    schema = T.StructType([T.StructField("n", T.LongType(), nullable=False)])
    assert written([pd.DataFrame({"n": [1]})], schema) == [{"n": 1}]
    with pytest.raises(ValueMismatchError, match="'n'"):
        written([pd.DataFrame({"n": [None]})], schema)


# --- columns


def test_columns_are_found_by_name() -> None:
    frame = pd.DataFrame({"n": [1], "k": ["a"]})
    assert written([frame]) == [{"k": "a", "n": 1}]


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (pd.DataFrame({"k": ["a"], "n": [1], "N": [2]}), "column 'N'.*did you mean 'n'"),
        (pd.DataFrame({"k": ["a"], "m": [1]}), "without the column 'n', but with 'm'"),
        (pd.DataFrame({"n": [1], "k": ["a"], 5: [7]}), "column 5, which output_schema does not"),
        (pd.DataFrame([["a", 1, 0.5]]), "column 2, which output_schema does not have"),
        (pd.DataFrame([["a"]]), "without the column 'n'"),
    ],
)
def test_columns_that_the_schema_does_not_have_are_refused_at_the_users_line(
    frame: pd.DataFrame, said: str
) -> None:
    def frames() -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"k": ["a"], "n": [1]})
        yield frame  # the wrong one

    with pytest.raises(MisfitError, match=said) as caught:
        written(frames())
    assert "struct<k:string,n:bigint>" in str(caught.value)
    assert caught.value.where.endswith(f"{line_of('the wrong one')} in frames")


def test_a_column_too_many_is_refused_by_position_too() -> None:
    with pytest.raises(MisfitError, match="column 'z', which output_schema does not have"):
        written([pd.DataFrame({"x": ["a"], "k": [1], "z": [2]})], by_name=False)


@pytest.mark.parametrize("value", [{"a": 1, "c": 2}, T.Row(a=1, c=2), T.Row("a", "a")(1, 2)])
def test_a_name_that_is_no_field_of_a_struct_is_refused(value: Any) -> None:
    schema = T.StructType().add("s", T.ArrayType(T.StructType().add("a", "long").add("b", "long")))
    good = [{"b": 2, "a": 1}, T.Row(b=2, a=1), {"a": 1}, None]
    assert written([pd.DataFrame({"s": [good]})], schema) == spark_says(
        [pd.DataFrame({"s": [good]})], schema
    )
    with pytest.raises(ValueMismatchError, match=r"column 's'.*(no field 'c'|'a' comes twice)"):
        written([pd.DataFrame({"s": [[*good, value]]})], schema)


def test_columns_without_names_are_taken_in_order() -> None:
    assert written([pd.DataFrame([["a", 1]])]) == [{"k": "a", "n": 1}]
    assert written([pd.DataFrame({"x": ["a"], "k": [1]})], by_name=False) == [{"k": "a", "n": 1}]


def test_frames_with_their_columns_in_another_order_may_come_in_turn() -> None:
    frames = [pd.DataFrame({"k": ["a"], "n": [1]}), pd.DataFrame({"n": [2], "k": ["b"]})] * 3
    assert written(frames) == [{"k": "a", "n": 1}, {"k": "b", "n": 2}] * 3


@pytest.mark.parametrize(
    ("frame", "column"),
    [
        (pd.DataFrame({"k": ["a"]}), "n"),
        (pd.DataFrame({"k": ["a"], "m": [1]}), "n"),
        (pd.DataFrame([["a"]]), "n"),
        (pd.DataFrame({"k": []}), "n"),
        (pd.DataFrame(index=[0]), "k"),
        (pd.DataFrame([["a", 1, 2]], columns=["k", "n", "n"]), "n"),
    ],
)
def test_a_frame_without_a_declared_column_is_refused(frame: pd.DataFrame, column: str) -> None:
    with pytest.raises(ValueMismatchError, match=f"the column '{column}'"):
        written([frame])


def test_empty_frames_add_nothing() -> None:
    frame = pd.DataFrame({"k": ["a"], "n": [1]})
    assert written([pd.DataFrame(), frame, frame[:0], pd.DataFrame({"k": [], "n": []})]) == [
        {"k": "a", "n": 1}
    ]


@pytest.mark.parametrize("found", [5, None, ("a", 1), {"k": ["a"], "n": [1]}, pd.Series([1])])
def test_what_is_no_frame_is_refused(found: Any) -> None:
    with pytest.raises(ValueMismatchError, match=type(found).__name__):
        written([found])


def test_a_frame_where_an_iterator_was_due_is_refused() -> None:
    with pytest.raises(ValueMismatchError, match="DataFrame where an iterator"):
        written(pd.DataFrame({"k": ["a"], "n": [1]}))


def test_a_frame_may_be_any_view_with_any_index() -> None:
    base = pd.DataFrame({"n": range(6), "z": 0.5, "k": list("abcdef"), "m": 1}, index=[9] * 6)
    wide, base = base, base[["n", "k"]]
    views = [base[1:3], wide[["k", "n"]].iloc[::2], base.loc[base["n"] > 4]]
    assert written(views) == spark_says(views, K_N)
    assert written([base.set_index(wide["z"])]) == spark_says([base], K_N)


# --- when


def test_a_frame_that_is_changed_and_given_again_counts_as_it_was() -> None:
    schema = T.StructType(
        [*K_N.fields, T.StructField("a", T.ArrayType(T.LongType())), T.StructField("at", NTZ)]
    )
    frame = pd.DataFrame({"k": ["a"], "n": [0], "a": [[0]], "at": [NOW]})
    inside = frame.at[0, "a"]

    def again() -> Iterator[pd.DataFrame]:
        for n in range(3):
            frame.at[0, "n"] = n
            frame.loc[0, "k"] = f"key {n}"
            frame.loc[0, "at"] = NOW + pd.Timedelta(n, "s")
            inside[0] = n
            yield frame

    rows = written(again(), schema)
    assert [(row["k"], row["n"], row["a"]) for row in rows] == [
        (f"key {n}", n, [n]) for n in range(3)
    ]
    assert [row["at"].second for row in rows] == [0, 1, 2]


NTZ = T.TimestampNTZType()


def test_batches_have_no_more_rows_than_asked_for() -> None:
    one = writer(max_rows=100)
    frames = [pd.DataFrame({"k": "a", "n": range(size)}) for size in (60, 60, 10, 450, 1)]
    batches = [batch.num_rows for batch in one.collect(frames)]
    assert (batches, one.pending) == ([100, 20, 100, 100, 100, 100, 60], 1)
    assert one.take().num_rows == 1
    assert one.take().num_rows == 0


def test_output_is_read_no_faster_than_batches_are_taken() -> None:
    one = writer(max_rows=2)
    read = []

    def endless() -> Iterator[pd.DataFrame]:
        n = 0
        while True:
            read.append(n)
            yield pd.DataFrame({"k": ["a"], "n": [n]})
            n += 1

    batches = one.collect(endless())
    assert next(batches).num_rows == 2
    assert len(read) == 2


def test_another_pandas_is_read_the_public_way() -> None:
    def broken(frame: Any, order: Any) -> None:
        raise AttributeError("no such part")

    def wrong(frame: Any, order: Any) -> None:
        public_copy(frame.iloc[::-1], order)

    assert choose_copier(inner_copy) is inner_copy
    assert choose_copier(broken) is public_copy
    assert choose_copier(wrong) is public_copy


def test_an_output_without_columns_keeps_its_number_of_rows() -> None:
    one = writer(T.StructType([]))
    assert list(one.collect([pd.DataFrame(index=[1, 2])])) == []
    assert one.take().num_rows == 2
    assert isinstance(one.take(), pa.RecordBatch)
