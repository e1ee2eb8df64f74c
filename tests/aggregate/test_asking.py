"""What cannot be aggregated is refused at the call, saying what does not fit; types are Spark's."""

from __future__ import annotations

import datetime
import pickle
import sys
from typing import Any

import pytest
from pyspark.sql import types as T

from statebackend.errors import (
    EnvironmentMissingError,
    SchemaError,
    SettingError,
    StateBackendError,
    UnsupportedTypeError,
)
from statebackend.operators.aggregate.aggregation_plan import AggregatePlan, plan_aggregate
from statebackend.operators.aggregate.functions import (
    approx_count_distinct,
    count_distinct,
    first,
    last,
    top_k,
)
from statebackend.operators.aggregate.partial_aggregation import PartialAggregation
from statebackend.operators.aggregate.processor_for_plan import processor_for
from statebackend.operators.aggregate.windows import Window, session, sliding, tumbling

SCHEMA = T.StructType(
    [
        T.StructField("user", T.StringType()),
        T.StructField("at", T.TimestampType()),
        T.StructField("n", T.IntegerType()),
        T.StructField("x", T.FloatType()),
        T.StructField("d", T.DecimalType(12, 2)),
        T.StructField("big", T.DecimalType(38, 4)),
        T.StructField("tags", T.ArrayType(T.StringType())),
        T.StructField("meta", T.MapType(T.StringType(), T.StringType())),
        T.StructField("pair", T.StructType([T.StructField("a", T.LongType())])),
    ]
)


def plan(aggregations: Any, keys: Any = "user", **how: Any) -> AggregatePlan:
    return plan_aggregate(SCHEMA, keys=keys, aggregations=aggregations, **how)


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ("count", "bigint"),
        (("count", "*"), "bigint"),
        (("count", "meta"), "bigint"),
        (("sum", "n"), "bigint"),
        (("sum", "x"), "double"),
        (("sum", "d"), "decimal(22,2)"),
        (("sum", "big"), "decimal(38,4)"),
        (("mean", "n"), "double"),
        (("avg", "d"), "double"),
        (("variance", "x"), "double"),
        (("stddev", "d"), "double"),
        (("min", "at"), "timestamp"),
        (("max", "user"), "string"),
        (("max", "big"), "decimal(38,4)"),
        (first("tags"), "array<string>"),
        (last("meta", by="at"), "map<string,string>"),
        (("count_distinct", "user"), "bigint"),
        (count_distinct("user", "tags"), "bigint"),
        (approx_count_distinct("user"), "bigint"),
        (top_k("n", 3), "array<struct<value:int,count:bigint>>"),
    ],
)
def test_results_have_the_type_that_spark_would_give_them(asked: Any, wanted: str) -> None:
    made = plan({"out": asked})
    assert made.output_schema["out"].dataType.simpleString() == wanted
    assert made.output_schema.names == ["user", "out"]


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({}, SettingError, "aggregations="),
        ("count", SettingError, "aggregations="),
        ({"n": 3}, SettingError, "'n' is 3"),
        ({"n": ()}, SettingError, "'n' is ()"),
        ({"": "count"}, SettingError, "named ''"),
        ({"n": "median"}, SettingError, "'median'"),
        ({"n": ("sum",)}, SettingError, "0 columns"),
        ({"n": ("sum", "n", "x")}, SettingError, "2 columns"),
        ({"n": ("sum", "amount")}, SchemaError, "'amount'"),
        ({"n": ("sum", "user")}, SchemaError, "type string"),
        ({"n": ("mean", "at")}, SchemaError, "type timestamp"),
        ({"n": ("min", "tags")}, SchemaError, "type array<string>"),
        ({"n": ("variance", "user")}, SchemaError, "type string"),
        ({"n": first("user", by="meta")}, SchemaError, "by="),
        ({"n": first("user", by="when")}, SchemaError, "'when'"),
        ({"n": count_distinct("meta")}, UnsupportedTypeError, "meta"),
        ({"n": count_distinct("n", "n")}, SchemaError, "twice"),
        ({"n": top_k("pair", 3)}, SchemaError, "struct<a:bigint>"),
        ({"n": top_k("n", 0)}, SettingError, "0 values"),
        ({"n": top_k("n", True)}, SettingError, "True values"),
        ({"n": approx_count_distinct("user", rsd=0.5)}, SettingError, "rsd=0.5"),
        ({"n": approx_count_distinct("user", rsd=0.0)}, SettingError, "rsd=0.0"),
        ({"user": "count"}, SchemaError, "'user'"),
        ({"User": "count"}, SchemaError, "'User'"),
        ({"n": "count", "N": "count"}, SchemaError, "'N'"),
    ],
)
def test_what_cannot_be_aggregated_is_refused_with_its_name(
    asked: Any, error: type[StateBackendError], said: str
) -> None:
    with pytest.raises(error) as caught:
        plan(asked)
    assert said in caught.value.what
    assert caught.value.todo


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ({"keys": "who"}, SchemaError, "'who'"),
        ({"keys": ()}, SchemaError, "empty"),
        ({"keys": "meta"}, UnsupportedTypeError, "meta"),
        ({"emit": "closed"}, SettingError, "without a window"),
        ({"emit": "always"}, SettingError, "'always'"),
        ({"event_time": "at"}, SettingError, "without a window"),
        ({"window": tumbling("1 minute")}, SettingError, "no event_time="),
        ({"window": "1 minute", "event_time": "at"}, SettingError, "'1 minute'"),
        ({"window": tumbling("1 minute"), "event_time": "when"}, SchemaError, "'when'"),
        ({"window": tumbling("1 minute"), "event_time": "n"}, SchemaError, "type int"),
    ],
)
def test_keys_and_times_that_do_not_fit_are_refused(
    how: dict[str, Any], error: type[StateBackendError], said: str
) -> None:
    with pytest.raises(error) as caught:
        plan({"c": "count"}, **how)
    assert said in caught.value.what


