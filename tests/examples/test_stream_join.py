"""The join against a loop over all pairs in plain Python."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from examples import stream_join as example
from statebackend import ProcessorTester
from tests.examples.feeds import UTC, Query, Rows, flush, rows_of, through_tester, with_late

DELAY_US = 300 * 1_000_000
Pairs = list[tuple[str, str, int, int, int]]


def _truth(impressions: Rows, clicks: Rows) -> Pairs:
    """Every impression with every click up to ten minutes after it."""
    by_key: dict[tuple[str, str], Rows] = defaultdict(list)
    for click in clicks:
        by_key[click["user"], click["ad"]].append(click)
    return sorted(
        (*key, shown["id"], click["id"], click["at"])
        for shown in impressions
        for key in [(shown["user"], shown["ad"])]
        for click in by_key[key]
        if 0 <= click["at"] - shown["at"] <= example.BOUND_US
    )


def _pairs(rows: Rows) -> Pairs:
    return sorted(tuple(row.values()) for row in rows)  # type: ignore[misc]


def _both(impressions: pa.Table, clicks: pa.Table) -> pa.Table:
    """As the union in `build`, in any order."""
    sides = [
        table.append_column("click", pa.repeat(pa.scalar(click), len(table)))
        for table, click in ((clicks, True), (impressions, False))
    ]
    return pa.concat_tables(sides)


def _tester() -> ProcessorTester:
    return ProcessorTester(
        example.ClicksOfImpressions(),
        timeMode="EventTime",
        eventTime="at",
        keySchema="user string, ad string",
        outputSchema=example.OUTPUT,
    )


def _rows(click: bool, *at_us: int) -> pa.Table:
    count = len(at_us)
    columns = {"id": list(at_us), "user": ["ann"] * count, "ad": ["x"] * count}
    return pa.table(
        {**columns, "at": pa.array(at_us, pa.int64()).cast(UTC), "click": [click] * count}
    )


def test_the_pairs_are_those_of_all_rows_that_were_not_late() -> None:
    shown = with_late(list(example.generated(1, files=8)))
    clicked = with_late(list(example.generated(2, files=8, rows=150)))
    with _tester() as tester:
        tables = [_both(*some) for some in zip(shown, clicked, strict=True)]
        out, kept = through_tester(tester, tables, DELAY_US)
        truth = _truth(
            [row for row in kept if not row["click"]], [row for row in kept if row["click"]]
        )
        assert len(truth) > 100
        assert _pairs(out) == truth
        assert len(kept) < sum(map(len, tables)), "some were late"
        for state in ("shown", "clicked"):
            assert tester.peekMapState(state, ("user-01", "ad-1")) == {}
        assert tester.peekTimers(("user-01", "ad-1")) == []


def test_both_bounds_count_and_nothing_beyond_them() -> None:
    start, end = 1_000_000_000, 1_000_000_000 + example.BOUND_US
    with _tester() as tester:
        clicks = _rows(True, start - 1, start, end, end + 1)
        first = tester.testBatch(pa.concat_tables([clicks, _rows(False, start)]))
        assert first.column("click").to_pylist() == [start, end]
        assert len(tester.testBatch(_rows(True, end + 2))) == 0


def test_state_goes_when_no_row_can_match_it_any_more() -> None:
    start = 1_000_000_001  # an impression is needed to the microsecond
    end_ms = (start + example.BOUND_US) // 1000
    with _tester() as tester:
        tester.testBatch(pa.concat_tables([_rows(False, start), _rows(True, start)]))
        tester.setWatermark(end_ms)
        assert tester.peekMapState("shown", ("ann", "x")) == {(start, start): (True,)}
        assert tester.peekMapState("clicked", ("ann", "x")) == {}
        assert len(tester.testBatch(_rows(True, start + example.BOUND_US))) == 1
        tester.setWatermark(end_ms + 1)
        assert tester.peekMapState("shown", ("ann", "x")) == {}


def test_the_streams_pairs_are_those_of_all_rows(spark: SparkSession, tmp_path: Path) -> None:
    shown = list(example.generated(1, files=5, rows=200))
    clicked = list(example.generated(2, files=5, rows=200))
    query = Query(spark, tmp_path, example.build, impressions=example.ROWS, clicks=example.ROWS)
    # A click alone is far ahead: it matches nothing.
    ends = (shown[0].slice(0, 0), flush(clicked[0], "user"))
    out = query([*with_late(shown), ends[0]], [*with_late(clicked), ends[1]])
    truth = _truth(rows_of(shown), rows_of(clicked))
    assert len(truth) > 50
    everything = _truth(rows_of(with_late(shown)), rows_of(with_late(clicked)))
    assert truth != everything, "late rows would be seen"
    assert _pairs(out) == truth
