"""Deduplication against a set in plain Python."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from examples import deduplication as example
from statebackend import ProcessorTester
from tests.examples.feeds import Query, Rows, rows_of


def _truth(events: Rows) -> Rows:
    """The first row of each id."""
    first: dict[str, dict[str, str]] = {}
    for row in events:
        first.setdefault(row["id"], row)
    return sorted(first.values(), key=lambda row: row["id"])


def _by_id(rows: Rows) -> Rows:
    return sorted(rows, key=lambda row: row["id"])


@pytest.fixture
def tester() -> ProcessorTester:
    return ProcessorTester(
        example.FirstOfEachId(), keySchema="id string", outputSchema=example.EVENTS
    )


def test_the_first_row_of_each_id_goes_on(tester: ProcessorTester) -> None:
    tables = list(example.generated(files=5))
    with tester:
        out = []
        for table in tables:
            out.append(tester.testBatch(table))
            tester.restart()
        truth = _truth(rows_of(tables))
        assert len(truth) < sum(map(len, tables)), "there are copies"
        assert _by_id(rows_of(out)) == truth


def test_the_horizon_counts_from_the_first_copy(tester: ProcessorTester) -> None:
    event = pa.table({"id": ["a"], "user": ["u"], "what": ["view"]})
    with tester:
        assert len(tester.testBatch(event)) == 1
        tester.setProcessingTime(example.HORIZON_MS - 1)
        assert len(tester.testBatch(event)) == 0
        tester.setProcessingTime(example.HORIZON_MS)
        assert len(tester.testBatch(event)) == 1


def test_the_stream_gives_each_id_once(spark: SparkSession, tmp_path: Path) -> None:
    tables = list(example.generated())
    out = Query(spark, tmp_path, example.build, events=example.EVENTS)(tables)
    assert _by_id(out) == _truth(rows_of(tables))
