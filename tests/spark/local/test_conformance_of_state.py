"""What a processor sees and gives is what Spark's own engine shows it and takes.

Where we differ on purpose, docs/reference/compatibility.md says so: not asked for here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyspark
import pytest

from tests.spark.local.conformance import Both, Case
from tests.spark.local.conforming import (
    RETURNED,
    STATE_OPS,
    TYPED,
    EveryMethod,
    Initial,
    InitialInFrames,
    Keys,
    KeysInFrames,
    Returns,
    ReturnsFrames,
    Types,
    TypesInFrames,
    Versions,
)
from tests.spark.local.world import setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from tests.spark.local.world import Rows, World

# Spark 4.1 shows two kinds of column in frames otherwise than 4.2, 4.3 and we do.
ON_4_1 = pyspark.__version__.startswith("4.1.")


@pytest.fixture
def both(world: World) -> Both:
    return Both(world)


# --- state variables ----------------------------------------------------------------------------


def every_op() -> list[Rows]:
    """Every operation, forwards for one key, backwards for another, over two batches."""
    names = list(STATE_OPS)
    batches: list[Rows] = []
    for batch in range(2):
        rows: Rows = []
        for key, ops in {"a": names, "b": names[::-1], f"only {batch}": names[batch::2]}.items():
            rows += [{"k": key, "seq": i, "op": op, "n": 7 * batch + i} for i, op in enumerate(ops)]
        batches.append(rows)
    return batches


@pytest.mark.promise
def test_every_method_of_every_kind_of_state_does_as_in_spark(both: Both) -> None:
    both.run(Case("k string, seq bigint, op string, n int", EveryMethod()), every_op())
    both.agree()


def test_a_deleted_state_is_gone_for_every_key_and_may_come_again(both: Both) -> None:
    rows = [{"k": key, "id": 1} for key in "abcd"]
    for step in (
        Versions(delete="never", have="one two"),
        Versions(delete="one never", have="two three"),
        Versions(delete="three", have="one two three"),
    ):
        both.run(Case("k string, id bigint", step), [rows])
    both.agree()


# --- values and types ---------------------------------------------------------------------------

FULL = {
    "i": -3,
    "s": {"x": 1, "deep": {"y": "z"}},
    "l": [1, None],
    "ls": [{"q": 1}, None],
    "m": {"a": 1, "b": None},
    "t": "2026-01-01T23:00:00.123456Z",
    "n": "2026-07-01T00:00:00.000001",
    "d": "1969-12-31",
    "c": 1.5,
    "b": "eA==",
    "f": 0.5,
    "o": -1e300,
    "z": True,
    "y": -128,
}


@pytest.fixture
def tokyo(spark: SparkSession) -> Iterator[None]:
    """A session whose time zone is not the workers'."""
    with setting(spark, "spark.sql.session.timeZone", "Asia/Tokyo"):
        yield


def test_values_look_as_in_spark_in_rows_and_in_state(both: Both, tokyo: None) -> None:
    batches: list[Rows] = [
        [{"k": "full", "seq": 1, **FULL}, {"k": "empty", "seq": 1}],
        [{"k": "full", "seq": 2, **FULL, "s": {"deep": None}, "m": {}, "l": []}],
    ]
    both.run(Case(TYPED, Types(), keys=("k", "t")), batches)
    both.agree()


def test_frames_look_as_in_spark(both: Both, tokyo: None) -> None:
    full = FULL | ({"l": [1], "ls": [{"q": 1}], "m": {"a": 1}} if ON_4_1 else {})
    batches: list[Rows] = [
        [{"k": k, "seq": i, **full} for i, k in enumerate(("full", "full", "other"))],
        [{"k": "empty", "seq": 9}],
    ]
    both.run(Case(TYPED, TypesInFrames(), flavour="pandas"), batches)
    both.agree()


