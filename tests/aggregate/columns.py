"""Rows that aggregations are tried on."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st
from pyspark.sql import types as T

from statebackend.operators.aggregate.functions import count_distinct, first, last, top_k

SECOND_US = 1_000_000

SCHEMA = T.StructType(
    [
        T.StructField("k", T.DoubleType()),
        T.StructField("at", T.TimestampType()),
        T.StructField("n", T.IntegerType()),
        T.StructField("x", T.DoubleType()),
        T.StructField("d", T.DecimalType(20, 2)),
        T.StructField("s", T.StringType()),
        T.StructField("b", T.BooleanType()),
        T.StructField("seq", T.LongType()),
    ]
)

# What is asked for: output column to (column, truth, aggregation).
MERGEABLE: dict[str, tuple[str, str, Any]] = {
    "rows": ("n", "count", "count"),
    "there": ("s", "there", ("count", "s")),
    "sum_n": ("n", "sum", ("sum", "n")),
    "sum_x": ("x", "sum", ("sum", "x")),
    "sum_d": ("d", "sum", ("sum", "d")),
    "mean_n": ("n", "mean", ("mean", "n")),
    "mean_d": ("d", "mean", ("avg", "d")),
    "var_x": ("x", "variance", ("variance", "x")),
    "min_x": ("x", "min", ("min", "x")),
    "max_x": ("x", "max", ("max", "x")),
    "min_s": ("s", "min", ("min", "s")),
    "max_s": ("s", "max", ("max", "s")),
    "min_d": ("d", "min", ("min", "d")),
    "max_b": ("b", "max", ("max", "b")),
    "min_at": ("at", "min", ("min", "at")),
    "first_by": ("s", "first", first("s", by="seq")),
    "last_by": ("x", "last", last("x", by="seq")),
}
OTHERS: dict[str, tuple[str, str, Any]] = {
    "first": ("s", "first", first("s")),
    "last": ("n", "last", last("n")),
    "distinct_s": ("s", "distinct", count_distinct("s")),
    "distinct_x": ("x", "distinct", ("count_distinct", "x")),
    "top_n": ("n", "top", top_k("n", 2)),
    "top_s": ("s", "top", top_k("s", 2)),
}
ALL = MERGEABLE | OTHERS

KEYS = [0.0, 1.5, -2.0, math.nan, None]


def rows(times_s: st.SearchStrategy[int | None], *, max_size: int = 25) -> st.SearchStrategy[Any]:
    """Epochs' rows; `seq` is put in by :func:`numbered`."""
    numbers = st.sampled_from([0.0, -0.0, 1.5, -7.25, 1e6, math.nan, math.inf])
    row = st.fixed_dictionaries(
        {
            "k": st.sampled_from(KEYS[:-1]),
            "at": times_s.map(lambda s: None if s is None else s * SECOND_US),
            "n": st.none() | st.integers(-3, 3),
            "x": st.none() | numbers,
            "d": st.none() | st.integers(-(10**20) + 1, 10**20 - 1).map(_cents),
            "s": st.none() | st.sampled_from(["", "a", "b", "é", "zz"]),
            "b": st.none() | st.booleans(),
        }
    )
    return st.lists(row, max_size=max_size)


def _cents(unscaled: int) -> Decimal:
    return Decimal(unscaled).scaleb(-2)


def numbered(epochs: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Rows with their order of arrival in `seq`, and -0.0 as a key now and then."""
    seq, found = 0, []
    for some in epochs:
        made = []
        for row in some:
            key = -0.0 if row["k"] == 0.0 and seq % 2 else row["k"]
            made.append({**row, "k": key, "seq": seq})
            seq += 1
        found.append(made)
    return found
