"""Sessions against a split of sorted clicks in plain Python."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from examples import sessions as example
from statebackend import ProcessorTester
from tests.examples.feeds import FAR_US, UTC, Query, Rows, flush, rows_of, through_tester, with_late

DELAY_US = 600 * 1_000_000
MINUTE_US = 60 * 1_000_000


def _truth(clicks: Rows) -> Rows:
    """The sessions of all clicks, a list of clicks each."""
    users: dict[str, Rows] = defaultdict(list)
    for row in clicks:
        users[row["user"]].append(row)
    found: list[Rows] = []
    for own in users.values():
        for row in sorted(own, key=lambda row: row["at"]):
            before = found[-1][-1] if found else None
            if (
                before is None
                or before["user"] != row["user"]
                or row["at"] - before["at"] > example.GAP_US
            ):
                found.append([])
            found[-1].append(row)
    return _sorted(
        {
            "user": some[0]["user"],
            "started": some[0]["at"],
            "ended": some[-1]["at"],
            "clicks": len(some),
            "path": " > ".join(row["page"] for row in some),
            "bought": any(row["page"] == "/thanks" for row in some),
        }
        for some in found
    )


def _sorted(rows: Any) -> Rows:
    return sorted(rows, key=lambda row: (row["user"], row["started"]))


def _tester() -> ProcessorTester:
    return ProcessorTester(
        example.ClickPaths(),
        timeMode="EventTime",
        eventTime="at",
        keySchema="user string",
        outputSchema=example.OUTPUT,
    )


def _clicks(*minutes: float) -> pa.Table:
    """Clicks of one user."""
    at = [int(minute * MINUTE_US) for minute in minutes]
    pages = [f"/{minute}" for minute in minutes]
    return pa.table({"user": ["ann"] * len(at), "at": pa.array(at).cast(UTC), "page": pages})


def test_the_sessions_are_those_of_all_clicks_that_were_not_late() -> None:
    tables = with_late(list(example.generated(files=8, rows=300)))
    with _tester() as tester:
        out, kept = through_tester(tester, tables, DELAY_US)
        assert _sorted(out) == _truth(kept)
        assert len(kept) < sum(map(len, tables)), "some were late"
        assert tester.peekListState("clicks", "user-01") == []
        assert tester.peekValueState("alarm", "user-01") is None
        assert tester.peekTimers("user-01") == []


def test_a_click_in_between_makes_one_session_of_two() -> None:
    with _tester() as tester:
        tester.testBatch(_clicks(100, 150))
        tester.testBatch(_clicks(125))
        assert tester.peekTimers("ann") == [130 * 60_000], "one timer for each key"
        (row,) = tester.setWatermark(500 * 60_000).to_pylist()
        assert (row["clicks"], row["path"]) == (3, "/100 > /125 > /150")


def test_a_session_ends_with_the_gap_and_not_before() -> None:
    with _tester() as tester:
        tester.testBatch(_clicks(100.00001))  # between two milliseconds
        assert len(tester.setWatermark(130 * 60_000)) == 0
        assert len(tester.setWatermark(130 * 60_000 + 1)) == 1


def test_the_streams_sessions_are_those_of_all_clicks(spark: SparkSession, tmp_path: Path) -> None:
    good = list(example.generated(files=5, rows=150))
    feed = [*with_late(good), flush(good[0], "user")]
    out = Query(spark, tmp_path, example.build, clicks=example.CLICKS)(feed)
    truth = _truth(rows_of(good))
    assert truth != _truth(rows_of(with_late(good))), "late rows would be seen"
    assert _sorted(row for row in out if row["user"] != "flush") == truth


def test_the_aggregates_sessions_are_those_of_all_clicks(
    spark: SparkSession, tmp_path: Path
) -> None:
    good = list(example.generated(files=4, rows=150))
    feed = [*with_late(good), flush(good[0], "user")]
    out = Query(spark, tmp_path, example.build_counts, clicks=example.CLICKS)(feed)
    found = sorted(
        (row["user"], row["window_start"], row["window_end"], row["clicks"])
        for row in out
        if row["window_start"] < FAR_US
    )
    assert found == [
        (row["user"], row["started"], row["ended"] + example.GAP_US, row["clicks"])
        for row in _truth(rows_of(good))
    ]
