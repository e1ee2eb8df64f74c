"""Savepoints with states of no key and with sources' offsets: what was written is what is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import statebackend
from recovery.savepoints.location_files import StoreLocation
from recovery.savepoints.verify_savepoint import verify_savepoint
from snapshot.storage.stores_by_uri import open_store
from statebackend import OperatorState, system
from statebackend.errors import (
    CheckpointLocationError,
    NotRestorableError,
    SchemaError,
    SettingError,
    ValueMismatchError,
)
from tests.support.begun_jobs import location

RULES = pa.table({"map_key": [{"word": w} for w in ("a", "b", "a")], "cents": [1, 2, 3]})
SEEN = pa.table({"n": list(range(5))})
COUNTS = pa.table({"user": ["ann"], "n": [1]})


def given(**more: Any) -> dict[str, OperatorState]:
    one = OperatorState(
        "user string",
        {"count": COUNTS},
        operator_lists={"seen": SEEN, "all": SEEN},
        list_modes={"all": "union"},
        broadcast_maps={"rules": RULES},
        **more,
    )
    return {"op": one}


def read(savepoint: str, state: str) -> list[dict[str, Any]]:
    rows = statebackend.read_state("", None, "op", state, savepoint=savepoint).read_all()
    return list(rows.to_pylist())


@pytest.mark.parametrize("parallelism", [1, 2])
def test_lists_and_broadcast_maps_are_read_as_they_were_written(
    tmp_path: Path, parallelism: int
) -> None:
    to = (tmp_path / "s").as_uri()
    statebackend.write_savepoint(to, given(), parallelism=parallelism)
    rules = {row["map_key"]["word"]: row["value"]["cents"] for row in read(to, "rules")}
    assert rules == {"a": 3, "b": 2}
    for name in ("seen", "all"):
        assert [row["value"]["n"] for row in read(to, name)] == [0, 1, 2, 3, 4]
        subtasks = [row["subtask"] for row in read(to, name)]
        assert subtasks == ([0] * 5 if parallelism == 1 else [0, 0, 0, 1, 1])
    kinds = {row["state"]: row["kind"] for row in statebackend.states("", savepoint=to).to_pylist()}
    assert kinds == {"count": "value", "seen": "split", "all": "union", "rules": "broadcast"}
    assert verify_savepoint(open_store(to, new_id=system.new_id)).ok


def test_rows_stay_with_the_subtask_that_they_name(tmp_path: Path) -> None:
    rows = pa.table(
        {"subtask": [2, 0, 2], "index": [0, 0, 1], "value": [{"n": n} for n in (7, 8, 9)]}
    )
    owners = {}
    for parallelism in (3, 2):
        to = (tmp_path / str(parallelism)).as_uri()
        one = OperatorState("user string", operator_lists={"seen": rows})
        statebackend.write_savepoint(to, {"op": one}, parallelism=parallelism)
        owners[parallelism] = [(r["subtask"], r["value"]["n"]) for r in read(to, "seen")]
    assert owners == {3: [(0, 8), (2, 7), (2, 9)], 2: [(0, 8), (0, 7), (1, 9)]}


@pytest.mark.parametrize(
    ("operator", "error", "said"),
    [
        (
            OperatorState("u int", operator_lists={"a": SEEN}, list_modes={"a": "x"}),
            SettingError,
            "'x'",
        ),
        (
            OperatorState("u int", operator_lists={"a": SEEN}, list_modes={"b": "split"}),
            SettingError,
            "'b'",
        ),
        (
            OperatorState("u int", operator_lists={"a": SEEN}, broadcast_maps={"a": RULES}),
            SettingError,
            "two",
        ),
        (OperatorState("u int", broadcast_maps={"a": SEEN}), SchemaError, "map_key"),
        (
            OperatorState("u int", operator_lists={"a": SEEN.append_column("subtask", [[-1] * 5])}),
            ValueMismatchError,
            "subtask",
        ),
    ],
)
def test_what_is_no_state_of_an_operator_is_refused(
    tmp_path: Path, operator: OperatorState, error: Any, said: str
) -> None:
    with pytest.raises(error, match=said):
        statebackend.write_savepoint((tmp_path / "s").as_uri(), {"op": operator})
    assert not list(open_store(tmp_path.as_uri(), new_id=system.new_id).list("s/"))


def test_where_sources_stood_comes_along(tmp_path: Path) -> None:
    place = location(tmp_path / "checkpoint", 3)
    to = (tmp_path / "s").as_uri()
    made = statebackend.write_savepoint(to, given(), sources=str(place))
    assert (made.epoch, made.query_id) == (2, "query")
    names = {one.name for one in made.spark}
    logs = {f"sources/0/{n}" for n in range(3)}
    assert names == {"metadata", "offsets/1", "offsets/2", "commits/2", *logs}
    assert verify_savepoint(open_store(to, new_id=system.new_id)).ok
    again = statebackend.write_savepoint((tmp_path / "t").as_uri(), given(), sources=to)
    assert (again.epoch, sorted(f.digest for f in again.spark)) == (
        2,
        sorted(f.digest for f in made.spark),
    )
    taken = StoreLocation(open_store(str(place), new_id=system.new_id))
    third = statebackend.write_savepoint((tmp_path / "u").as_uri(), given(), sources=taken)
    assert third.epoch == 2


def test_what_is_no_checkpoint_location_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    to = (tmp_path / "s").as_uri()
    with pytest.raises(CheckpointLocationError):
        statebackend.write_savepoint(to, given(), sources=str(tmp_path))
    with pytest.raises(NotRestorableError, match="No batch"):
        statebackend.write_savepoint(to, given(), sources=str(location(tmp_path / "c", 0)))
    assert not list(open_store(to, new_id=system.new_id).list(""))
