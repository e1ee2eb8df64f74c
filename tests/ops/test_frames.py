"""What a pandas processor is given: the frames that Spark gives, each its own."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import conversion
from pyspark.sql import types as T

from statebackend.operators.input.group_by_key import Groups, group_rows
from statebackend.operators.pandas_frames import frame_reader as frames
from statebackend.operators.pandas_frames.frame_reader import FrameReader, frame_names
from statebackend.operators.pandas_frames.frame_slicing import (
    choose_maker,
    inner_maker,
    public_maker,
)
from statebackend.operators.rows.row_conversion import arrow_schema
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.state.cells import KeyCursor
from tests.support.keyoperators import FrameOperator

ZONE = "America/New_York"
POINT = T.StructType([T.StructField("x", T.IntegerType()), T.StructField("y", T.StringType())])
EVERY_TYPE = T.StructType(
    [
        T.StructField("v x", T.IntegerType()),
        T.StructField("id", T.StringType()),
        T.StructField("i8", T.ByteType()),
        T.StructField("i32", T.IntegerType()),
        T.StructField("i64", T.LongType()),
        T.StructField("f32", T.FloatType()),
        T.StructField("f64", T.DoubleType()),
        T.StructField("b", T.BooleanType()),
        T.StructField("ts", T.TimestampType()),
        T.StructField("ntz", T.TimestampNTZType()),
        T.StructField("d", T.DateType()),
        T.StructField("dec", T.DecimalType(10, 2)),
        T.StructField("bin", T.BinaryType()),
        T.StructField("arr", T.ArrayType(T.IntegerType())),
        T.StructField("m", T.MapType(T.StringType(), T.IntegerType())),
        T.StructField("st", POINT),
        T.StructField("dur", T.DayTimeIntervalType()),
    ]
)
UTC_TIME = dt.datetime(2024, 7, 1, 16, 0, 0, 5, tzinfo=dt.UTC)
NTZ_TIME = dt.datetime(2024, 7, 1, 12, 0, 0, 5)
SECOND = dt.timedelta(seconds=1)
VALUES: tuple[Any, ...] = (
    *(1, 2, 3, 1.5, 2.5, True, UTC_TIME, NTZ_TIME, dt.date(2024, 1, 2), Decimal("1.25"), b"q"),
    *([1, None], [("a", None)], {"x": 1, "y": None}, SECOND),
)
NULLS = (None,) * len(VALUES)

# What Spark 4.3's own transformWithStateInPandas handed over for these rows (a run of
# 2026-11, session time zone New York): dtype and values by column. The one thing left out: where
# it sees timedelta64 with nothing but nulls, Spark says datetime64.
SPARK_SAW_MIXED = {
    "_0": ("int64", [2, 2]),
    "id": ("object", ["mix", "mix"]),
    "i8": ("float64", [1.0, np.nan]),
    "i32": ("float64", [2.0, np.nan]),
    "i64": ("float64", [3.0, np.nan]),
    "f32": ("float64", [1.5, np.nan]),
    "f64": ("float64", [2.5, np.nan]),
    "b": ("object", [True, None]),
    "ts": ("datetime64[ns]", [pd.Timestamp("2024-07-01 12:00:00.000005"), pd.NaT]),
    "ntz": ("datetime64[ns]", [pd.Timestamp("2024-07-01 12:00:00.000005"), pd.NaT]),
    "d": ("object", [dt.date(2024, 1, 2), None]),
    "dec": ("object", [Decimal("1.25"), None]),
    "bin": ("object", [b"q", None]),
    "arr": ("object", [np.array([1, None], object), None]),
    "m": ("object", [{"a": None}, None]),
    "st": ("object", [{"x": 1, "y": None}, None]),
    "dur": ("timedelta64[ns]", [pd.Timedelta(SECOND), pd.NaT]),
}


@pytest.fixture(params=[inner_maker, public_maker])
def maker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both ways of making frames."""
    monkeypatch.setattr(frames, "frame_maker", lambda: request.param)
    return request.param


