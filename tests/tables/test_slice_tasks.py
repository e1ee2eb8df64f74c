"""What tasks write into a savepoint: attempts that count, and those that do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import statebackend
from recovery.savepoints.savepoint_folder import delete_savepoint
from recovery.savepoints.verify_savepoint import verify_savepoint
from snapshot.storage.stores_by_uri import open_store
from statebackend import OperatorState
from statebackend.errors import NotRestorableError, SettingError
from statebackend.spark.from_tables.slice_tasks import EntryTask, SliceTask, WrittenSlice
from statebackend.system import SYSTEM
from statebackend.tables.given_operators import GivenOperator
from statebackend.tables.savepoint_of_rows import KeyedSlices, list_heads, write_saved_query
from statebackend.tables.savepoint_writer import SavepointWriter

ROWS = pa.table({"user": ["ann", "bob", "ann", "cid"], "n": [1, 2, 3, 4]})
OF = (2, 8)


class ByTasks:
    """Writes an operator as Spark's tasks do, in this process; ``before`` comes before the driver
    counts on what they wrote."""

    def __init__(self, folder: Path, before: Callable[[SliceTask, pa.Table], Any]) -> None:
        self.to, self.scratch, self.before = folder.as_uri(), folder.parent / "work", before

    def __call__(
        self, writer: SavepointWriter, uid: str, given: GivenOperator, folder: Path
    ) -> KeyedSlices:
        task = SliceTask(self.to, None, str(self.scratch), writer.maker, uid, OF, list_heads(given))
        encode = EntryTask(given.key, given.states[0][0], OF)
        numbered = ROWS.append_column("number", pa.array(range(ROWS.num_rows), pa.int64()))
        made = pa.Table.from_batches(encode(iter(numbered.to_batches(max_chunksize=3))))
        entries = made.sort_by([("entry", "ascending"), ("number", "ascending")])
        self.before(task, entries)
        written = ran(task, entries)
        writer.adopt(written)
        found = {one.subtask: one for one in written}
        empty = [writer.slice(uid, n, OF, lambda: iter(()), folder) for n in range(2)]
        return KeyedSlices([found.get(n, empty[n]) for n in range(2)], None)


def ran(task: SliceTask, entries: pa.Table) -> list[Any]:
    out = [batch.column(0)[0].as_py() for batch in task(iter(entries.to_batches()))]
    return [msgspec.json.decode(one, type=WrittenSlice).entry for one in out]


def write(folder: Path, before: Callable[[SliceTask, pa.Table], Any]) -> None:
    operators = {"op": OperatorState("user string", {"s": ROWS})}
    of = {"parallelism": OF[0], "max_parallelism": OF[1]}
    write_saved_query(folder.as_uri(), operators, None, keyed=ByTasks(folder, before), **of)


def objects(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_attempts_that_are_lost_leave_nothing_and_change_nothing(tmp_path: Path) -> None:
    statebackend.write_savepoint(
        (tmp_path / "plain").as_uri(),
        {"op": OperatorState("user string", {"s": ROWS})},
        parallelism=OF[0],
        max_parallelism=OF[1],
    )
    write(tmp_path / "tried", lambda task, entries: [ran(task, entries) for _ in range(2)])
    to = (tmp_path / "tried").as_uri()
    assert verify_savepoint(open_store(to, new_id=SYSTEM.new_id)).ok
    assert len(objects(tmp_path / "tried")) == len(objects(tmp_path / "plain"))
    rows = [
        statebackend.read_state("", None, "op", "s", savepoint=(tmp_path / one).as_uri())
        for one in ("plain", "tried")
    ]
    assert rows[0].read_all() == rows[1].read_all()


def test_a_task_that_comes_too_late_takes_its_object_back(tmp_path: Path) -> None:
    late: list[SliceTask] = []

    def stop(task: SliceTask, entries: pa.Table) -> None:
        late.append(task)
        raise KeyboardInterrupt

    folder = tmp_path / "saved"
    with pytest.raises(KeyboardInterrupt):
        write(folder, stop)
    assert objects(folder) == []
    entries = pa.table(
        {"entry": [b"\0\1\0\1a"], "stored": [b"\0x"]},
        pa.schema([("entry", pa.binary()), ("stored", pa.binary())]),
    )
    with pytest.raises(NotRestorableError, match="was deleted while it was made"):
        ran(late[0], entries)
    assert objects(folder) == []
    write(folder, lambda *_: None)  # the folder is free


def test_what_is_deleted_meanwhile_becomes_no_savepoint(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    store = open_store(folder.as_uri(), new_id=SYSTEM.new_id)
    with pytest.raises(NotRestorableError, match="was deleted while it was made"):
        write(folder, lambda *_: delete_savepoint(store))
    assert objects(folder) == []


def test_a_folder_that_hosts_do_not_share_is_refused(tmp_path: Path) -> None:
    folder, other = tmp_path / "saved", tmp_path / "other-host"

    class Elsewhere(ByTasks):
        def __call__(self, *given: Any) -> KeyedSlices:
            other.mkdir()
            (other / "savepoint.begun").write_bytes((folder / "savepoint.begun").read_bytes())
            self.to = other.as_uri()
            return super().__call__(*given)

    operators = {"op": OperatorState("user string", {"s": ROWS})}
    with pytest.raises(SettingError, match="the driver does not find"):
        write_saved_query(
            folder.as_uri(),
            operators,
            None,
            keyed=Elsewhere(folder, lambda *_: None),
            parallelism=OF[0],
            max_parallelism=OF[1],
        )
    assert objects(folder) == []
