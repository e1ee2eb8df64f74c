"""Before the shuffle: memory stays bounded, grouping is given up where it does not pay."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from statebackend.operators.aggregate.aggregation_plan import EVENT_MAX, PANE, ROWS, plan_aggregate
from statebackend.operators.aggregate.partial_aggregation import PartialAggregation
from statebackend.operators.aggregate.windows import sliding, tumbling
from statebackend.operators.input.lateness import EventMaxima

SCHEMA = T.StructType(
    [
        T.StructField("k", T.LongType()),
        T.StructField("at", T.TimestampType()),
        T.StructField("v", T.LongType()),
    ]
)
COUNT = plan_aggregate(SCHEMA, keys="k", aggregations={"n": "count", "s": ("sum", "v")})


def batches(keys: Any, size: int = 100) -> list[pa.RecordBatch]:
    columns = [
        pa.array(keys, pa.int64()),
        pa.array(keys, pa.int64()).cast(pa.timestamp("us", "UTC")),
        pa.array([1] * len(keys), pa.int64()),
    ]
    whole = pa.RecordBatch.from_arrays(columns, names=SCHEMA.names)
    return [whole.slice(start, size) for start in range(0, len(keys), size)]


def counted(partials: list[pa.RecordBatch]) -> Counter[int]:
    found: Counter[int] = Counter()
    for partial in partials:
        for key, count in zip(
            partial.column("k").to_pylist(), partial.column("__acc_0_0").to_pylist(), strict=True
        ):
            found[key] += count
    return found


def test_a_task_hands_on_one_row_for_each_group_if_they_are_few() -> None:
    keys = np.arange(10_000) % 50
    made = list(PartialAggregation(COUNT, rows_max=1000)(iter(batches(keys))))
    assert sum(batch.num_rows for batch in made) == 50
    assert counted(made) == Counter(keys.tolist())
    assert made[0].schema.names == COUNT.partial_schema.names


def test_groups_are_handed_on_before_they_are_too_many() -> None:
    keys = np.repeat(np.arange(5_000), 2)
    run = PartialAggregation(COUNT, rows_max=200, groups_max=300)(iter(batches(keys)))
    taken = 0

    def watched() -> Any:
        nonlocal taken
        for batch in batches(keys):
            taken += batch.num_rows
            yield batch

    most = 0
    made = []
    for batch in PartialAggregation(COUNT, rows_max=200, groups_max=300)(watched()):
        made.append(batch)
        most = max(most, taken // 2 - sum(b.num_rows for b in made[:-1]))
    assert most <= 700, "groups in hand"
    assert counted(made) == counted(list(run)) == Counter(keys.tolist())


def test_rows_that_do_not_group_are_lifted_one_by_one_and_grouping_is_tried_again() -> None:
    alone, together = np.arange(8_500), np.zeros(4_000, np.int64)
    keys = np.concatenate([alone, together])
    made = list(PartialAggregation(COUNT, rows_max=500)(iter(batches(keys))))
    assert counted(made) == Counter(keys.tolist())
    assert sum(batch.num_rows for batch in made) == 8_500


def test_groups_are_handed_on_before_they_are_too_large() -> None:
    schema = T.StructType().add("k", "long").add("s", "string")
    plan = plan_aggregate(schema, keys="k", aggregations={"n": "count", "s": ("max", "s")})
    size_bytes, bytes_max = 1_000, 100_000
    taken = 0

    def watched() -> Any:
        nonlocal taken
        for first in range(0, 2_000, 10):
            keys = np.repeat(np.arange(first, first + 10), 2)
            texts = [f"{key}".ljust(size_bytes) for key in keys]
            taken += 10 * size_bytes
            yield pa.RecordBatch.from_arrays([pa.array(keys), pa.array(texts)], ["k", "s"])

    made, most = [], 0
    for batch in PartialAggregation(plan, rows_max=20, bytes_max=bytes_max)(watched()):
        most = max(most, taken - sum(b.nbytes for b in made))
        made.append(batch)
    assert most <= 1.5 * bytes_max, "groups in hand"
    assert counted(made) == Counter(dict.fromkeys(range(2_000), 2))


def test_no_rows_make_no_partials() -> None:
    assert list(PartialAggregation(COUNT)(iter([]))) == []
    assert list(PartialAggregation(COUNT)(iter(batches([1])[0:0]))) == []
    assert list(PartialAggregation(COUNT)(iter([batches([1])[0].slice(0, 0)]))) == []


@pytest.mark.parametrize("window", [tumbling("1 second"), sliding("10 seconds", "4 seconds")])
def test_the_largest_event_time_goes_through_the_shuffle(window: Any) -> None:
    plan = plan_aggregate(
        SCHEMA, keys="k", aggregations={"n": "count"}, window=window, event_time="at"
    )
    keys = np.array([5, 1_700_000, 3, 4_000_001, 900_000])
    (made,) = PartialAggregation(plan)(iter(batches(keys)))
    position = plan.partial_schema.names.index(EVENT_MAX)
    maxima = EventMaxima(position)
    maxima.take(made)
    assert maxima.max_ms == 4_000
    assert sum(made.column(ROWS).to_pylist()) == 5
    panes = made.column(PANE).cast(pa.int64()).to_pylist()
    step = 1_000_000 if window.kind == "tumbling" else 2_000_000
    assert all(pane % step == 0 for pane in panes)


def test_other_layouts_of_the_same_types_are_taken() -> None:
    schema = T.StructType([T.StructField("k", T.StringType()), T.StructField("v", T.LongType())])
    plan = plan_aggregate(schema, keys="k", aggregations={"n": ("sum", "v")})
    batch = pa.RecordBatch.from_arrays(
        [pa.array(["a", "b", "a"], pa.large_string()), pa.array([1, 2, 3], pa.int32())],
        names=["k", "v"],
    )
    (made,) = PartialAggregation(plan)(iter([batch]))
    assert sorted(made.to_pylist(), key=lambda row: row["k"]) == [
        {"k": "a", "__acc_0_0": 4},
        {"k": "b", "__acc_0_0": 2},
    ]