def table_of(rows: list[tuple[Any, ...]], schema: T.StructType) -> pa.Table:
    arrow = arrow_schema(schema)
    columns = zip(*rows, strict=True)
    return pa.table(
        [pa.array(list(c), field.type) for c, field in zip(columns, arrow, strict=True)],
        schema=arrow,
    )


def read(
    rows: list[tuple[Any, ...]],
    schema: T.StructType,
    starts: list[int],
    key_positions: tuple[int, ...] = (0,),
    **options: Any,
) -> tuple[list[Any], list[list[pd.DataFrame]]]:
    reader = FrameReader(schema, key_positions, timezone=ZONE, **options)
    keys, inputs = reader.chunk(table_of(rows, schema), starts)
    return keys, [list(one) for one in inputs]


def as_seen(frame: pd.DataFrame) -> str:
    """Types and values as text: NaN, NaT and arrays compare so."""
    return repr(
        {
            name: (str(frame.dtypes.iloc[i]), frame.iloc[:, i].tolist())
            for i, name in enumerate(frame.columns)
        }
    )


@pytest.mark.usefixtures("maker")
def test_a_frame_has_the_columns_types_and_values_that_spark_handed_over() -> None:
    rows = [(2, "mix", *VALUES), (2, "mix", *NULLS)]
    keys, [[frame]] = read(rows, EVERY_TYPE, [0, 2], (1,))
    assert keys == [("mix",)]
    assert as_seen(frame) == repr(SPARK_SAW_MIXED)
    assert repr(frame.index) == "RangeIndex(start=0, stop=2, step=1)"
    assert frame.columns.dtype == object


@pytest.mark.usefixtures("maker")
def test_a_frame_equals_what_sparks_worker_builds_if_the_key_is_alone() -> None:
    schema = T.StructType(
        [
            *EVERY_TYPE.fields,
            T.StructField("times", T.ArrayType(T.TimestampType())),
            T.StructField("by_time", T.MapType(T.StringType(), T.TimestampType())),
            T.StructField("deep", T.ArrayType(T.ArrayType(T.StringType()))),
            T.StructField("event", T.StructType([T.StructField("at", T.TimestampType())])),
        ]
    )
    more = ([UTC_TIME, UTC_TIME], [("a", UTC_TIME)], [["x"], []], {"at": UTC_TIME})
    full, null = (1, "k", *VALUES, *more), (1, "k", *NULLS[:-1], SECOND, *(None,) * 4)
    for rows in ([full], [full, full], [full, null, full], [null, full], [null]):
        [_, [[frame]]] = read(rows, schema, [0, len(rows)], (1,))
        pd.testing.assert_frame_equal(frame, as_sparks_worker(rows, schema), check_exact=True)


def as_sparks_worker(rows: list[tuple[Any, ...]], schema: T.StructType) -> pd.DataFrame:
    """The lines of pyspark's worker.py that make a key's frame; its Arrow says the zone."""
    if not hasattr(conversion, "ArrowBatchTransformer"):
        pytest.skip("PySpark 4.1 has no such lines to compare with")
    table = table_of(rows, schema).cast(pa.schema([_in_zone(f) for f in arrow_schema(schema)]))
    data = conversion.ArrowBatchTransformer.to_pandas(table, timezone=ZONE)
    return pd.DataFrame(list(pd.concat(data, axis=1).itertuples(index=False)))


def _in_zone(field: pa.Field) -> pa.Field:
    return field.with_type(pa.timestamp("us", ZONE)) if field.type == _UTC else field


_UTC = pa.timestamp("us", "UTC")


@pytest.mark.usefixtures("maker")
def test_a_null_changes_the_types_of_its_own_key_only() -> None:
    schema = T.StructType(
        [
            T.StructField("k", T.LongType()),
            T.StructField("n", T.LongType()),
            T.StructField("b", T.BooleanType()),
        ]
    )
    big = 2**60 + 1  # no float64
    rows = [(1, big, True), (2, None, True), (3, big, None), (4, None, None), (5, big, False)]
    _, read_frames = read(rows, schema, list(range(6)))
    assert [[str(d) for d in frame.dtypes] for [frame] in read_frames] == [
        ["int64", "int64", "bool"],
        ["int64", "float64", "bool"],
        ["int64", "int64", "object"],
        ["int64", "float64", "object"],
        ["int64", "int64", "bool"],
    ]
    assert [frame["n"].tolist() for [frame] in read_frames[::2]] == [[big], [big], [big]]
    assert read_frames[2][0]["b"].tolist() == [None]