KEY_TYPES = {
    "s": "string",
    "i": "int",
    "l": "bigint",
    "z": "boolean",
    "c": "decimal(20, 4)",
    "d": "date",
    "t": "timestamp",
    "n": "timestamp_ntz",
    "o": "double",
    "b": "binary",
    "st": "struct<x: int, y: string>",
}


def test_keys_of_every_type_look_as_in_spark_and_are_found_again(both: Both, tokyo: None) -> None:
    full = {
        "s": "äß\u0000日😀",
        "i": -(2**31),
        "l": 2**63 - 1,
        "z": False,
        "c": -1.0001,
        "d": "0001-01-01",
        "t": "2026-01-01T00:00:00.000001Z",
        "n": "1900-01-01T00:00:00",
        "o": -0.0,
        "b": "AAE=",
        "st": {"x": 1, "y": None},
    }
    keys: Rows = [full, {"s": "only"}, full | {"s": ""}, full | {"st": None}]
    schema = ", ".join(f"{name} {kind}" for name, kind in KEY_TYPES.items())
    case = Case(f"{schema}, id bigint", Keys(), keys=tuple(KEY_TYPES))
    both.run(case, [[key | {"id": 1} for key in keys], [key | {"id": 2} for key in keys[::-1]]])
    both.agree()


def test_keys_of_frames_look_as_in_spark_and_are_found_again(both: Both) -> None:
    full = {"k": "x", "i": 2**31 - 1, "l": 2**53 + 1, "z": True, "d": "2026-01-01", "o": 0.5}
    keys: Rows = [full, full | {"k": None}, full | {"c": 1.25}, full | {"b": "eA=="}]
    schema = "k string, i int, l bigint, z boolean, d date, o double, c decimal(5, 2), b binary"
    case = Case(f"{schema}, id bigint", KeysInFrames(), keys=tuple("kilzdocb"), flavour="pandas")
    both.run(case, [[key | {"id": 1} for key in keys], [key | {"id": 2} for key in keys]])
    both.agree()


# --- what is returned ---------------------------------------------------------------------------


def test_rows_are_taken_as_spark_takes_them(both: Both, tokyo: None) -> None:
    ways = ["list", "nothing", "other order", "whole", "nested", "pairs", "times"]
    ways += ["made", "numpy"]
    both.run(Case("k string", Returns(), output=RETURNED), [[{"k": way} for way in ways]])
    both.agree()


def test_frames_are_made_and_taken_as_in_spark(both: Both, tokyo: None) -> None:
    ways = ["list", "nothing", "other order", "positions", "nulls", "names"]
    ways += ["extensions"]
    rows = [{"k": way} for way in ways] + [{"k": "many"}] * 10_001
    output = "k string, i int, o double, t timestamp"
    schema = "k string, `a b` int, _u int, `class` int"
    both.run(Case(schema, ReturnsFrames(), output=output, flavour="pandas"), [rows])
    both.agree()


# --- initial state ------------------------------------------------------------------------------


def given(spark: SparkSession) -> Any:
    """Keys with several rows, with one, and without input."""
    frame = spark.createDataFrame(
        [(1, "a", 0.5), (2, "a", None), (3, "b", 1.5), (4, "never", 2.5)],
        f"n {'bigint' if ON_4_1 else 'int'}, k string, o double",
    )
    return frame.selectExpr(
        "*",
        "timestamp '2026-01-01 00:00:00' + make_dt_interval(n) t",
        "named_struct('n', n, 'at', timestamp_ntz '2026-01-01 00:00:00') s",
    ).groupBy("k")


@pytest.mark.parametrize(
    ("flavour", "processor"), [("rows", Initial()), ("pandas", InitialInFrames())]
)
def test_initial_state_is_handed_over_as_in_spark(both: Both, flavour: str, processor: Any) -> None:
    case = Case("k string, id bigint", processor, flavour=flavour, initial=given)
    both.run(case, [[{"k": "a", "id": 1}, {"k": "c", "id": 2}]])
    if flavour == "rows":  # not again after a restart
        both.run(case, [[{"k": "a", "id": 4}, {"k": "b", "id": 5}]])
    both.agree()
