"""The fraud rules against the same rules, payment by payment, in plain Python."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from examples import fraud_rules as example
from statebackend import ProcessorTester
from tests.examples.feeds import UTC, Query, Rows, rows_of, through_tester, with_late

DELAY_US = 600 * 1_000_000
WINDOW_US = example.WINDOW_MS * 1000
Alerts = list[tuple[str, str, int, str]]


def _truth(payments: Rows) -> Alerts:
    """Of a burst not how many payments it had: that goes by the batches."""
    before: dict[str, Rows] = defaultdict(list)
    small: Counter[tuple[str, int]] = Counter()
    found = []
    for row in payments:
        account, at, cents = row["account"], row["at"], row["cents"]
        past = before[account]
        if len(past) >= 5 and cents * len(past) > 5 * sum(one["cents"] for one in past):
            found.append((account, "jump", at, str(cents)))
        last = past[-1] if past else row
        if last["country"] != row["country"] and abs(at - last["at"]) <= 3_600_000_000:
            found.append((account, "countries", at, f"{last['country']} > {row['country']}"))
        if cents < 200:
            window = at - at % WINDOW_US
            small[account, window] += 1
            if small[account, window] == 5:
                found.append((account, "burst", window, ""))
        past.append(row)
    return sorted(found)


def _alerts(rows: Rows) -> Alerts:
    return sorted(
        (row["account"], row["rule"], row["at"], row["detail"] * (row["rule"] != "burst"))
        for row in rows
    )


def _tester() -> ProcessorTester:
    return ProcessorTester(
        example.FraudRules(),
        timeMode="EventTime",
        eventTime="at",
        keySchema="account string",
        outputSchema=example.ALERTS,
    )


def _payments(*rows: tuple[int, int, str]) -> pa.Table:
    """Minute, cents and country of one account's payments."""
    minutes, cents, countries = zip(*rows, strict=True)
    at: Any = pa.array([minute * 60_000_000 for minute in minutes]).cast(UTC)
    columns = {"account": ["a"] * len(rows), "at": at, "cents": cents, "country": countries}
    return pa.table({name: pa.array(column) for name, column in columns.items()})


def test_the_alerts_are_those_of_all_payments_that_were_not_late() -> None:
    tables = with_late(list(example.generated(files=8)))
    with _tester() as tester:
        out, kept = through_tester(tester, tables, DELAY_US)
        truth = _truth(kept)
        assert {rule for _, rule, *_ in truth} == {"jump", "burst", "countries"}
        assert _alerts(out) == truth
        assert len(kept) < sum(map(len, tables)), "some were late"
        assert tester.peekMapState("small", "account-00") == {}
        assert tester.peekTimers("account-00") == []


def test_a_burst_is_reported_once_for_each_window() -> None:
    with _tester() as tester:
        four = _payments(*[(100 + i, 5, "DE") for i in range(4)])
        assert tester.testBatch(four).to_pylist() == []
        (alert,) = tester.testBatch(_payments((105, 5, "DE"), (106, 5, "DE"))).to_pylist()
        assert (alert["rule"], alert["detail"]) == ("burst", "6")
        assert len(tester.testBatch(_payments((107, 5, "DE")))) == 0
        assert tester.peekMapState("small", "a") == {(100 * 60_000,): (7,)}


def test_an_unknown_country_is_no_other_country() -> None:
    with _tester() as tester:
        table = _payments((1, 500, "DE"), (2, 500, ""), (3, 500, "DE"))
        table = table.set_column(3, "country", pa.array(["DE", None, "DE"]))
        assert len(tester.testBatch(table)) == 0


def test_the_streams_alerts_are_those_of_all_payments(spark: SparkSession, tmp_path: Path) -> None:
    good = list(example.generated(files=5))
    out = Query(spark, tmp_path, example.build, payments=example.PAYMENTS)(with_late(good))
    truth = _truth(rows_of(good))
    assert truth != _truth(rows_of(with_late(good))), "late rows would be seen"
    assert _alerts(out) == truth
