"""The one place that touches RocksDB, and the traps it keeps everybody else out of."""

from __future__ import annotations

import gc
import itertools
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rocksdict import Checkpoint

from statebackend.errors import LocalCopyError, LocalDirError, StateBackendError, StoreBusyError
from statebackend.rocks import store as store_module
from statebackend.rocks.rocksdb_options import LEVEL0_FULL_FILES
from statebackend.rocks.store import Marker, RocksSettings, RocksStore, classify

ROOT = Path(__file__).parents[2]
# 64 KB is the smallest write buffer that RocksDB takes; a tiny cache makes reads reach the disk.
TINY = RocksSettings(block_cache_bytes=1 << 12, write_buffer_bytes=1 << 16)
Entries = dict[bytes, bytes]


def marker(epoch: int, chain: str = "") -> Marker:
    return Marker(
        job_id="job",
        operator="op",
        key_group_start=0,
        key_group_end=7,
        epoch=epoch,
        chain=chain or f"{epoch:02x}" * 32,
    )


def entries_of(count: int, *, seed: int = 0, size_bytes: int = 40) -> Entries:
    """Incompressible rows over eight key groups."""
    drawn = random.Random(seed)
    return {
        bytes([0, n % 8, 0, 1]) + n.to_bytes(8, "big"): drawn.randbytes(size_bytes)
        for n in range(count)
    }


def apply(store: RocksStore, entries: dict[bytes, bytes | None] | Entries, at: Marker) -> None:
    keys = sorted(entries)
    store.apply(keys, [entries[key] for key in keys], at)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "db")


@pytest.fixture
def store(path: str) -> Iterator[RocksStore]:
    opened = RocksStore.open(path, TINY)
    yield opened
    opened.close()


# --- what it holds -------------------------------------------------------------------------------


def test_a_new_store_is_empty_and_stands_nowhere(store: RocksStore) -> None:
    assert store.marker() is None
    assert list(store.scan()) == []
    assert store.get(b"\0\0") is None
    assert store.multi_get([]) == []


def test_a_delta_is_read_back_in_every_way_and_survives_a_reopen(path: str) -> None:
    entries = entries_of(500)
    keys = sorted(entries)
    store = RocksStore.open(path, TINY)
    apply(store, entries, marker(3))
    for _ in range(2):
        assert [store.get(key) for key in keys] == [entries[key] for key in keys]
        assert store.multi_get([b"\0\0none", *keys]) == [None, *(entries[key] for key in keys)]
        assert list(store.scan()) == sorted(entries.items())
        assert store.marker() == marker(3)
        store.close()
        store = RocksStore.open(path, TINY)
    store.close()


def test_none_deletes_and_an_empty_value_does_not(store: RocksStore) -> None:
    store.apply([b"a", b"b", b"c"], [b"1", b"2", b""], marker(0))
    store.apply([b"a", b"b", b"x"], [None, b"", None], marker(1))
    assert list(store.scan()) == [(b"b", b""), (b"c", b"")]
    assert store.multi_get([b"a", b"b", b"c", b"x"]) == [None, b"", b"", None]


def test_multi_get_answers_in_the_order_asked_with_repeats(store: RocksStore) -> None:
    store.apply([b"a", b"b"], [b"1", b"2"], marker(0))
    assert store.multi_get([b"b", b"zz", b"a", b"b"]) == [b"2", None, b"1", b"2"]


def test_applying_a_delta_again_changes_nothing(store: RocksStore) -> None:
    store.apply([b"a", b"b", b"c"], [b"1", b"2", b"3"], marker(0))
    for _ in range(2):
        store.apply([b"a", b"b", b"d"], [None, b"x", b"4"], marker(1))
        assert list(store.scan()) == [(b"b", b"x"), (b"c", b"3"), (b"d", b"4")]
        assert store.marker() == marker(1)


def test_an_epoch_without_changes_moves_the_marker(store: RocksStore) -> None:
    store.apply([b"a"], [b"1"], marker(0))
    store.apply([], [], marker(1))
    assert store.marker() == marker(1)
    assert list(store.scan()) == [(b"a", b"1")]


# --- scans ---------------------------------------------------------------------------------------

