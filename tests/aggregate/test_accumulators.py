"""Accumulators where numbers get large, small or odd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T

from statebackend.errors import ValueMismatchError
from statebackend.operators.aggregate.accumulators import Accumulator
from statebackend.operators.aggregate.aggregation_plan import plan_aggregate
from statebackend.operators.aggregate.functions import approx_count_distinct, first, last
from statebackend.operators.aggregate.row_numbers import first_rows, group_rows
from statebackend.schema.types import arrow_type

LONG_MAX = 2**63 - 1


def accumulator(asked: Any, dtype: T.DataType) -> Accumulator:
    schema = T.StructType(
        [
            T.StructField("k", T.LongType()),
            T.StructField("v", dtype),
            T.StructField("o", T.LongType()),
        ]
    )
    return plan_aggregate(schema, keys="k", aggregations={"out": asked}).accumulators[0]


def starts_of(groups: Sequence[Sequence[Any]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.cumsum([0, *map(len, groups)])


def results(asked: Any, dtype: T.DataType, groups: Sequence[Sequence[Any]]) -> list[Any]:
    """The aggregation over every group, lifted at once."""
    one = accumulator(asked, dtype)
    flat = [value for group in groups for value in group]
    columns = [pa.array(flat, arrow_type(dtype)), pa.array(range(len(flat)), pa.int64())]
    made = one.lift(columns[: len(one.inputs)], starts_of(groups))
    return one.result(made).to_pylist()


def test_a_sum_of_bigints_is_exact_up_to_its_bounds() -> None:
    groups = [[LONG_MAX], [LONG_MAX, -1], [LONG_MAX, 1, -1], [-LONG_MAX - 1], [None, 5], [None]]
    assert results(("sum", "v"), T.LongType(), groups) == [
        LONG_MAX,
        LONG_MAX - 1,
        LONG_MAX,
        -LONG_MAX - 1,
        5,
        None,
    ]


@pytest.mark.parametrize("values", [[LONG_MAX, 1], [-LONG_MAX - 1, -1], [LONG_MAX] * 3])
def test_a_sum_that_leaves_bigint_is_refused_and_never_wraps(values: list[int]) -> None:
    with pytest.raises(ValueMismatchError, match="'out' overflows"):
        results(("sum", "v"), T.LongType(), [[0], values])


@pytest.mark.parametrize("values", [(LONG_MAX, 1), (-LONG_MAX - 1, -1)])
def test_a_sum_that_leaves_bigint_when_it_meets_state_is_refused(values: tuple[int, int]) -> None:
    one = accumulator(("sum", "v"), T.LongType())
    old, new = (one.lift([pa.array([v], pa.int64())], np.array([0, 1])) for v in values)
    with pytest.raises(ValueMismatchError, match="bigint"):
        one.combine(old, new)


@given(st.lists(st.lists(st.integers(-(10**38) + 1, 10**38 - 1), min_size=1), min_size=1))
def test_sums_of_the_widest_decimals_are_exact_or_refused(groups: list[list[int]]) -> None:
    dtype = T.DecimalType(38, 0)
    given_values = [[Decimal(value) for value in group] for group in groups]
    wanted = [sum(group) for group in groups]
    if any(abs(total) >= 10**38 for total in wanted):
        with pytest.raises(ValueMismatchError, match=r"decimal\(38,0\)"):
            results(("sum", "v"), dtype, given_values)
    else:
        assert [int(v) for v in results(("sum", "v"), dtype, given_values)] == wanted


def test_variance_keeps_its_digits_far_away_from_zero() -> None:
    values = [1e9 + 4, 1e9 + 7, 1e9 + 13, 1e9 + 16]
    (found,) = results(("variance", "v"), T.DoubleType(), [values])
    assert found == 30.0
    one = accumulator(("variance", "v"), T.DoubleType())
    parts = one.lift([pa.array(values)], np.arange(5))
    (merged,) = one.result(one.merge(parts, np.array([0, 4]))).to_pylist()
    assert math.isclose(merged, 30.0, rel_tol=1e-12)


def test_variance_of_fewer_than_two_values_is_null_and_stddev_its_root() -> None:
    groups = [[1.0], [None, 2.0], [None], [1.0, 3.0], [1.0, math.nan]]
    found = results(("variance", "v"), T.DoubleType(), groups)
    assert found[:4] == [None, None, None, 2.0]
    assert math.isnan(found[4])
    assert results(("stddev", "v"), T.DoubleType(), groups)[3] == math.sqrt(2)


def test_nan_is_larger_than_every_number() -> None:
    groups = [[math.nan, math.inf], [math.nan], [None, math.nan, -1.0], [None]]
    smallest = results(("min", "v"), T.DoubleType(), groups)
    largest = results(("max", "v"), T.FloatType(), groups)
    assert smallest[0] == math.inf
    assert math.isnan(smallest[1])
    assert smallest[2:] == [-1.0, None]
    assert all(map(math.isnan, largest[:3]))
    assert largest[3] is None


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (T.ByteType(), [-128, 127]),
        (T.ShortType(), [-32768, 32767]),
        (T.LongType(), [-LONG_MAX - 1, LONG_MAX]),
        (T.BooleanType(), [False, True]),
        (T.BinaryType(), [b"", b"\xff"]),
        (T.StringType(), ["Z", "a"]),
        (T.DecimalType(38, 2), [Decimal("-1.00"), Decimal("0.01")]),
    ],
)
def test_the_least_and_the_greatest_value_of_a_type_are_found(
    dtype: T.DataType, values: list[Any]
) -> None:
    groups = [values, values[::-1], [values[0]], [None, values[1]], [None]]
    low, high = values
    assert results(("min", "v"), dtype, groups) == [low, low, low, high, None]
    assert results(("max", "v"), dtype, groups) == [high, high, low, high, None]


def test_first_and_last_take_nulls_for_values_unless_told_to_ignore_them() -> None:
    groups = [[None, 1, 2, None], [None], [3]]
    long = T.LongType()
    assert results(first("v"), long, groups) == [None, None, 3]
    assert results(last("v"), long, groups) == [None, None, 3]
    assert results(first("v", ignore_nulls=True), long, groups) == [1, None, 3]
    assert results(last("v", ignore_nulls=True), long, groups) == [2, None, 3]
    assert results(last("v", by="o", ignore_nulls=True), long, groups) == [2, None, 3]


def test_a_first_value_that_is_null_stays_the_first() -> None:
    one = accumulator(first("v"), T.LongType())
    null, value = (one.lift([pa.array([v], pa.int64())], np.array([0, 1])) for v in (None, 7))
    assert one.result(one.combine(null, value)).to_pylist() == [None]
    nothing = [pa.nulls(1, column.type) for column in value]
    assert one.result(one.combine(nothing, value)).to_pylist() == [7]


# --- approximate counts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (T.StringType(), ["", "a", "s", "", None, "a"]),
        (T.BinaryType(), [b"", b"\xff", b"\xc3\xbf", b"", None, b"\xff"]),
        (T.DoubleType(), [0.0, -0.0, math.nan, -math.nan, None, 1.5]),
        (T.DecimalType(20, 2), [Decimal("1.00"), Decimal("0.10"), Decimal("10.00"), None]),
        (T.BooleanType(), [True, False, None, True]),
    ],
)
def test_sketches_tell_few_values_apart_exactly(dtype: T.DataType, values: list[Any]) -> None:
    wanted = {T.BooleanType: 2}.get(type(dtype), 3)
    assert results(approx_count_distinct("v"), dtype, [values, [None]]) == [wanted, 0]


@pytest.mark.parametrize("rsd", [0.05, 0.02])
def test_sketches_of_many_values_err_as_little_as_was_asked_for(rsd: float) -> None:
    one = accumulator(approx_count_distinct("v", rsd=rsd), T.LongType())
    parts = np.array([0, 30_000, 60_000, 100_000])
    values = pa.array(np.arange(100_000) % 70_000)
    sketches = one.lift([values], parts)
    merged = one.merge(sketches, np.array([0, 3]))
    (found,) = one.result(merged).to_pylist()
    assert abs(found - 70_000) < 4 * rsd * 70_000
    assert one.result(one.combine(merged, merged)).to_pylist() == [found]
    assert len(merged[0][0].as_py()) < 1.1 / rsd**2 + 100


# --- groups ---------------------------------------------------------------------------------------

KEY_VALUES: dict[str, tuple[T.DataType, list[Any], int]] = {
    "doubles": (T.DoubleType(), [0.0, -0.0, math.nan, -math.nan, None, None, 1e300], 4),
    "floats": (T.FloatType(), [0.0, -0.0, math.nan, None], 3),
    "far longs": (T.LongType(), [-(2**63), 2**63 - 1, 0, None, None, 0], 4),
    "near longs": (T.LongType(), [7, 8, 7, None], 3),
    "strings": (T.StringType(), ["", None, "a", "a", ""], 3),
    "decimals": (T.DecimalType(38, 1), [Decimal("1.0"), Decimal("1.0"), None], 2),
    "booleans": (T.BooleanType(), [True, None, False, True], 3),
    "arrays": (T.ArrayType(T.DoubleType()), [[0.0], [-0.0], [], None, [None]], 4),
    "structs": (
        T.StructType([T.StructField("a", T.DoubleType())]),
        [{"a": math.nan}, {"a": -math.nan}, {"a": None}, None],
        3,
    ),
}


@pytest.mark.parametrize("kind", KEY_VALUES)
def test_groups_are_told_apart_as_keys_are(kind: str) -> None:
    dtype, values, groups = KEY_VALUES[kind]
    column = pa.array([None, *values], arrow_type(dtype)).slice(1)
    more = pa.array([1] * len(values), pa.int64())
    for columns, dtypes in (
        ([column], [dtype]),
        ([column, more], [dtype, T.LongType()]),
        ([more, column], [T.LongType(), dtype]),
    ):
        found = group_rows(columns, dtypes)
        assert found.groups == groups
        assert sorted(set(found.codes.tolist())) == list(range(groups))
        for code, row in enumerate(first_rows(found).tolist()):
            assert found.codes.tolist().index(code) == row


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 3)), max_size=40))
def test_many_columns_make_the_groups_that_tuples_make(rows: list[tuple[int, int]]) -> None:
    far = pa.array([row[0] for row in rows], pa.int64())
    near = pa.array([row[1] for row in rows], pa.int64())
    found = group_rows([far, near, far, near], [T.LongType()] * 4)
    assert found.groups == len(set(rows))
    assert len(set(zip(rows, found.codes.tolist(), strict=True))) == found.groups
    ordered = found.codes[found.order()]
    assert (np.diff(ordered) >= 0).all()
