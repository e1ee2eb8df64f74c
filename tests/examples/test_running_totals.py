"""Running totals against sums in plain Python."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from examples import running_totals as example
from statebackend import ProcessorTester
from tests.examples.feeds import Query, Rows, rows_of


def _truth(payments: Rows) -> Rows:
    """Every payment with the number and the sum of the account's payments up to it."""
    count: dict[str, int] = defaultdict(int)
    balance: dict[str, int] = defaultdict(int)
    rows = []
    for row in payments:
        count[row["account"]] += 1
        balance[row["account"]] += row["cents"] or 0
        rows.append({**row, "payments": count[row["account"]], "balance": balance[row["account"]]})
    return rows


def _by_id(rows: Rows) -> Rows:
    return sorted(rows, key=lambda row: row["id"])


@pytest.fixture
def tester() -> ProcessorTester:
    return ProcessorTester(
        example.RunningTotals(), keySchema="account string", outputSchema=example.OUTPUT
    )


def test_each_payment_comes_out_with_the_balance_after_it(tester: ProcessorTester) -> None:
    tables = list(example.generated(files=5, rows=300))
    with tester:
        out = []
        for table in tables:
            out.append(tester.testBatch(table))
            tester.restart()
        assert _by_id(rows_of(out)) == _truth(rows_of(tables))
        assert tester.peekValueState("totals", "nobody") is None


def test_an_amount_that_is_missing_counts_as_a_payment_of_nothing(tester: ProcessorTester) -> None:
    table = pa.table({"account": ["a", "a"], "id": [1, 2], "cents": pa.array([None, 5])})
    with tester:
        assert _by_id(tester.testBatch(table).to_pylist()) == _truth(table.to_pylist())


def test_an_account_that_is_quiet_for_a_year_starts_anew(tester: ProcessorTester) -> None:
    table = pa.table({"account": ["a"], "id": [1], "cents": [7]})
    with tester:
        tester.testBatch(table)
        tester.setProcessingTime(example.QUIET_MS - 1)
        assert tester.testBatch(table).column("balance").to_pylist() == [14]
        tester.setProcessingTime(2 * example.QUIET_MS)
        assert tester.testBatch(table).column("balance").to_pylist() == [7]


def test_the_streams_balances_are_those_of_all_payments(
    spark: SparkSession, tmp_path: Path
) -> None:
    tables = list(example.generated(files=4, rows=200))
    out = Query(spark, tmp_path, example.build, payments=example.PAYMENTS)(tables)
    assert _by_id(out) == _truth(rows_of(tables))


def test_the_aggregates_last_rows_are_the_totals_of_all_payments(
    spark: SparkSession, tmp_path: Path
) -> None:
    tables = list(example.generated(files=2, rows=200))
    out = Query(spark, tmp_path, example.build_totals, payments=example.PAYMENTS)(tables)
    last = {row["account"]: row for row in sorted(out, key=lambda row: row["payments"])}
    truth = {row["account"]: row for row in _truth(rows_of(tables))}
    assert last == {
        account: {key: row[key] for key in ("account", "payments", "balance")}
        for account, row in truth.items()
    }
