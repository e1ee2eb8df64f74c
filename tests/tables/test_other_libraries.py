"""pandas, Polars and DuckDB take what `read_state` gives, as the page on reading state says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pytest

from statebackend.spark.from_tables.write_savepoint import write_savepoint
from statebackend.tables.given_operators import OperatorState
from statebackend.tables.read_state import read_state

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "read-state.md"
ROWS = pa.table({"user": ["ann", "bob"], "n": pa.array([1, 2], pa.int64())})


@pytest.fixture(scope="module")
def savepoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    to = f"file://{tmp_path_factory.mktemp('read')}/sp"
    write_savepoint(to, {"counter": OperatorState(key="user string", states={"count": ROWS})})
    return to


def counts_of(savepoint: str) -> pa.RecordBatchReader:
    columns = ["key.user", "value.n"]
    return read_state("", savepoint=savepoint, operator="counter", state="count", columns=columns)


def test_the_lines_of_the_page_run(savepoint: str) -> None:
    (code,) = re.findall(r"```python\n(frame = counts.*?)```", PAGE.read_text(), re.S)
    seen: list[Any] = []
    for line in code.strip().splitlines():
        names = {"counts": counts_of(savepoint).read_all(), "duckdb": duckdb, "polars": polars}
        exec("found = " + line.removeprefix("frame = "), names)
        seen.append(names["found"])
    pandas_frame, polars_frame, rows = seen
    assert sorted(zip(pandas_frame["key.user"], pandas_frame["value.n"], strict=True)) == [
        ("ann", 1),
        ("bob", 2),
    ]
    assert polars_frame.sort("key.user").rows() == [("ann", 1), ("bob", 2)]
    assert rows == [("bob", 2), ("ann", 1)]


def test_a_stream_is_taken_without_being_read_whole_first(savepoint: str) -> None:
    assert polars.from_arrow(counts_of(savepoint)).height == 2
    assert duckdb.from_arrow(counts_of(savepoint)).aggregate("count(*)").fetchall() == [(2,)]
