"""A savepoint made of tables: what was written is read, is whole, and a job goes on from it."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from pyspark.sql import types as T

import statebackend
from recovery.inspect.job_list import SAVEPOINT_NAME
from recovery.savepoints.savepoint_folder import delete_savepoint
from recovery.savepoints.verify_savepoint import verify_savepoint
from snapshot.storage.stores_by_uri import open_store
from statebackend import TTL, OperatorState, system
from statebackend.errors import (
    NotRestorableError,
    NullKeyError,
    SchemaError,
    SettingError,
    ValueMismatchError,
)
from statebackend.rocks.parted import open_store as open_rocks
from statebackend.state.expiry_index import ExpiryIndex
from statebackend.state.table import StateTable
from statebackend.tables import savepoint_of_rows
from statebackend.tables.stored_job import find_job
from statebackend.tables.temporary_copy import fetch_subtask
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
    report = verify_savepoint(open_store(to, new_id=system.new_id))
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


def test_timestamps_need_no_schema(tmp_path: Path) -> None:
    at = pa.array([5], pa.timestamp("us", "UTC"))
    to = f"file://{tmp_path}/saved"
    rows = pa.table({"user": ["ann"], "at": at})
    statebackend.write_savepoint(to, {"op": OperatorState("user string", {"a": rows})})
    assert read(to, "a")[0]["value"]["at"] == at[0].as_py()


@pytest.mark.parametrize(
    ("given_mode", "mode"),
    [("EventTime", "event"), ("PROCESSINGTIME", "processing"), ("event", "event")],
)
def test_a_time_mode_may_have_sparks_name(tmp_path: Path, given_mode: str, mode: str) -> None:
    operator = OperatorState("user string", {"totals": USERS}, timers=TIMERS, time_mode=given_mode)
    statebackend.write_savepoint(f"file://{tmp_path}/saved", {"op": operator})
    found = find_job("", None, savepoint=f"file://{tmp_path}/saved")
    assert found.operators["op"].last.time_mode == mode
    for wrong, said in (("None", "no time mode"), ("later", "time mode of operator 'op'")):
        operator = OperatorState("user string", {}, timers=TIMERS, time_mode=wrong)
        with pytest.raises(SettingError, match=said):
            statebackend.write_savepoint(f"file://{tmp_path}/wrong", {"op": operator})


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


@pytest.mark.full  # random values of every type: some seconds
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
        ({"op": OperatorState("user string", {}, time_mode="x")}, SettingError, "'op' is 'x'"),
        (
            {
                "op": OperatorState(
                    "user string", {"a": USERS.append_column("expires_at_ms", [[1] * 3])}
                )
            },
            SchemaError,
            "a column expires_at_ms and no ttl=",
        ),
    ],
)
def test_what_is_no_state_is_refused(tmp_path: Path, operators: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        statebackend.write_savepoint(f"file://{tmp_path}/saved", operators)
    assert not [one for one in tmp_path.rglob("*") if one.is_file()]


def expiring(at_ms: int = 1_700_000_000_000) -> OperatorState:
    ends = pa.array([at_ms, at_ms + 1, -5, at_ms + 2][: len(PAGES)])
    return OperatorState(
        "user string",
        {
            "totals": USERS.append_column("expires_at_ms", ends[:3]),
            "pages": PAGES.append_column("expires_at_ms", ends),
            "visits": VISITS.append_column("expires_at_ms", ends[:3]),
        },
        ttl=dict.fromkeys(("totals", "pages", "visits"), TTL(60_000)),
    )


def test_states_that_expire_are_read_as_they_were_written(tmp_path: Path) -> None:
    to = (tmp_path / "s").as_uri()
    given = expiring()
    statebackend.write_savepoint(to, {"op": given}, parallelism=3, max_parallelism=64)
    assert verify_savepoint(open_store(to, new_id=system.SYSTEM.new_id)).ok
    for name in given.states:
        found = statebackend.read_state("", None, "op", name, savepoint=to).read_all()
        again = (tmp_path / name).as_uri()
        statebackend.write_savepoint(
            again, {"op": OperatorState("user string", {name: found}, ttl={name: TTL(60_000)})}
        )
        columns = [one for one in found.schema.names if one != "key_group"]
        both = [read(place, name, columns=columns) for place in (to, again)]
        assert sorted(map(repr, both[0])) == sorted(map(repr, both[1]))
    totals = {one["key"]["user"]: one for one in read(to, "totals")}
    assert totals["cid"]["expires_at_ms"] == -5
    assert totals["ann"]["value"] == {"n": 3, "share": 0.5}
    states = statebackend.states("", savepoint=to).to_pylist()
    assert {one["ttl_ms"] for one in states} == {60_000}


def test_what_has_expired_is_removed_and_what_has_not_stays(tmp_path: Path) -> None:
    to = (tmp_path / "s").as_uri()
    rows = {
        "totals": pa.table({"user": ["a", "b", "b"], "n": [1, 2, 3]}),
        "pages": pa.table(
            {"user": ["a"] * 3, "map_key": [{"p": p} for p in "xyz"], "n": [1, 2, 3]}
        ),
        "visits": pa.table({"user": ["a"] * 3, "index": [0, 1, 2], "at": [1, 2, 3]}),
    }
    ends = pa.array([1_000, 2_000, 9_000])
    given = {name: one.append_column("expires_at_ms", ends) for name, one in rows.items()}
    ttl = dict.fromkeys(rows, TTL(100))
    statebackend.write_savepoint(to, {"op": OperatorState("user string", given, ttl=ttl)})
    job = find_job("", None, savepoint=to)
    table = StateTable(open_rocks(str(fetch_subtask(job, job.operator("op"), 0, tmp_path / "l"))))
    removed = []
    for epoch, now_ms in enumerate((2_000, 8_000, 20_000, 90_000)):
        removed.append(ExpiryIndex(table).clean(range(1024), now_ms, 1_000))
        table.freeze(epoch)
    assert removed == [1 + 2 + 2, 0, 3, 0]


def test_large_values_are_written_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(savepoint_of_rows, "_PIECE_BYTES", 1 << 16)
    sizes: list[int] = []
    fill = savepoint_of_rows.binary_array
    monkeypatch.setattr(
        savepoint_of_rows,
        "binary_array",
        lambda some: (sizes.append(sum(map(len, some))), fill(some))[1],
    )
    rows = pa.table({"user": [f"u{n}" for n in range(200)], "text": ["x" * 5_000] * 200})
    to = (tmp_path / "s").as_uri()
    statebackend.write_savepoint(to, {"op": OperatorState("user string", {"t": rows})})
    assert max(sizes) < 1 << 17
    assert len(read(to, "t")) == 200


@pytest.mark.parametrize(
    ("operators", "said"),
    [
        ({"op": OperatorState("user string", {"": USERS})}, "state named ''"),
        ({"": OperatorState("user string", {"a": USERS})}, "by its uid"),
        ({"op": OperatorState("user string", {"a": USERS}, schemas={"b": "n int"})}, "'b'"),
        ({"op": OperatorState("user string", {"a": USERS}, ttl={"b": TTL(1)})}, "'b'"),
        ({"op": OperatorState("user string", {"a": USERS}, ttl={"a": TTL(1)})}, "expires_at_ms"),
        (
            {"op": OperatorState("user string", {"a": USERS.append_column("n", USERS["n"])})},
            "two columns of one name",
        ),
        (
            {
                "op": OperatorState(
                    "user string",
                    {"a": pa.table({"user": ["a"], "value": [{"n": 1}], "other": [2]})},
                )
            },
            "beside it \\(other\\)",
        ),
        (
            {
                "op": OperatorState(
                    "user string",
                    {
                        "a": pa.table(
                            {"user": ["a"], "value": [None]},
                            schema=pa.schema(
                                [("user", pa.string()), ("value", pa.struct([("n", pa.int64())]))]
                            ),
                        )
                    },
                )
            },
            "null in the column value",
        ),
        ({"op": OperatorState("other string", {"a": USERS.slice(0, 0)})}, "other.*They have user"),
        (
            {"op": OperatorState("user string", timers=USERS.slice(0, 0), time_mode="event")},
            "at_ms",
        ),
        (
            {
                "op": OperatorState(
                    "user string",
                    {
                        "a": pa.table(
                            {"user": ["a"], "n": pa.array([Decimal("1")], pa.decimal256(50, 2))}
                        )
                    },
                )
            },
            "type that Spark does not have",
        ),
    ],
)
def test_mistakes_are_told_before_anything_is_written(
    tmp_path: Path, operators: Any, said: str
) -> None:
    to = (tmp_path / "s").as_uri()
    with pytest.raises(statebackend.StateBackendError, match=said):
        statebackend.write_savepoint(to, operators)
    assert list(open_store(to, new_id=system.SYSTEM.new_id).list("")) == []


def test_one_reader_is_not_given_to_two_states(tmp_path: Path) -> None:
    reader = USERS.to_reader()
    with pytest.raises(SettingError, match="a reader that another state was given"):
        statebackend.write_savepoint(
            (tmp_path / "s").as_uri(),
            {"op": OperatorState("user string", {"a": reader, "b": reader})},
        )


def test_columns_named_as_those_of_reading_are_values_where_the_key_is_no_struct(
    tmp_path: Path,
) -> None:
    to = (tmp_path / "s").as_uri()
    rows = pa.table({"user": ["a"], "key": ["k"], "subtask": [1], "key_group": [2]})
    statebackend.write_savepoint(to, {"op": OperatorState("user string", {"a": rows})})
    assert read(to, "a")[0]["value"] == {"key": "k", "subtask": 1, "key_group": 2}


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