def test_the_items_of_an_array_are_whole_numbers_whatever_another_key_holds() -> None:
    schema = T.StructType(
        [T.StructField("k", T.LongType()), T.StructField("a", T.ArrayType(T.LongType()))]
    )
    rows = [(1, [1, 2]), (2, [1, None]), (3, None)]
    _, [[one], [two], [three]] = read(rows, schema, [0, 1, 2, 3])
    alone = read(rows[:1], schema, [0, 1])[1][0][0]
    assert one["a"][0].dtype == alone["a"][0].dtype == np.int64
    assert two["a"][0].tolist() == [1, None]
    assert three["a"][0] is None


K_V = T.StructType([T.StructField("k", T.LongType()), T.StructField("v", T.StringType())])


@pytest.mark.usefixtures("maker")
def test_changing_a_frame_in_any_way_shows_in_no_other() -> None:
    reader = FrameReader(K_V, (0,), timezone=ZONE)
    table = table_of([(1, "a"), (1, "b"), (2, "c"), (2, "d"), (3, "e"), (3, "f")], K_V)
    _, inputs = reader.chunk(table, [0, 2, 4, 6])
    first, second = next(inputs[0]), next(inputs[1])
    for frame in (first, second):
        frame.loc[0, "v"] = "changed"
        frame["v"].values[1] = "changed"
        frame["k"] += 10
        frame["new"] = 1
        frame.index.name = "row"
        frame.columns.name = "column"
        frame.drop(columns="k", inplace=True)
    third = next(inputs[2])
    pd.testing.assert_frame_equal(third, pd.DataFrame({"k": [3, 3], "v": ["e", "f"]}))
    assert (third.index.name, third.columns.name) == (None, None)
    assert table["v"].to_pylist() == list("abcdef")


@pytest.mark.usefixtures("maker")
def test_a_kept_frame_holds_its_own_rows_only() -> None:
    schema = T.StructType([T.StructField("k", T.LongType())])
    _, [[kept], *_] = read([(n,) for n in range(1000)], schema, list(range(1001)))
    values = kept["k"].to_numpy()
    while values.base is not None:
        values = values.base
    assert values.size == 1


@pytest.mark.usefixtures("maker")
def test_a_frame_that_was_made_so_works_like_any_other() -> None:
    _, [[frame], [other]] = read([(1, "a"), (1, "b"), (1, "a"), (2, "c")], K_V, [0, 3, 4])
    assert frame.groupby("v")["k"].sum().to_dict() == {"a": 2, "b": 1}
    assert sorted(frame.merge(other, on="v", how="outer")["v"]) == ["a", "a", "b", "c"]
    assert pd.concat([frame, other], ignore_index=True)["v"].tolist() == ["a", "b", "a", "c"]
    assert [tuple(row) for row in frame.itertuples(index=False)] == [(1, "a"), (1, "b"), (1, "a")]
    assert frame.sort_values("v").reset_index(drop=True).iloc[-1].to_dict() == {"k": 1, "v": "b"}
    assert frame.assign(w=frame["k"] * 2).to_dict("list")["w"] == [2, 2, 2]
    assert frame.describe().loc["count", "k"] == 3
    assert frame.copy().equals(frame)
    assert frame.query("v == 'b'").index.tolist() == [1]


def test_an_iterator_that_is_kept_or_not_used_gives_its_own_keys_rows() -> None:
    reader = FrameReader(K_V, (0,), timezone=ZONE)
    keys, inputs = reader.chunk(table_of([(1, "a"), (2, "b"), (3, "c")], K_V), [0, 1, 2, 3])
    assert keys == [(1,), (2,), (3,)]
    assert next(inputs[2])["v"].tolist() == ["c"]
    assert next(inputs[0])["v"].tolist() == ["a"]
    assert next(inputs[0], None) is None


