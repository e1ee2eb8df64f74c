"""A savepoint made of tables: what was written is read, is whole, and a job goes on from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from pyspark.sql import types as T

import statebackend
from recovery.inspect.jobs import SAVEPOINT_NAME
from recovery.savepoints.savepoint import delete_savepoint
from recovery.savepoints.savepoint_check import check_savepoint
from snapshot.storage.open import open_store
from statebackend import OperatorState, system
from statebackend.errors import (
    NotRestorableError,
    NullKeyError,
    SchemaError,
    SettingError,
    ValueMismatchError,
)
from tests.schema.strategies import same, tables, to_arrow, types

USERS = pa.table({"user": ["ann", "bob", "cid"], "n": [3, 1, 2], "share": [0.5, None, 1.5]})
PAGES = pa.table(
    {
        "user": ["ann", "ann", "bob", "ann"],
        "map_key": [{"page": p} for p in ("/", "/cart", "/", "/")],
        "n": pa.array([1, 2, 3, 4], pa.int32()),
    }
)
VISITS = pa.table({"user": ["bob", "ann", "bob"], "index": [0, 0, 1], "at": [30, 10, 20]})
TIMERS = pa.table({"user": ["ann", "cid"], "at_ms": [1_000, 500]})


def given_operator(**more: Any) -> OperatorState:
    rows = {"totals": USERS, "pages": PAGES, "visits": VISITS}
    return OperatorState("user string", rows, timers=TIMERS, time_mode="event", **more)


def written(folder: Path, name: str = "saved", **more: Any) -> str:
    to = f"file://{folder}/{name}"
    statebackend.write_savepoint(to, {"op": given_operator()}, **more)
    return to


def read(savepoint: str, state: str, **more: Any) -> list[dict[str, Any]]:
    rows = statebackend.read_state("", None, "op", state, savepoint=savepoint, **more).read_all()
    return list(rows.to_pylist())


@pytest.mark.parametrize("parallelism", [1, 3])
def test_what_was_written_is_read(tmp_path: Path, parallelism: int) -> None:
    to = written(tmp_path, parallelism=parallelism, max_parallelism=128)
    totals = {row["key"]["user"]: row["value"] for row in read(to, "totals")}
    assert totals == {row.pop("user"): row for row in USERS.to_pylist()}
    pages = {(r["key"]["user"], r["map_key"]["page"]): r["value"]["n"] for r in read(to, "pages")}
    assert pages == {("ann", "/"): 4, ("ann", "/cart"): 2, ("bob", "/"): 3}
    visits = [(r["key"]["user"], r["index"], r["value"]["at"]) for r in read(to, "visits")]
    assert sorted(visits) == [("ann", 0, 10), ("bob", 0, 30), ("bob", 1, 20)]
    timers = statebackend.read_timers("", None, "op", savepoint=to).read_all().to_pylist()
    assert {(r["key"]["user"], r["at_ms"]) for r in timers} == {("ann", 1_000), ("cid", 500)}
    assert read(to, "totals", keys=["bob"])[0]["value"] == {"n": 1, "share": None}


def test_it_is_whole_by_the_check_that_all_savepoints_pass(tmp_path: Path) -> None:
    to = written(tmp_path, parallelism=2)
    report = check_savepoint(open_store(to, new_id=system.new_id))
    assert report.ok, report.findings
    assert report.restorable == {"op": [0]}


def test_it_is_deleted_as_others_are(tmp_path: Path) -> None:
    to = written(tmp_path)
    delete_savepoint(open_store(to, new_id=system.new_id))
    with pytest.raises(NotRestorableError, match="no savepoint"):
        read(to, "totals")


@pytest.mark.parametrize("parallelism", [1, 5])
def test_what_was_read_is_written_with_other_key_groups(tmp_path: Path, parallelism: int) -> None:
    first = written(tmp_path, max_parallelism=128, parallelism=2)
    states = {
        name: statebackend.read_state("", None, "op", name, savepoint=first)
        for name in ("totals", "pages", "visits")
    }
    again = f"file://{tmp_path}/again"
    timers = statebackend.read_timers("", None, "op", savepoint=first)
    statebackend.write_savepoint(
        again,
        {"op": OperatorState("user string", states, timers=timers, time_mode="event")},
        max_parallelism=7,
        parallelism=parallelism,
    )
    for name in ("totals", "pages", "visits"):
        assert _without_groups(read(again, name)) == _without_groups(read(first, name))


def _without_groups(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(repr({k: v for k, v in row.items() if k != "key_group"}) for row in rows)


def test_rows_come_from_pandas_and_from_readers(tmp_path: Path) -> None:
    frame = pd.DataFrame({"user": ["ann"], "n": [1]})
    reader = pa.RecordBatchReader.from_batches(USERS.schema, USERS.to_batches(max_chunksize=1))
    to = f"file://{tmp_path}/saved"
    statebackend.write_savepoint(
        to, {"op": OperatorState("user string", {"a": frame, "b": reader})}
    )
    assert [row["value"] for row in read(to, "a")] == [{"n": 1}]
    assert len(read(to, "b")) == 3


def test_a_schema_may_be_given(tmp_path: Path) -> None:
    rows = pa.table({"user": ["ann"], "n": pa.array([1], pa.int64())})
    to = f"file://{tmp_path}/saved"
    one = OperatorState("user string", {"a": rows}, schemas={"a": "n decimal(10,2)"})
    with pytest.raises(ValueMismatchError):
        statebackend.write_savepoint(to, {"op": one})
    to = f"file://{tmp_path}/other"
    small = pa.table({"user": ["ann"], "n": pa.array([1], pa.int16())})
    one = OperatorState("user string", {"a": small}, schemas={"a": "n bigint"})
    statebackend.write_savepoint(to, {"op": one})
    assert statebackend.states("", savepoint=to).to_pylist()[0]["value_schema"] == "n bigint"


@settings(max_examples=25)
@given(tables(types(maps=False)), tables(types(maps=True)))
def test_any_types_come_back(tmp_path_factory: Any, keys: Any, values: Any) -> None:
    count = min(len(keys[1]), len(values[1]))
    rows = [
        (k, v) for k, v in zip(keys[1], values[1], strict=False) if any(x is not None for x in k)
    ]
    schemas = keys[0], values[0]
    table = pa.table(
        {
            name: _structs(schema, [row[n] for row in rows])
            for n, (name, schema) in enumerate(zip(("key", "value"), schemas, strict=True))
        }
    )
    to = f"file://{tmp_path_factory.mktemp('any')}/saved"
    one = OperatorState(keys[0], {"s": table}, schemas={"s": values[0]})
    statebackend.write_savepoint(to, {"op": one}, max_parallelism=16)
    found = read(to, "s")
    assert len(found) <= count
    kept = [row["value"] for row in found]
    wanted = _structs(values[0], [v for _, v in rows]).to_pylist()
    assert all(any(same(row, other) for other in wanted) for row in kept)


def _structs(schema: T.StructType, rows: list[tuple[Any, ...]]) -> pa.StructArray:
    return pa.StructArray.from_arrays(to_arrow(schema, rows), names=schema.names)


@pytest.mark.parametrize(
    ("operators", "error", "said"),
    [
        ({}, SettingError, "No operator"),
        ({"op": OperatorState("user string", {"a": 7})}, SchemaError, "a int"),
        (
            {"op": OperatorState("user string", {"a": USERS.select(["user"])})},
            SchemaError,
            "no col",
        ),
        (
            {"op": OperatorState("user string", {"a": pa.table({"user": [None], "n": [1]})})},
            (NullKeyError, ValueMismatchError),
            "key",
        ),
        ({"op": OperatorState("user string", {}, timers=TIMERS)}, SettingError, "no time mode"),
        ({"op": OperatorState("user string", {}, time_mode="x")}, SettingError, "time_mode='x'"),
        (
            {
                "op": OperatorState(
                    "user string", {"a": USERS.append_column("expires_at_ms", [[1] * 3])}
                )
            },
            SchemaError,
            "time to live",
        ),
    ],
)
def test_what_is_no_state_is_refused(tmp_path: Path, operators: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        statebackend.write_savepoint(f"file://{tmp_path}/saved", operators)
    with pytest.raises(statebackend.StateBackendError):
        statebackend.states("", savepoint=f"file://{tmp_path}/saved")


def test_a_row_that_does_not_fit_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    to = (tmp_path / "s").as_uri()
    rows = pa.table({"user": ["a"] * 10_000 + [None], "n": [1] * 10_001})
    with pytest.raises(NullKeyError):
        statebackend.write_savepoint(to, {"op": OperatorState("user string", {"n": rows})})
    assert list(open_store(to, new_id=system.SYSTEM.new_id).list("")) == []
    statebackend.write_savepoint(to, {"op": OperatorState("user string", {"n": rows[:3]})})


def test_what_was_deleted_while_it_was_written_is_no_savepoint(tmp_path: Path) -> None:
    to = (tmp_path / "s").as_uri()
    store = open_store(to, new_id=system.SYSTEM.new_id)

    def batches() -> Iterator[pa.RecordBatch]:
        delete_savepoint(store)
        yield from USERS.to_batches()

    rows = pa.RecordBatchReader.from_batches(USERS.schema, batches())
    with pytest.raises(NotRestorableError, match="was deleted while it was made"):
        statebackend.write_savepoint(to, {"op": OperatorState("user string", {"n": rows})})
    assert SAVEPOINT_NAME not in {one.name for one in store.list("")}


def test_a_folder_that_is_taken_is_refused(tmp_path: Path) -> None:
    to = written(tmp_path)
    with pytest.raises(SettingError, match="something lies there"):
        written(tmp_path)
    assert len(read(to, "totals")) == 3
