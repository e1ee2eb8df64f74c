"""Event time in columns: maxima, and late rows."""

from __future__ import annotations

import pyarrow as pa

from statebackend.operators.input.lateness import EventMaxima, LateRows

MOMENT = pa.timestamp("us", "UTC")


def batch(times_us: list[int | None], sides: list[int] | None = None) -> pa.RecordBatch:
    sides = sides or [0] * len(times_us)
    columns = [pa.array(sides, pa.int8()), pa.array(times_us, MOMENT)]
    return pa.RecordBatch.from_arrays(columns, names=["side", "t"])


def test_the_maximum_is_over_all_rows_rounded_down() -> None:
    seen = EventMaxima(1)
    seen.take(batch([1_999, None, 5]))
    assert seen.max_ms == 1
    seen.take(batch([None]))
    seen.take(batch([-1]))
    assert seen.max_ms == 1
    assert seen.second_ms is None


def test_a_time_before_1970_is_rounded_down_too() -> None:
    seen = EventMaxima(1)
    seen.take(batch([-1]))
    assert seen.max_ms == -1


def test_two_inputs_have_a_maximum_each() -> None:
    seen = EventMaxima(1, 0)
    seen.take(batch([9_000, 1_000, 4_000], [0, 1, 0]))
    assert (seen.max_ms, seen.second_ms) == (9, 1)
    seen.take(batch([2_000], [1]))
    assert (seen.max_ms, seen.second_ms) == (9, 2)


def test_without_a_column_nothing_is_measured() -> None:
    seen = EventMaxima()
    seen.take(batch([1]))
    assert seen.max_ms is None


def test_rows_at_the_watermark_are_late_and_rows_without_a_time_never() -> None:
    late = LateRows(1, 5)
    table = pa.Table.from_batches([batch([5_000, 5_001, None, 4_999])])
    kept = table.filter(late.mask(table))
    assert kept.column("t").cast(pa.int64()).to_pylist() == [5_001, None]
    assert late.dropped == 2
    assert late.mask(kept) is None
    assert late.keep(table).num_rows == 2
    assert late.dropped == 2, "keep() leaves out what was counted"