EDGES = [
    b"\0\0\0\1",
    b"\0\0\0\1\0",
    b"\0\0\0\1\xff",
    b"\0\0\0\1\xff\xff",
    b"\0\0\0\1\xff\xff\0",
    b"\0\0\0\2",
    b"\0\0\xff\xff",
    b"\0\0\xff\xff\xff",
    b"\0\1\0\0",
    b"\0\xff",
    b"\0\xff\xff\xff",
    b"\1\0\0\1",
    b"\x7f\xff\xff\xff\xff",
]
PREFIXES = sorted({key[:length] for key in EDGES for length in range(len(key) + 1)} | {b"\0\2"})


@pytest.mark.parametrize("flushed", [False, True], ids=["memtable", "file"])
def test_a_scan_gives_what_starts_with_its_prefix_and_nothing_else(
    path: str, flushed: bool
) -> None:
    store = RocksStore.open(path, TINY)
    store.apply(EDGES, EDGES, marker(0))
    if flushed:
        store.close()
        store = RocksStore.open(path, TINY)
    for prefix in PREFIXES:
        expected = [(key, key) for key in sorted(EDGES) if key.startswith(prefix)]
        assert list(store.scan(prefix)) == expected, prefix
    store.close()


def test_the_marker_is_not_part_of_the_state(store: RocksStore) -> None:
    store.apply([b"\x7f\xff"], [b"last"], marker(0))
    assert list(store.scan()) == [(b"\x7f\xff", b"last")]
    for prefix in (b"\xff", b"\xff\xff", b"\xff\xffmarker"):
        assert list(store.scan(prefix)) == []


def test_a_scan_sees_the_moment_it_was_started(store: RocksStore) -> None:
    store.apply([b"a", b"b"], [b"1", b"2"], marker(0))
    scan = store.scan()
    assert next(scan) == (b"a", b"1")
    store.apply([b"b", b"c"], [None, b"3"], marker(1))
    assert list(scan) == [(b"b", b"2")]


def test_a_scan_left_half_way_does_not_keep_the_lock(path: str) -> None:
    store = RocksStore.open(path, TINY)
    store.apply([b"a", b"b"], [b"1", b"2"], marker(0))
    scan = store.scan()
    next(scan)
    scan.close()
    store.close()
    RocksStore.open(path, TINY).close()


@pytest.mark.parametrize("for_maps", [False, True])
def test_a_store_that_is_only_let_go_of_does_not_keep_the_lock(path: str, for_maps: bool) -> None:
    """As what an error leaves behind half opened; with nothing in it that waits for the gc."""
    settings = replace(TINY, for_maps=for_maps, whole_filters=for_maps)
    gc.disable()
    try:
        for epoch in range(2):
            store = RocksStore.open(path, settings)
            store.apply([b"a", b"b"], [b"1", b"2"], marker(epoch))
            store.flush()
            assert store.level0_files() == epoch + 1
            del store
        RocksStore.open(path, settings).close()
    finally:
        gc.enable()


# --- the marker and the batches ------------------------------------------------------------------


class PowerCut(Exception):
    """Stands for a crash; RocksDB never raises it."""


def cut_after(monkeypatch: pytest.MonkeyPatch, store: RocksStore, batches: int) -> None:
    """Let so many batches through, then fail."""
    write, left = store._write, iter(range(batches))

    def counted(*args: object) -> None:
        if next(left, None) is None:
            raise PowerCut
        write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "_write", counted)


