"""What fuzzing and crash points have found: each was an error without a type, or left for ever."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pyarrow as pa
import pytest

from recovery.local.local_copies import LocalSubtask
from recovery.local.store_pool import Clock
from recovery.local.workspace import Workspace
from snapshot.formats.file_index import FileEntry, FileIndex, decode_index, encode_index
from snapshot.formats.record import parse_record
from snapshot.formats.zstd_frame import pack
from snapshot.protocol.lineage import resolve
from statebackend.errors import (
    CorruptionError,
    LocalCopyError,
    ProtocolError,
    UnsupportedTypeError,
)
from statebackend.keygroups import KeyGroupRange
from statebackend.operators.vector.column_entries import Entries
from statebackend.operators.vector.column_states import ArrowListState, StateSite
from statebackend.rocks.store import RocksSettings, RocksStore
from statebackend.rpc.driver_server import Server
from statebackend.rpc.envelope import Decoder
from statebackend.rpc.flight_base import read_reply
from statebackend.schema.codec import codec_for
from statebackend.schema.ddl import parse_ddl
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.state.cells import ListCell
from statebackend.state.column_table import ColumnTable
from statebackend.state.expiry_index import ListHead, list_items
from statebackend.state.key_cursor import KeyCursor
from statebackend.state.table import StateTable
from statebackend.state.table_base import MemoryBase
from tests.fuzz.stored import sealed
from tests.recovery.driver import Run, new_id

ROWS, NAMES = codec_for(parse_ddl("n BIGINT")), KeyCodec(parse_ddl("k STRING"))
LIST = b"\0\5\0\2" + NAMES.encode(("a",))
HUGE = [2**63 - 1, 2**64 - 1, 1 << 33]
SMALL = RocksSettings(block_cache_bytes=1 << 20, write_buffer_bytes=1 << 20)


def subtask(path: Path) -> LocalSubtask:
    clock = Clock(lambda: 0.0, lambda s: None)
    groups = KeyGroupRange(0, 7)
    return LocalSubtask(
        str(path), job="j", operator="op", key_groups=groups, new_id=new_id, clock=clock
    )


@pytest.mark.parametrize("text", [bytes(32), b"\xff\xfe", b"../op", b"current", b"a" * 300])
def test_a_pointer_that_a_power_cut_has_made_rubbish_is_no_copy(
    tmp_path: Path, text: bytes
) -> None:
    local = subtask(tmp_path)
    (local.path / "current").write_bytes(text)
    held, reason = local.acquire(0)
    assert reason
    assert held.path.parent == local.path
    held.release()
    again, reason = local.acquire(0)
    assert (again.path, reason) == (held.path, "")
    again.release()


def test_a_mark_that_is_no_text_is_a_mark(tmp_path: Path) -> None:
    held = subtask(tmp_path).create()
    (held.path / "BAD").write_bytes(b"\xff")
    assert held.bad
    held.release()


def test_what_a_killed_process_was_writing_is_swept(tmp_path: Path) -> None:
    local = subtask(tmp_path)
    local.create().release()
    dead = (local.path / "current").read_text()
    for name in (f".current.{dead}", ".current.never"):
        (local.path / name).write_text(dead)
    held = local.create()
    (held.path / "deltas").mkdir()
    (held.path / "deltas" / ".5.123").write_bytes(b"half of a delta")
    held.open_store(SMALL)
    local.sweep(held)
    assert {path.name for path in local.path.iterdir()} == {"current", held.path.name}
    assert not list((held.path / "deltas").iterdir())
    held.release()


def test_a_folder_whose_sweeper_was_killed_is_swept_again(tmp_path: Path) -> None:
    left = tmp_path / ".work" / "left"
    left.mkdir(parents=True)
    (left / "spilled").write_bytes(b"without a lease")
    work = Workspace(str(tmp_path), new_id)
    own = work.path().parent
    assert list(own.parent.iterdir()) == [own]
    os.close(work._lease)


@pytest.mark.parametrize("count", HUGE)
def test_a_damaged_count_of_a_list_costs_no_memory(count: int) -> None:
    base = MemoryBase()
    base.entries[LIST] = count.to_bytes(8, "big")
    table, cursor = StateTable(base), KeyCursor()
    cell = ListCell(cursor, table, "seen", 2, ROWS)
    cursor.load([LIST[:2]], [LIST[4:]])
    cursor.index = 0
    with pytest.raises(LocalCopyError, match="'seen'"):
        cell.get()
    with pytest.raises(LocalCopyError, match="'seen'"):
        cell.clear()
    columns = ColumnTable(table)
    site = StateSite(
        columns, Entries(columns), name="seen", state_id=2, key_codec=NAMES, key_groups=range(8)
    )
    state, keys = ArrowListState(site, ROWS), site.keys(pa.array([LIST], pa.binary()))
    with pytest.raises(LocalCopyError, match="'seen'"):
        state.get(keys)
    with pytest.raises(LocalCopyError, match="elements 0 to"):
        list_items(table, LIST, ListHead(0, count, bytes(8), bytes(8)))


def test_a_long_list_is_read_as_ever() -> None:
    base, count = MemoryBase(), (1 << 16) + 1
    base.entries[LIST] = count.to_bytes(8, "big")
    for place in range(count):
        base.entries[LIST + place.to_bytes(8, "big")] = ROWS.encode((place,))
    table, cursor = StateTable(base), KeyCursor()
    cell = ListCell(cursor, table, "seen", 2, ROWS)
    cursor.load([LIST[:2]], [LIST[4:]])
    cursor.index = 0
    assert list(cell.get()) == [(place,) for place in range(count)]
    head = ListHead(0, count, bytes(8), bytes(8))
    assert len(list_items(table, LIST, head)) == count
    columns = ColumnTable(table)
    site = StateSite(
        columns, Entries(columns), name="seen", state_id=2, key_codec=NAMES, key_groups=range(8)
    )
    index, rows = ArrowListState(site, ROWS).get(site.keys(pa.array([LIST], pa.binary())))
    assert (len(index), rows.column("n")[count - 1].as_py()) == (count, count - 1)


def test_text_that_is_no_utf_8_is_a_malformed_request_and_no_marker() -> None:
    body = msgspec.msgpack.encode({"protocol": 3, "job": "clicks"}).replace(b"clicks", b"\xff" * 6)
    server = Server(bind="127.0.0.1", advertised="127.0.0.1")
    action = SimpleNamespace(type="begin", body=pa.py_buffer(body))
    (answer,) = server.do_action(None, action)
    server.shutdown()
    with pytest.raises(ProtocolError, match="malformed BeginRequest"):
        read_reply([pa.py_buffer(answer)], Decoder(dict))

    class Rows:
        def get(self, key: bytes) -> bytes:
            return b'{"job_id":"\xff"}'

    with pytest.raises(LocalCopyError, match="marker"):
        RocksStore(Rows(), "x").marker()


def test_an_answer_of_nothing_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="malformed tuple"):
        read_reply([], Decoder(dict))


@pytest.mark.parametrize("subtask", [-1, 2, 2**40])
def test_a_slice_of_no_subtask_breaks_the_lineage(subtask: int) -> None:
    run = Run(2)
    run.finish(0)
    (manifest,) = run.records
    first = msgspec.structs.replace(manifest.slices[0], subtask=subtask)
    with pytest.raises(CorruptionError, match="breaks the lineage"):
        resolve([msgspec.structs.replace(manifest, slices=[first])])


def test_json_of_any_depth_is_refused_by_name() -> None:
    deep = b'{"settings":' + b"[" * 100_000
    with pytest.raises(CorruptionError):
        parse_record(sealed(pack(deep)), "log/x")
    with pytest.raises(CorruptionError):
        decode_index(pack(b'{"files":' + b"[" * 100_000))


@pytest.mark.parametrize(
    ("names", "size_bytes"), [(["a\0b"], 1), (["1.sst"], -1), (["1.sst", "1.sst"], 1)]
)
def test_an_index_of_files_that_cannot_be_is_refused(names: list[str], size_bytes: int) -> None:
    files = [FileEntry(name=n, object="o", size_bytes=size_bytes, digest="0" * 64) for n in names]
    with pytest.raises(CorruptionError):
        decode_index(encode_index(FileIndex(incarnation="i", files=files)))


@pytest.mark.parametrize("ddl", ["a decimal(0,0)", "a array<decimal(0,0)>"])
def test_a_decimal_without_digits_is_refused_by_name(ddl: str) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"Field 'a.*1 to 38 digits"):
        codec_for(parse_ddl(ddl))