def test_a_windows_columns_stand_behind_the_keys_and_their_names_are_taken() -> None:
    how: dict[str, Any] = {"window": tumbling("1 hour"), "event_time": "at"}
    assert plan({"c": "count"}, **how).output_schema.names == [
        "user",
        "window_start",
        "window_end",
        "c",
    ]
    with pytest.raises(SchemaError, match="window_end"):
        plan({"window_end": "count"}, **how)


@pytest.mark.parametrize(
    ("window", "wanted"),
    [
        (tumbling("10 minutes"), Window("tumbling", 600_000_000, 600_000_000)),
        (tumbling("1 hour 30 minutes"), Window("tumbling", 5_400_000_000, 5_400_000_000)),
        (tumbling("INTERVAL 2 Days"), Window("tumbling", 172_800_000_000, 172_800_000_000)),
        (
            tumbling(datetime.timedelta(seconds=3), offset="-1 second"),
            Window("tumbling", 3_000_000, 3_000_000, 2_000_000),
        ),
        (sliding("10 seconds", "4 seconds"), Window("sliding", 10_000_000, 4_000_000)),
        (session("30 seconds"), Window("session", 30_000_000, 30_000_000)),
    ],
)
def test_intervals_are_read_as_spark_reads_them(window: Window, wanted: Window) -> None:
    assert window == wanted


@pytest.mark.parametrize("text", ["", "10", "ten minutes", "1 month", "5 m", "-1 second", "0 s", 7])
def test_intervals_that_are_none_are_refused(text: Any) -> None:
    with pytest.raises(SettingError, match="duration"):
        tumbling(text)


@pytest.mark.parametrize("text", ["1 microsecond", "1500 microseconds"])
def test_a_window_is_a_whole_number_of_milliseconds(text: str) -> None:
    with pytest.raises(SettingError, match="duration"):
        tumbling(text)


def test_a_slide_is_not_longer_than_its_window() -> None:
    with pytest.raises(SettingError, match="slide"):
        sliding("5 minutes", "10 minutes")


def test_without_the_library_of_sketches_the_call_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasketches", None)
    with pytest.raises(EnvironmentMissingError, match=r"install '\.\[sketches\]"):
        plan({"n": approx_count_distinct("user")})


@pytest.mark.parametrize(
    ("asked", "window", "wanted"),
    [
        ({"c": "count", "s": ("sum", "n"), "a": approx_count_distinct("user")}, None, True),
        ({"f": first("n", by="at")}, None, True),
        ({"f": first("n")}, None, False),
        ({"c": "count", "d": count_distinct("n")}, None, False),
        ({"c": "count"}, tumbling("1 hour"), True),
        ({"c": "count"}, sliding("1 hour", "25 minutes"), True),
        ({"c": "count"}, session("1 hour"), False),
    ],
)
def test_only_what_merges_in_any_order_may_be_aggregated_before_the_shuffle(
    asked: Any, window: Window | None, wanted: bool
) -> None:
    event_time = None if window is None else "at"
    assert plan(asked, window=window, event_time=event_time).can_be_partial is wanted


def test_plans_and_what_runs_them_can_be_pickled() -> None:
    asked = {"c": "count", "s": ("sum", "d"), "m": ("max", "user"), "l": last("n", by="at")}
    made = plan(asked, window=sliding("1 hour", "20 minutes"), event_time="at")
    early = pickle.loads(pickle.dumps(PartialAggregation(made)))
    assert early.plan.output_schema == made.output_schema
    processor = pickle.loads(pickle.dumps(processor_for(made, partial=True)))
    assert processor.plan.partial_schema == made.partial_schema