@pytest.mark.parametrize("batches", range(6))
def test_a_store_cut_between_two_batches_says_what_it_is_good_for(
    path: str, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    monkeypatch.setattr(store_module, "_BATCH_ROWS", 100)
    before = entries_of(300)
    after: Entries = {**before, **entries_of(350, seed=1)}
    store = RocksStore.open(path, TINY)
    apply(store, before, marker(0))
    # 350 rows: a batch that says what is coming, three of rows, one of rows and the marker.
    cut_after(monkeypatch, store, batches)
    if batches < 5:
        with pytest.raises(LocalCopyError):
            apply(store, after, marker(1))
    else:
        apply(store, after, marker(1))
    store.close()

    store = RocksStore.open(path, TINY)
    found, content = store.marker(), dict(store.scan())
    if batches == 0:
        assert found == marker(0)
        assert content == before
    elif batches < 5:
        assert found == msgspec.structs.replace(marker(0), applying=marker(1).chain)
        assert (content == before) is (batches == 1)
        assert content != after
        # It is good for that epoch: applied again, it is whole.
        monkeypatch.undo()
        apply(store, after, marker(1))
        assert dict(store.scan()) == after
        assert store.marker() == marker(1)
    else:
        assert found == marker(1)
        assert content == after
    store.close()


@pytest.mark.parametrize("batches", [1, 3])
def test_a_base_cut_between_two_batches_leaves_no_marker(
    path: str, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    monkeypatch.setattr(store_module, "_BATCH_ROWS", 100)
    store = RocksStore.open(path, TINY)
    cut_after(monkeypatch, store, batches)
    with pytest.raises(LocalCopyError):
        apply(store, entries_of(350), marker(7))
    store.close()
    store = RocksStore.open(path, TINY)
    assert store.marker() is None
    store.close()


@pytest.mark.parametrize("rows", [0, 1, 99, 100])
def test_a_delta_of_one_batch_is_all_or_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(store_module, "_BATCH_ROWS", 100)
    store = RocksStore.open(path, TINY)
    apply(store, entries_of(50), marker(0))
    cut_after(monkeypatch, store, 0)
    with pytest.raises(LocalCopyError):
        apply(store, entries_of(rows, seed=1), marker(1))
    store.close()
    store = RocksStore.open(path, TINY)
    assert store.marker() == marker(0)
    assert dict(store.scan()) == entries_of(50)
    cut_after(monkeypatch, store, 1)
    apply(store, entries_of(rows, seed=1), marker(1))
    assert store.marker() == marker(1)
    store.close()


DIE = """
import os, sys
from statebackend.rocks import store as module
from tests.rocks.test_store import TINY, apply, cut_after, entries_of, marker
module._BATCH_ROWS = 500
store = module.RocksStore.open(sys.argv[1], TINY)
write, left = store._write, iter(range(int(sys.argv[2])))
def until(*args):
    if next(left, None) is None:
        os._exit(9)
    write(*args)
store._write = until
for epoch in (1, 2):
    apply(store, entries_of(4000, seed=epoch, size_bytes=100), marker(epoch))
os._exit(9)
"""


@pytest.mark.parametrize("batches", [4, 9, 13, 18])
def test_a_process_that_dies_leaves_an_epoch_or_a_store_that_says_otherwise(
    path: str, batches: int
) -> None:
    """Nothing is closed or flushed: only what RocksDB wrote by itself (its buffer is full) stays.

    Two epochs of nine batches each, cut anywhere.
    """
    store = RocksStore.open(path, TINY)
    apply(store, entries_of(4000, size_bytes=100), marker(0))
    store.close()
    done = subprocess.run(
        [sys.executable, "-c", DIE, path, str(batches)], cwd=ROOT, check=False, timeout=60
    )
    assert done.returncode == 9
    store = RocksStore.open(path, TINY)
    found = store.marker()
    assert found is not None
    next_chain = marker(found.epoch + 1).chain
    assert found.applying in ("", next_chain)
    if not found.applying:
        assert dict(store.scan()) == entries_of(4000, seed=found.epoch, size_bytes=100)
    # In either case the epoch after it brings it to where it should be.
    following = entries_of(4000, seed=found.epoch + 1, size_bytes=100)
    apply(store, following, marker(found.epoch + 1))
    assert dict(store.scan()) == following
    store.close()


def test_no_write_ahead_log_is_kept(store: RocksStore, path: str) -> None:
    apply(store, entries_of(200), marker(0))
    assert sum(log.stat().st_size for log in Path(path).glob("*.log")) == 0


DEEP = b'{"x":' + b"[" * 100_000


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"job_id": 3}', b"\xff\xfe", b"null", DEEP])
def test_a_marker_that_does_not_parse_is_damage(store: RocksStore, raw: bytes) -> None:
    store._db[store_module._MARKER_KEY] = raw
    with pytest.raises(LocalCopyError, match="marker"):
        store.marker()


def test_a_marker_of_a_later_release_with_more_fields_is_read(store: RocksStore) -> None:
    fields = {**msgspec.to_builtins(marker(5)), "later": 1}
    store._db[store_module._MARKER_KEY] = msgspec.json.encode(fields)
    assert store.marker() == marker(5)


# --- damage --------------------------------------------------------------------------------------


def _filled(path: str, rows: int = 3000) -> Entries:
    entries = entries_of(rows)
    store = RocksStore.open(path, TINY)
    apply(store, entries, marker(0))
    store.close()
    return entries


def _tables(path: str) -> list[Path]:
    return sorted(Path(path).glob("*.sst"))


def _flip(file: Path, position: int) -> None:
    with file.open("r+b") as handle:
        handle.seek(position)
        old = handle.read(1)
        handle.seek(position)
        handle.write(bytes([old[0] ^ 0xFF]))


def test_a_flipped_byte_in_a_block_is_an_error_in_get_multi_get_and_scan(path: str) -> None:
    entries = _filled(path)
    (table,) = _tables(path)
    _flip(table, table.stat().st_size // 2)
    store = RocksStore.open(path, TINY)
    keys = sorted(entries)
    with pytest.raises(LocalCopyError, match="Corruption"):
        list(map(store.get, keys))
    with pytest.raises(LocalCopyError, match="Corruption"):
        store.multi_get(keys)
    with pytest.raises(LocalCopyError, match="Corruption"):
        list(store.scan())
    with pytest.raises(LocalCopyError, match="Corruption"):
        list(itertools.chain.from_iterable(store.scan(bytes([0, group])) for group in range(8)))
    store.close()


def test_wherever_a_byte_is_flipped_nothing_wrong_is_read(path: str, tmp_path: Path) -> None:
    """Data, filter, index, properties, footer: the right bytes or a typed error, never less."""
    entries = _filled(path, rows=1200)
    keys = sorted(entries)
    (table,) = _tables(path)
    size_bytes = table.stat().st_size
    positions = [*range(0, size_bytes, size_bytes // 30), *range(size_bytes - 200, size_bytes, 13)]
    refused = 0
    for number, position in enumerate(positions):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(path, copy)
        _flip(copy / table.name, position)
        # A cache of its own: copies share blocks in the cache that a process has for one size.
        settings = replace(TINY, block_cache_bytes=TINY.block_cache_bytes + number)
        refused += _reads_right_or_says_so(str(copy), entries, keys, settings)
        shutil.rmtree(copy)
    assert refused > len(positions) * 0.9


def _reads_right_or_says_so(
    path: str, entries: Entries, keys: list[bytes], settings: RocksSettings
) -> bool:
    """Whether damage was reported; anything else than that or the right answer fails."""
    refused = False
    try:
        store = RocksStore.open(path, settings)
    except LocalCopyError:
        return True
    for read in (
        lambda: {key: store.get(key) for key in keys},
        lambda: dict(zip(keys, store.multi_get(keys), strict=True)),
        lambda: dict(store.scan()),
    ):
        try:
            assert read() == entries
        except LocalCopyError:
            refused = True
    store.close()
    return refused


def test_a_table_file_cut_short_is_noticed_at_open(path: str) -> None:
    _filled(path)
    (table,) = _tables(path)
    os.truncate(table, table.stat().st_size - 1)
    with pytest.raises(LocalCopyError, match="damaged"):
        RocksStore.open(path, TINY)


def test_a_missing_table_file_is_noticed_at_open(path: str) -> None:
    _filled(path)
    _tables(path)[0].unlink()
    with pytest.raises(LocalCopyError, match="damaged"):
        RocksStore.open(path, TINY)


@pytest.mark.parametrize("text", ["MANIFEST-999999\n", "nonsense", ""])
def test_a_foreign_current_file_is_damage(path: str, text: str) -> None:
    _filled(path)
    (Path(path) / "CURRENT").write_text(text)
    with pytest.raises(LocalCopyError):
        RocksStore.open(path, TINY)


def test_a_damaged_manifest_is_damage(path: str) -> None:
    _filled(path)
    (manifest,) = Path(path).glob("MANIFEST-*")
    _flip(manifest, manifest.stat().st_size // 2)
    with pytest.raises(LocalCopyError, match="damaged"):
        RocksStore.open(path, TINY)


def test_a_table_file_of_another_store_is_not_taken_for_this_one_s(
    path: str, tmp_path: Path
) -> None:
    _filled(path)
    other = str(tmp_path / "other")
    _filled(other, rows=2000)
    ours, theirs = _tables(path)[0], _tables(other)[0]
    assert ours.name == theirs.name  # names alone tell nothing
    shutil.copy(theirs, ours)
    with pytest.raises(LocalCopyError, match="damaged"):
        RocksStore.open(path, TINY)


def test_a_file_in_the_store_s_place_is_a_local_copy_error(tmp_path: Path) -> None:
    place = tmp_path / "db"
    place.write_text("not a directory")
    with pytest.raises(LocalCopyError):
        RocksStore.open(str(place), TINY)


@pytest.mark.parametrize(
    ("message", "kind", "says"),
    [
        ("Corruption: block checksum mismatch", LocalCopyError, "is damaged"),
        ("Invalid argument: no such", LocalCopyError, "is damaged"),
        ("Not found: /x", LocalCopyError, "is damaged"),
        ("Result incomplete: ", LocalCopyError, "is damaged"),
        ("IO error: Input/output error", LocalCopyError, "Check the disk"),
        ("IO error: No space left on device: /disk/db/1.sst", LocalDirError, "with room"),
        ("IO error: While mkdir: Read-only file system", LocalDirError, "cannot be written"),
        ("IO error: While open: Permission denied", LocalDirError, "cannot be written"),
        ("IO error: lock hold by current process", StoreBusyError, "open in another process"),
        ("IO error: While lock file: /x/LOCK: busy", StoreBusyError, "open in another process"),
        ("something new", LocalCopyError, "failed"),
    ],
)
def test_every_message_of_rocksdb_has_a_type(
    message: str, kind: type[StateBackendError], says: str
) -> None:
    error = classify(Exception(message), "/disk/db")
    assert type(error) is kind
    assert "/disk/db" in str(error)
    assert says in str(error)


# --- the lock ------------------------------------------------------------------------------------

HOLD = """
import sys
import threading
from statebackend.rocks.store import RocksStore
store = RocksStore.open(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
store.close()
"""


def test_a_store_that_another_process_has_open_is_busy_and_free_once_it_died(path: str) -> None:
    _filled(path, rows=10)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, path],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(StoreBusyError, match="another process"):
            RocksStore.open(path, TINY)
    finally:
        holder.kill()
        holder.communicate()
    store = RocksStore.open(path, TINY)
    assert store.marker() == marker(0)
    store.close()


def test_a_store_is_busy_within_one_process_too(path: str, store: RocksStore) -> None:
    with pytest.raises(StoreBusyError):
        RocksStore.open(path, TINY)


# --- upkeep --------------------------------------------------------------------------------------


def fill_level0(path: str, *, files: int) -> Entries:
    """A store that was never open for long enough to merge anything."""
    expected: Entries = {}
    store = RocksStore.open(path, TINY, compacting=False)
    for epoch in range(files):
        changes = entries_of(20, seed=epoch)
        expected.update(changes)
        apply(store, changes, marker(epoch))
        store.flush()
    assert store.level0_files() == files
    store.close()
    return expected


def merged_by_itself(store: RocksStore) -> bool:
    """Whether level 0 becomes less than full while nobody does anything."""
    tick = threading.Event()
    return any(store.level0_files() < 8 or tick.wait(0.02) for _ in range(1500))


class NotWaitedFor:
    """A database that nobody may merge by hand."""

    def __init__(self, db: Any) -> None:
        self._db = db

    def compact_range(self, *args: object) -> None:
        raise AssertionError("somebody waits for a merge")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


def test_a_full_level_0_is_merged_beside_the_first_rows(path: str) -> None:
    expected = fill_level0(path, files=20)
    store = RocksStore.open(path, TINY)
    assert dict(store.scan()) == expected
    apply(store, {b"\0\2\0\1": b"new"}, marker(20))  # meanwhile
    store.checkpoint(path + "-taken")
    store.branch(path + "-part", ((0, 3),), TINY)
    assert merged_by_itself(store)
    assert dict(store.scan()) == {**expected, b"\0\2\0\1": b"new"}
    store.close()
    for copy in (path, path + "-taken"):
        again = RocksStore.open(copy, TINY)
        assert dict(again.scan()) == {**expected, b"\0\2\0\1": b"new"}
        assert again.marker() == marker(20)
        again.close()


def test_a_store_that_is_closed_while_it_merges_loses_nothing(path: str) -> None:
    expected = fill_level0(path, files=20)
    for _ in range(3):
        RocksStore.open(path, TINY).close()
    store = RocksStore.open(path, TINY)
    assert dict(store.scan()) == expected
    assert store.marker() == marker(19)
    store.close()


def test_rows_that_were_flushed_without_their_marker_are_merged_too(path: str) -> None:
    store = RocksStore.open(path, TINY, compacting=False)
    apply(store, {b"\0\0": b""}, marker(0))
    batches = [(sorted(rows), [rows[key] for key in sorted(rows)]) for rows in _many(40)]
    store.apply_batches(batches, marker(1))  # over the buffer: flushed as it goes
    store.flush()
    assert store.level0_files() >= 8
    store.close()
    store = RocksStore.open(path, TINY)
    assert merged_by_itself(store)
    assert store.marker() == marker(1)
    store.close()


def _many(pieces: int) -> list[Entries]:
    return [entries_of(300, seed=seed, size_bytes=100) for seed in range(pieces)]


def test_what_was_only_read_is_neither_flushed_nor_waited_for(path: str) -> None:
    """RocksDB's flush waits while level 0 is as full as it may be, also where it has no rows."""
    fill_level0(path, files=24)
    counted = Flushes(path)
    store = counted.open()
    store.flush()
    store.close()
    assert counted.flushes == 0
    store = counted.open()
    apply(store, {b"\0\2\0\1": b"new"}, marker(24))
    store.close()
    assert counted.flushes == 1
    store = counted.open()
    assert store.marker() == marker(24)
    store.close()


class Flushes:
    """Counts those of the stores that it opens."""

    def __init__(self, path: str) -> None:
        self.path, self.flushes = path, 0

    def open(self) -> RocksStore:
        store, counting = RocksStore.open(self.path, TINY), self

        class Counted(NotWaitedFor):
            def flush(self) -> None:
                counting.flushes += 1
                self._db.flush()

        store._db = Counted(store._db)
        return store


def test_a_copy_is_taken_without_waiting_for_a_merge(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB's flush waits while level 0 is full; a checkpoint with the interpreter held."""
    expected = fill_level0(path, files=24)
    store = RocksStore.open(path, TINY, compacting=False)
    told: list[str] = []

    class Told(NotWaitedFor):
        def set_options(self, options: dict[str, str]) -> None:
            told.append(options["level0_slowdown_writes_trigger"])
            self._db.set_options(options)

        def flush(self) -> None:
            told.append("flush")
            self._db.flush()

    class Checkpoints:
        def __init__(self, db: Any) -> None:
            self._real = Checkpoint(db._db)

        def create_checkpoint(self, path: str) -> None:
            told.append("checkpoint")
            self._real.create_checkpoint(path)

    store._db = Told(store._db)
    monkeypatch.setattr(store_module, "Checkpoint", Checkpoints)
    changes = {b"\0\2\0\1": b"new"}
    apply(store, changes, marker(24))
    store.checkpoint(path + "-taken")
    raised, lowered = str(1 << 20), "20"
    assert told == [raised, "flush", "checkpoint", lowered]
    store.close()
    again = RocksStore.open(path + "-taken", TINY)
    assert dict(again.scan()) == {**expected, **changes}
    again.close()


def test_a_store_that_is_closed_after_each_epoch_loses_nothing(path: str) -> None:
    expected: Entries = {}
    for epoch in range(40):
        store = RocksStore.open(path, TINY)
        changes = entries_of(20, seed=epoch)
        expected.update(changes)
        apply(store, changes, marker(epoch))
        store.close()
        again = RocksStore.open(path, TINY, compacting=False)
        assert dict(again.scan()) == expected
        again.close()


def test_a_copy_goes_on_beside_merges_while_a_flush_comes_to_its_end(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_up: list[bool] = []
    monkeypatch.setattr(
        store_module, "hold_up_writes", lambda db, full, stop: held_up.append(full < 100)
    )
    monkeypatch.setattr(store_module, "_NEARLY_FULL", LEVEL0_FULL_FILES)
    store = RocksStore.open(path, TINY)
    with store._beside_merges():
        with store._beside_merges():
            pass
        assert held_up == [False, False]
    assert held_up == [False, False, True]
    store.close()


def test_closing_twice_is_fine(path: str) -> None:
    store = RocksStore.open(path, TINY)
    store.apply([b"a"], [b"1"], marker(0))
    store.close()
    store.close()
    again = RocksStore.open(path, TINY)
    assert again.get(b"a") == b"1"
    again.close()


def test_a_close_that_cannot_flush_raises_a_typed_error(path: str) -> None:
    store = RocksStore.open(path, TINY)
    store.apply([b"a"], [b"1"], marker(0))
    shutil.rmtree(path)
    with pytest.raises(LocalCopyError):
        store.close()
    # It is closed all the same: the lock is free.
    store.close()
    RocksStore.open(path, TINY).close()


def test_a_store_that_must_be_there_is_not_made_anew(tmp_path: Path) -> None:
    """What was put together a moment ago may have been taken away: empty is another state."""
    for path in (tmp_path / "none", tmp_path / "emptied"):
        if path.name == "emptied":
            path.mkdir()
        with pytest.raises(LocalCopyError):
            RocksStore.open(str(path), TINY, make=False)
        assert not (path / "CURRENT").exists()
