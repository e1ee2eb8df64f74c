"""The limits that change, against the same limits, batch by batch, in plain Python."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import Row, SparkSession

from examples import changing_rules as example
from statebackend import ProcessorTester
from tests.examples.feeds import Query, Rows

Limits = dict[str, int]
KEYS = ("account", "id", "country", "cents", "over")


def _truth(payments: list[pa.Table], changes: list[pa.Table]) -> list[tuple[Any, ...]]:
    limits: Limits = {}
    found = []
    for table, change in zip(payments, changes, strict=True):
        for row in change.to_pylist():
            limits.pop(row["country"], None)
            if row["cents"] is not None:
                limits[row["country"]] = row["cents"]
        for row in table.to_pylist():
            over = row["cents"] - limits.get(row["country"], row["cents"])
            if over > 0:
                found.append((row["account"], row["id"], row["country"], row["cents"], over))
    return sorted(found)


def _alerts(rows: Rows) -> list[tuple[Any, ...]]:
    return sorted(tuple(row[name] for name in KEYS) for row in rows)


def test_payments_are_judged_by_the_limits_in_force_across_restart_and_rescale() -> None:
    payments, changes = list(example.generated()), list(example.changes())
    out: list[tuple[Any, ...]] = []
    with ProcessorTester(example.Limits(), outputSchema=example.ALERTS) as tester:
        for number, (table, change) in enumerate(zip(payments, changes, strict=True)):
            tester.testBroadcast([Row(**row) for row in change.to_pylist()])
            by_account: dict[str, list[Row]] = {}
            for row in table.to_pylist():
                by_account.setdefault(row["account"], []).append(Row(**row))
            for account, rows in by_account.items():
                out += tester.test(account, rows)
            tester.restart()
            tester.rescale(number + 1)
        lists = [tester.peekOperatorList("passed", i) for i in range(4)]
    assert sorted(row[:5] for row in out) == _truth(payments, changes)
    passed = sum(n for rows in lists for _, n in rows)
    assert passed + len(out) == sum(map(len, payments))
    assert max(map(len, lists)) - min(map(len, lists)) <= 1
    times = Counter(row[0] for row in out)
    assert {account: max(r[5] for r in out if r[0] == account) for account in times} == times


def test_the_streams_alerts_are_those_of_the_limits_in_force(
    spark: SparkSession, tmp_path: Path
) -> None:
    payments, changes = list(example.generated()), list(example.changes())
    query = Query(spark, tmp_path, example.build, payments=example.PAYMENTS, limits=example.LIMITS)
    assert _alerts(query(payments, changes)) == _truth(payments, changes)