def test_a_key_with_more_rows_than_a_frame_holds_comes_in_several() -> None:
    rows = [(1, str(n)) for n in range(7)] + [(2, "x")]
    _, [many, [one]] = read(rows, K_V, [0, 7, 8], max_rows=3)
    assert [frame["v"].tolist() for frame in many] == [
        ["0", "1", "2"],
        ["3", "4", "5"],
        ["6"],
    ]
    assert [frame.index.tolist() for frame in many] == [[0, 1, 2], [0, 1, 2], [0]]
    assert one["v"].tolist() == ["x"]


def test_a_name_that_is_no_identifier_is_numbered_as_in_spark() -> None:
    names = ["ok", "my col", "_hidden", "class", "ok"]
    schema = T.StructType([T.StructField(name, T.LongType()) for name in names])
    assert frame_names(schema) == ["ok", "_1", "_2", "_3", "_4"]


def test_a_key_is_made_of_python_values_and_of_sparks_timestamps() -> None:
    schema = T.StructType(
        [
            T.StructField("n", T.IntegerType()),
            T.StructField("at", T.TimestampType()),
            T.StructField("s", T.StringType()),
        ]
    )
    [key, other], _ = read(
        [(1, UTC_TIME, "a"), (None, UTC_TIME, "b")], schema, [0, 1, 2], (0, 1, 2)
    )
    assert key == (1, pd.Timestamp("2024-07-01 12:00:00.000005"), "a")
    assert [type(value) for value in key] == [int, pd.Timestamp, str]
    assert other[0] is None
    reader = FrameReader(schema, (2, 0), timezone=ZONE)
    assert reader.key(table_of([(1, UTC_TIME, "a")], schema)) == ("a", 1)


def test_another_pandas_gets_frames_the_public_way() -> None:
    def broken(names: Any, columns: Any) -> Any:
        raise AttributeError("no such part")

    def wrong(names: Any, columns: Any) -> Any:
        return public_maker(list(reversed(names)), columns)

    assert choose_maker(inner_maker) is inner_maker
    assert choose_maker(broken) is public_maker
    assert choose_maker(wrong) is public_maker


# --- the operator

OUTPUT = T.StructType([T.StructField("k", T.LongType()), T.StructField("n", T.LongType())])


def groups_of(keys: list[int]) -> Groups:
    column = pa.array(keys, pa.int64())
    table = pa.table([column, pa.array([f"row {n}" for n in range(len(keys))])], ["k", "v"])
    encoded = KeyCodec(T.StructType([K_V["k"]])).encode_arrow([column])
    return group_rows(table, encoded, np.zeros(len(keys), np.uint16))


def operator(**options: Any) -> FrameOperator:
    return FrameOperator(
        uid="counter",
        cursor=KeyCursor(),
        input_schema=K_V,
        key_positions=(0,),
        output_schema=OUTPUT,
        timezone=ZONE,
        **options,
    )


def count(key: tuple[Any, ...], given: Iterator[Any]) -> Iterator[pd.DataFrame]:
    yield pd.DataFrame({"k": [key[0]], "n": [sum(len(frame) for frame in given)]})


def test_the_operator_calls_once_per_key_and_gives_what_came_back() -> None:
    keys = [3, 1, 3, 2, 1, 3, *range(10, 4000)]
    batches = list(operator().run_parts(iter([groups_of(keys)]), count))
    found = {row["k"]: row["n"] for batch in batches for row in batch.to_pylist()}
    assert found == {3: 3, 1: 2, 2: 1} | dict.fromkeys(range(10, 4000), 1)


def test_a_key_with_very_many_rows_comes_piece_by_piece() -> None:
    sizes: list[int] = []

    def call(key: tuple[Any, ...], given: Iterator[Any]) -> Iterator[pd.DataFrame]:
        for frame in given:
            sizes.append(len(frame))
            yield pd.DataFrame({"k": key[0], "n": [len(frame)]})

    [batch] = operator().run(groups_of([7] * 40_000), call)
    assert sum(sizes) == 40_000
    assert max(sizes) <= 10_000
    assert sum(batch.column("n").to_pylist()) == 40_000
