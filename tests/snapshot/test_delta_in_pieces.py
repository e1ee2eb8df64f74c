"""Deltas by the stream: the bytes of the other way, digests first, nothing left on an error."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshot.formats import delta as delta_module
from snapshot.formats import delta_in_pieces
from snapshot.formats.delta import DeltaRows, decode_delta, encode_delta
from snapshot.formats.delta_in_pieces import as_lists, encode_frozen, encode_stream, iter_delta
from statebackend.errors import CorruptionError, FormatError, LocalDirError, SettingError
from statebackend.rocks.store import Marker, RocksStore
from statebackend.state.blocks import binary_array
from statebackend.state.spill import OverlaySpill
from statebackend.state.table import MemoryBase, StateTable

Changes = dict[bytes, bytes | None]
PARTS = st.lists(
    st.dictionaries(
        st.binary(max_size=3),
        st.one_of(st.none(), st.binary(max_size=5), st.just(b"x" * 100)),
        max_size=50,
    ),
    min_size=1,
    max_size=4,
)


def never() -> Path:
    raise AssertionError


def frozen_of(parts: list[Changes], folder: Path, *, limit_bytes: int) -> Any:
    """An epoch whose changes came in these parts, with a chance to spill after each."""
    spill = OverlaySpill(limit_bytes=limit_bytes, folder=lambda: folder / "overlay")
    table = StateTable(MemoryBase(), spill=spill)
    for part in parts:
        table.entries.update(part)
        table.relieve()
    return table.freeze(0)


def pairs(pieces: Iterator[DeltaRows]) -> list[tuple[bytes, bytes | None]]:
    return [pair for keys, values in as_lists(pieces) for pair in zip(keys, values, strict=True)]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_module, "BATCH_ROWS", 13)
    monkeypatch.setattr(delta_module, "BATCH_BYTES", 400)
    monkeypatch.setattr(delta_in_pieces, "_PIECE_ROWS", 5)


@pytest.mark.full  # 150 large overlays
@settings(max_examples=150, deadline=None)
@given(PARTS)
def test_a_spilled_overlay_is_encoded_to_the_bytes_of_one_in_memory(parts: list[Changes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inside = encode_frozen(frozen_of(parts, folder, limit_bytes=1 << 30), never)
        spilled = frozen_of(parts, folder, limit_bytes=0)
        outside = encode_frozen(spilled, lambda: folder / "delta")
        expected: Changes = {}
        for part in parts:
            expected.update(part)
        assert inside.data is not None
        if not expected:
            assert inside == outside
            assert inside.data == b""
            return
        assert outside.path == folder / "delta"
        assert outside.path.read_bytes() == inside.data
        assert (outside.digest, outside.size_bytes, outside.rows) == (
            inside.digest,
            len(inside.data),
            len(expected),
        )
        for source in (inside.data, outside.path):
            assert pairs(iter_delta(source, digest=inside.digest)) == sorted(expected.items())
        keys, values = spilled.sorted()
        assert list(zip(keys, values, strict=True)) == sorted(expected.items())


def test_one_batch_has_the_bytes_that_arrow_itself_writes() -> None:
    keys, values = [b"a", b"b", b"c"], [b"1", None, b"333"]
    schema = pa.schema(
        [pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())],
        metadata={"statebackend.delta": "1", "statebackend.rows": "3", "range_tombstones": "[]"},
    )
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([keys, values], schema=schema))
    assert encode_delta(keys, values).data == sink.getvalue().to_pybytes()


def test_a_batch_is_bounded_in_bytes_and_holds_one_row_at_least() -> None:
    keys = [b"%02d" % n for n in range(8)]
    values = [b"v" * size for size in (100, 100, 100, 100, 1000, 1, 390, 10)]
    with pa.ipc.open_stream(encode_delta(keys, values).data) as reader:
        assert [batch.num_rows for batch in reader] == [3, 1, 1, 2, 1]


def test_large_batches_of_older_releases_come_in_small_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delta_module, "BATCH_ROWS", 65_536)
    monkeypatch.setattr(delta_module, "BATCH_BYTES", 1 << 30)
    keys = [b"%04d" % n for n in range(101)]
    made = encode_delta(keys, [b"v" * 1000] * 101)
    pieces = list(iter_delta(made.data, digest=made.digest))
    assert {len(piece.keys) for piece in pieces} == {5, 1}
    assert [key for piece in pieces for key in piece.keys.to_pylist()] == keys


# --- damage --------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path) -> Any:
    changes: Changes = {b"key%03d" % n: b"value%d" % n if n % 5 else None for n in range(40)}
    return encode_frozen(frozen_of([changes], tmp_path, limit_bytes=0), lambda: tmp_path / "delta")


def test_a_flipped_or_cut_file_is_refused_before_anything_is_given(
    made: Any, tmp_path: Path
) -> None:
    data, path = made.path.read_bytes(), tmp_path / "bad"
    flipped = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))]
    for bad in [*flipped, *(data[:length] for length in range(0, len(data), 7))]:
        path.write_bytes(bad)
        with pytest.raises(CorruptionError, match="digest"):
            next(iter_delta(path, digest=made.digest, name="d"))


def test_a_store_does_not_change_for_a_damaged_file(made: Any, tmp_path: Path) -> None:
    store = RocksStore.open(str(tmp_path / "db"))
    before = Marker(
        job_id="", operator="o", key_group_start=0, key_group_end=1, epoch=0, chain="aa"
    )
    store.apply([b"k"], [b"v"], before)
    data = bytearray(made.path.read_bytes())
    data[-20] ^= 4
    made.path.write_bytes(data)
    pieces = as_lists(iter_delta(made.path, digest=made.digest))
    with pytest.raises(CorruptionError):
        store.apply_batches(pieces, before)
    assert store.marker() == before
    assert list(store.scan()) == [(b"k", b"v")]
    store.close()


@pytest.mark.full  # damages every byte: some seconds
def test_without_a_digest_what_is_wrong_is_refused_by_the_end(made: Any) -> None:
    data = made.path.read_bytes()
    expected = pairs(iter_delta(data))
    for length in range(len(data)):
        try:  # only the end-of-stream marker may be missing
            assert pairs(iter_delta(data[:length])) == expected
        except FormatError:
            continue
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]
        try:
            list(iter_delta(flipped))
        except FormatError:
            continue


def test_keys_that_do_not_ascend_from_batch_to_batch_are_refused() -> None:
    schema = pa.schema(
        [pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())],
        metadata={"statebackend.delta": "1", "statebackend.rows": "2", "range_tombstones": "[]"},
    )
    for second in (b"a", b"b"):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            for key in (b"b", second):
                writer.write_batch(pa.RecordBatch.from_arrays([[key], [b"v"]], schema=schema))
        data = sink.getvalue().to_pybytes()
        for read in (lambda d: list(iter_delta(d)), decode_delta):
            with pytest.raises(CorruptionError, match="ascending"):
                read(data)


def test_a_file_that_is_not_there_is_refused_as_damaged(tmp_path: Path) -> None:
    for digest in (None, bytes(32)):
        with pytest.raises(CorruptionError, match="'d'"):
            list(iter_delta(tmp_path / "none", digest=digest, name="d"))


# --- leftovers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
def test_no_file_is_left_of_a_stream_with_another_number_of_rows(tmp_path: Path, rows: int) -> None:
    pieces = [(binary_array([b"a", b"b"]), binary_array([b"1", b"2"]))]
    with pytest.raises(SettingError, match="rows"):
        encode_stream(pieces, rows, tmp_path / "delta")
    assert not list(tmp_path.iterdir())


def test_no_file_is_left_if_reading_the_runs_fails(tmp_path: Path) -> None:
    parts: list[Changes] = [{bytes([n, m]): b"v" for m in range(50)} for n in range(5)]
    frozen = frozen_of(parts, tmp_path, limit_bytes=0)
    (tmp_path / "overlay" / "run-3").write_bytes(b"")
    with pytest.raises(LocalDirError, match="run-3"):
        encode_frozen(frozen, lambda: tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    frozen = frozen_of([{b"k": b"v"}], tmp_path, limit_bytes=0)
    with pytest.raises(LocalDirError, match="missing"):
        encode_frozen(frozen, lambda: tmp_path / "missing" / "delta")
