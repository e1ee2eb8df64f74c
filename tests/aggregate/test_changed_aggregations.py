"""Another aggregation on restart: new ones begin, others go; one name keeps one meaning."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import types as T

from statebackend.errors import StateMismatchError, ValueMismatchError
from statebackend.operators.aggregate.aggregation_plan import AggregatePlan, plan_aggregate
from statebackend.operators.aggregate.functions import (
    approx_count_distinct,
    count_distinct,
    first,
    last,
    top_k,
)
from statebackend.operators.aggregate.windows import Window, session, sliding, tumbling
from tests.aggregate.engine import Job

MINUTE_US = 60_000_000
CENTS = T.DecimalType(10, 2)


def plan(v: T.DataType | None = None, **aggregations: Any) -> AggregatePlan:
    """Of columns k, v (bigint, if nothing is said) and w."""
    schema = T.StructType().add("k", "long").add("v", v or T.LongType()).add("w", "long")
    return plan_aggregate(schema, keys="k", aggregations=aggregations)


def ran(made: AggregatePlan, *values: Any) -> Job:
    job = Job(made)
    job.run([{"k": 1, "v": value, "w": 7} for value in values])
    return job


def shown(job: Job, value: Any) -> dict[str, Any]:
    (row,) = job.run([{"k": 1, "v": value, "w": 2}])
    del row["k"]
    return row


def test_a_new_aggregation_begins_with_nothing_and_others_go_on() -> None:
    job = ran(plan(n="count", total=("sum", "v")), 10, 20)
    job = job.restarted(plan(total=("sum", "v"), most=("max", "w"), seen=("mean", "v")))
    assert shown(job, 1) == {"total": 31, "most": 2, "seen": 1.0}


def test_a_renamed_output_column_is_a_new_aggregation() -> None:
    job = ran(plan(n="count", total=("sum", "v")), 10, 20)
    job = job.restarted(plan(n="count", sum=("sum", "v")))
    assert shown(job, 1) == {"n": 3, "sum": 1}
    # And so is one that comes back.
    job = job.restarted(plan(n="count", total=("sum", "v")))
    assert shown(job, 1) == {"n": 4, "total": 1}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (("sum", "v"), ("sum", "w"), r"sum\(v\) as bigint.*sum\(w\) as bigint"),
        (("sum", "v"), ("min", "v"), r"sum\(v\) as bigint.*min\(v\)"),
        (("sum", "v"), ("mean", "v"), r"sum\(v\) as bigint.*mean\(v\)"),
        (("min", "v"), ("max", "v"), r"min\(v\).*max\(v\)"),
        (count_distinct("v"), count_distinct("w"), r"count_distinct\(v\)"),
        (count_distinct("v"), count_distinct("v", "w"), "count_distinct|The map key"),
        (top_k("v", 2), top_k("v", 3), r"top_k\(v, 2\).*top_k\(v, 3\)|count"),
        (top_k("v", 2), top_k("w", 2), r"top_k\(v, 2\)"),
        (first("v"), last("v"), r"first\(v\).*last\(v\)"),
        (first("v"), first("v", by="w"), r"first\(v by w\)"),
        (first("v"), first("v", ignore_nulls=True), "without nulls"),
        (last("v", by="w", ignore_nulls=True), last("v", by="w"), "without nulls"),
        (
            approx_count_distinct("v", rsd=0.05),
            approx_count_distinct("v", rsd=0.01),
            "512 registers.*16384 registers",
        ),
    ],
)
def test_one_name_cannot_come_to_mean_something_else(before: Any, after: Any, said: str) -> None:
    job = ran(plan(n="count", out=before), 10)
    with pytest.raises(StateMismatchError, match=said):
        job.restarted(plan(n="count", out=after))
    job = job.restarted(plan(n="count", out=before))
    assert shown(job, 11)["n"] == 2, "it goes on as it was"


def test_the_refusal_says_that_a_new_name_would_do() -> None:
    job = ran(plan(out=("sum", "v")), 10)
    with pytest.raises(StateMismatchError, match="what is new a name of its own: it begins with"):
        job.restarted(plan(out=("sum", "w")))
    assert shown(job.restarted(plan(out=("sum", "v"), other=("sum", "w"))), 1)["out"] == 11


# --- the type of an input ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        ("sum", T.LongType(), T.DecimalType(38, 2)),
        ("mean", T.LongType(), CENTS),
        ("mean", CENTS, T.DoubleType()),
        ("sum", T.LongType(), T.DoubleType()),
        ("sum", CENTS, T.DecimalType(10, 4)),
        ("mean", CENTS, T.DecimalType(12, 4)),
        ("approx_count_distinct", CENTS, T.DecimalType(12, 4)),
        ("approx_count_distinct", T.LongType(), T.StringType()),
    ],
)
def test_an_input_whose_old_sums_would_be_read_as_something_else_is_refused(
    function: str, before: T.DataType, after: T.DataType
) -> None:
    job = ran(plan(before, n="count", out=(function, "v")))
    with pytest.raises(StateMismatchError, match=rf"{function}\(v\)"):
        job.restarted(plan(after, n="count", out=(function, "v")))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (T.LongType(), T.StringType()),
        (T.StringType(), T.LongType()),
        (T.LongType(), T.DecimalType(19, 0)),
        (T.DecimalType(18, 0), T.DecimalType(20, 0)),
    ],
)
def test_an_extreme_is_not_lost_where_its_new_type_is_kept_in_another_state(
    before: T.DataType, after: T.DataType
) -> None:
    some = {"n": "count", "text": ("max", "s")}

    def made(v: T.DataType, **more: Any) -> AggregatePlan:
        schema = T.StructType().add("k", "long").add("v", v).add("s", "string")
        return plan_aggregate(schema, keys="k", aggregations={**some, **more})

    job = Job(made(before, least=("min", "v")))
    job.run([{"k": 1, "s": "a"}])
    with pytest.raises(StateMismatchError, match=r"min\(v\).*would begin with nothing"):
        job.restarted(made(after, least=("min", "v")))
    # Dropped, it may come back as anything.
    job.run([{"k": 1, "s": "a"}, {"k": 2, "s": "a"}])
    job = job.restarted(made(before))
    job.run([{"k": 1, "s": "a"}])
    job = job.restarted(made(after, least=("min", "v")))
    found = job.run([{"k": 1, "s": "b"}, {"k": 2, "s": "b"}])
    assert [(row["n"], row["text"], row["least"]) for row in found] == [
        (4, "b", None),
        (2, "b", None),
    ]


def test_an_input_may_be_widened_where_nothing_stored_is_read_otherwise() -> None:
    every = {f: (f, "v") for f in ("sum", "min", "max", "mean", "variance")}
    job = ran(plan(T.IntegerType(), **every), 1, 2).restarted(plan(T.LongType(), **every))
    assert shown(job, 1 << 40)["sum"] == 3 + (1 << 40)
    job = ran(plan(T.FloatType(), **every), 0.5, 2.5).restarted(plan(T.DoubleType(), **every))
    row = shown(job, 6.0)
    assert (row["sum"], row["min"], row["max"], row["mean"]) == (9.0, 0.5, 6.0, 3.0)
    job = ran(plan(CENTS, **every), Decimal("1.25"))
    job = job.restarted(plan(T.DecimalType(12, 2), **every))
    assert shown(job, Decimal("2.00"))["sum"] == Decimal("3.25")


def test_a_sum_that_a_smaller_decimal_cannot_say_is_refused_and_not_shown() -> None:
    wide, narrow = T.DecimalType(30, 0), T.DecimalType(3, 0)
    asked: dict[str, Any] = {"window": tumbling("1 minute"), "event_time": "at", "emit": "closed"}

    def made(v: T.DataType) -> AggregatePlan:
        schema = T.StructType().add("k", "long").add("v", v).add("at", "timestamp")
        return plan_aggregate(schema, keys="k", aggregations={"s": ("sum", "v")}, **asked)

    job = Job(made(wide))
    job.run([{"k": 1, "v": Decimal(10**25), "at": 0}])
    with pytest.raises(ValueMismatchError, match="decimal\\(13,0\\)"):
        job.restarted(made(narrow)).run([], watermark_ms=10**9)


def test_what_spark_says_of_nulls_may_change_from_plan_to_plan() -> None:
    inner = T.StructType().add("x", "long")
    strict = T.StructType([T.StructField("x", T.LongType(), nullable=False)])
    every = {"f": first("v"), "l": last("v"), "b": first("v", by="w")}

    def of(item: T.StructType, *, nulls: bool) -> AggregatePlan:
        return plan(T.ArrayType(item, containsNull=nulls), **every)

    job = ran(of(inner, nulls=True), [{"x": 1}]).restarted(of(strict, nulls=False))
    assert shown(job, [{"x": 2}])["l"] == [{"x": 2}]
    job = job.restarted(of(inner, nulls=True))
    assert shown(job, [None])["f"] == [{"x": 1}]
    assert shown(job, [None])["l"] == [None]


# --- windows ----------------------------------------------------------------------------------


def windowed(window: Window) -> AggregatePlan:
    schema = T.StructType().add("k", "long").add("at", "timestamp").add("v", "string")
    asked = {"n": "count", "d": count_distinct("v")}
    return plan_aggregate(
        schema, keys="k", aggregations=asked, window=window, event_time="at", emit="closed"
    )


def test_windows_of_another_length_or_kind_need_another_uid() -> None:
    job = Job(windowed(tumbling("10 minutes")))
    job.run([{"k": 1, "at": 8 * MINUTE_US, "v": "a"}])
    for other in (tumbling("5 minutes"), sliding("10 minutes", "5 minutes")):
        with pytest.raises(StateMismatchError, match="tumbling windows of 600000 ms") as caught:
            job.restarted(windowed(other))
        assert "give the operator a new uid" in str(caught.value)
        assert "deleteIfExists" not in str(caught.value)  # its user declares no state
    assert len(job.restarted(windowed(tumbling("600 seconds"))).run([], 10**9)) == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (sliding("10 minutes", "5 minutes"), sliding("10 minutes", "2 minutes")),
        (tumbling("10 minutes"), tumbling("10 minutes", offset="3 minutes")),
        (session("10 minutes"), session("1 minute")),
    ],
)
def test_what_is_open_is_closed_in_its_time_after_another_slide_offset_or_gap(
    before: Window, after: Window
) -> None:
    job = Job(windowed(before))
    job.run([{"k": 1, "at": 8 * MINUTE_US, "v": value} for value in "aba"])
    job = job.restarted(windowed(after))
    job.run([{"k": 1, "at": 8 * MINUTE_US, "v": "c"}])
    closed = job.run([], watermark_ms=10**9)
    assert max((row["n"], row["d"]) for row in closed) in {(4, 3), (3, 2)}
    assert job.entries() == 0
