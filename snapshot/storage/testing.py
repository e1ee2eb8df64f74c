"""The suite that every object store passes.

Subclass `StoreTests`, give it a `store` fixture that yields an empty store, and let pytest run it:

    class TestMyStore(StoreTests):
        @pytest.fixture
        def store(self) -> ObjectStore:
            return MyStore(...)
"""

# ruff: noqa: D102  (the names of the tests are the sentences)

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapshot.storage.object_store import CreateOutcome, ObjectStore
from statebackend.errors import (
    LocalCopyError,
    ObjectNotFoundError,
    SettingError,
    StoreCapabilityError,
)

__all__ = ["StoreTests"]

RACERS = 8


def creating(store: ObjectStore) -> ObjectStore:
    """The store; skips the test if the store says that it cannot create if absent."""
    if not store.capabilities.create_if_absent:
        pytest.skip(store.capabilities.reason)
    return store


class StoreTests:
    """What every store promises, a sentence each."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        """An empty store; subclasses override this."""
        raise NotImplementedError

    def test_the_uri_is_in_the_repr(self, store: ObjectStore) -> None:
        assert store.uri
        assert store.uri in repr(store)

    def test_a_store_says_why_it_cannot_do_something(self, store: ObjectStore) -> None:
        can = store.capabilities
        everything = can.create_if_absent and can.ranged_read and can.atomic_put and can.streamed
        assert everything or can.reason

    def test_a_store_that_cannot_create_if_absent_refuses_to(self, store: ObjectStore) -> None:
        if not store.capabilities.create_if_absent:
            with pytest.raises(StoreCapabilityError):
                store.create("log/0", [b"x"])
            assert store.list("") == []

    def test_what_is_put_is_read_back(self, store: ObjectStore) -> None:
        store.put("data/a", [b"one", bytearray(b"two"), memoryview(b"three")])
        assert store.get("data/a") == b"onetwothree"

    def test_parts_of_other_item_sizes_are_written_as_bytes(self, store: ObjectStore) -> None:
        store.put("data/a", [memoryview(bytes(8)).cast("Q")])
        assert store.get("data/a") == bytes(8)

    def test_a_later_put_replaces_the_whole_object(self, store: ObjectStore) -> None:
        store.put("data/a", [b"a long first body"])
        store.put("data/a", [b"short"])
        assert store.get("data/a") == b"short"

    def test_an_empty_object_is_an_object(self, store: ObjectStore) -> None:
        store.put("data/empty", [])
        assert store.get("data/empty") == b""
        assert store.get_range("data/empty", 0, 1) == b""
        assert store.get_tail("data/empty", 1) == (b"", 0)

    def test_a_large_object_survives_whole(self, store: ObjectStore) -> None:
        body = bytes(range(256)) * 8192
        store.put("data/large", [body[:1000], body[1000:]])
        assert store.get("data/large") == body

    @pytest.mark.parametrize("size_bytes", [0, 1, 3_000_000])
    def test_a_file_is_uploaded_as_it_is(
        self, store: ObjectStore, tmp_path: Path, size_bytes: int
    ) -> None:
        body = (bytes(range(251)) * (size_bytes // 251 + 1))[:size_bytes]
        (tmp_path / "file to upload").write_bytes(body)
        store.put("data/file", [b"something before"])
        store.put_file("data/file", tmp_path / "file to upload")
        assert store.get("data/file") == body

    def test_a_file_that_cannot_be_read_is_not_the_store_s_failure(
        self, store: ObjectStore, tmp_path: Path
    ) -> None:
        for path in (tmp_path / "not there", tmp_path):
            with pytest.raises(LocalCopyError, match=str(path)):
                store.put_file("data/file", path)
        assert store.list("") == []

    @pytest.mark.parametrize("chunk_bytes", [1, 3, 10, 11])
    def test_an_object_comes_in_pieces_of_the_size_asked_for(
        self, store: ObjectStore, chunk_bytes: int
    ) -> None:
        store.put("data/digits", [b"0123456789"])
        chunks = list(store.get_chunks("data/digits", chunk_bytes))
        assert b"".join(chunks) == b"0123456789"
        assert {len(chunk) for chunk in chunks[:-1]} <= {chunk_bytes}
        assert 0 < len(chunks[-1]) <= chunk_bytes

    def test_an_empty_object_has_no_pieces(self, store: ObjectStore) -> None:
        store.put("data/empty", [])
        assert list(store.get_chunks("data/empty")) == []

    def test_a_large_object_comes_in_pieces(self, store: ObjectStore) -> None:
        body = bytes(range(256)) * 8192
        store.put("data/large", [body])
        assert b"".join(store.get_chunks("data/large", 100_000)) == body

    def test_pieces_that_nobody_takes_hurt_nobody(self, store: ObjectStore) -> None:
        store.put("data/large", [bytes(1_000_000)])
        for _ in range(40):  # more than a pool of connections holds
            next(iter(store.get_chunks("data/large", 1000)))
        assert store.get("data/large") == bytes(1_000_000)

    def test_create_on_a_free_name_creates(self, store: ObjectStore) -> None:
        creating(store)
        assert store.create("log/0", [b"mine"]) is CreateOutcome.CREATED
        assert store.get("log/0") == b"mine"

    def test_create_on_a_taken_name_changes_nothing(self, store: ObjectStore) -> None:
        creating(store)
        store.create("log/0", [b"first"])
        assert store.create("log/0", [b"second"]) is CreateOutcome.EXISTS
        assert store.get("log/0") == b"first"

    def test_create_sees_what_put_wrote(self, store: ObjectStore) -> None:
        creating(store)
        store.put("log/0", [b"put"])
        assert store.create("log/0", [b"created"]) is CreateOutcome.EXISTS

    def test_a_deleted_name_is_free_again(self, store: ObjectStore) -> None:
        creating(store)
        store.create("log/0", [b"first"])
        store.delete(["log/0"])
        assert store.create("log/0", [b"second"]) is CreateOutcome.CREATED

    @pytest.mark.parametrize(
        ("start", "length", "expected"),
        [(0, 3, b"012"), (4, 2, b"45"), (7, 10, b"789"), (10, 1, b""), (99, 5, b"")],
    )
    def test_a_range_ends_where_the_object_ends(
        self, store: ObjectStore, start: int, length: int, expected: bytes
    ) -> None:
        store.put("data/digits", [b"0123456789"])
        assert store.get_range("data/digits", start, length) == expected

    @pytest.mark.parametrize(("length", "expected"), [(1, b"9"), (4, b"6789"), (99, b"0123456789")])
    def test_a_tail_comes_with_the_size(
        self, store: ObjectStore, length: int, expected: bytes
    ) -> None:
        store.put("data/digits", [b"0123456789"])
        assert store.get_tail("data/digits", length) == (expected, 10)

    @pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, 0), (0, -5)])
    def test_a_range_that_means_nothing_is_refused(
        self, store: ObjectStore, start: int, length: int
    ) -> None:
        store.put("data/digits", [b"0123456789"])
        with pytest.raises(SettingError):
            store.get_range("data/digits", start, length)
        if length < 1:
            with pytest.raises(SettingError):
                store.get_tail("data/digits", length)
            with pytest.raises(SettingError):
                store.get_chunks("data/digits", length)

    def test_every_read_of_an_absent_object_says_so_and_names_it(self, store: ObjectStore) -> None:
        store.put("data/there", [b"x"])
        for read in (
            lambda: store.get("data/gone"),
            lambda: store.get_range("data/gone", 0, 1),
            lambda: store.get_tail("data/gone", 1),
            lambda: list(store.get_chunks("data/gone")),
        ):
            with pytest.raises(ObjectNotFoundError, match="data/gone"):
                read()

    def test_a_folder_is_not_an_object(self, store: ObjectStore) -> None:
        store.put("data/deep/a", [b"x"])
        with pytest.raises(ObjectNotFoundError):
            store.get("data/deep")
        store.delete(["data/deep"])
        assert store.get("data/deep/a") == b"x"

    def test_a_listing_is_sorted_and_has_sizes(self, store: ObjectStore) -> None:
        for name in ("log/2", "log/10", "log/1", "data/z"):
            store.put(name, [name.encode()])
        found = [(info.name, info.size_bytes) for info in store.list("log/")]
        assert found == [("log/1", 5), ("log/10", 6), ("log/2", 5)]

    def test_a_listing_says_when_an_object_was_written_if_the_store_knows(
        self, store: ObjectStore
    ) -> None:
        before_ms = time.time_ns() // 10**6
        store.put("data/a", [b"x"])
        [info] = store.list("")
        if info.modified_ms is not None:  # cut to seconds by some, and by another clock
            assert abs(info.modified_ms - before_ms) < 60_000

    def test_a_prefix_is_a_plain_string_prefix(self, store: ObjectStore) -> None:
        for name in ("a/b1/x", "a/b2", "a/c", "ab"):
            store.put(name, [b""])
        assert [info.name for info in store.list("a/b")] == ["a/b1/x", "a/b2"]
        assert [info.name for info in store.list("a")] == ["a/b1/x", "a/b2", "a/c", "ab"]
        assert len(store.list("")) == 4

    def test_a_listing_of_nothing_is_empty(self, store: ObjectStore) -> None:
        assert store.list("") == []
        assert store.list("log/") == []

    def test_delete_takes_many_names_and_absent_ones(self, store: ObjectStore) -> None:
        for name in ("data/a", "data/b", "data/c"):
            store.put(name, [b"x"])
        store.delete(["data/a", "data/never", "never/at/all", "data/c"])
        assert [info.name for info in store.list("")] == ["data/b"]
        store.delete([])

    @pytest.mark.parametrize(
        "name",
        [
            *("", "/abs", "a//b", "a/", "..", "a/../b", "./a", ".tmp/x"),
            *("a\\b", "a\x00b", "a\nb", "x" * 256, "/".join(["x" * 200] * 6)),
        ],
    )
    def test_a_name_that_could_mean_another_place_is_refused(
        self, store: ObjectStore, name: str, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_bytes(b"x")
        for call in (
            lambda: store.put(name, [b"x"]),
            lambda: store.put_file(name, tmp_path / "file"),
            lambda: store.create(name, [b"x"]),
            lambda: list(store.get_chunks(name)),
            lambda: store.get(name),
            lambda: store.get_range(name, 0, 1),
            lambda: store.get_tail(name, 1),
            lambda: store.delete([name]),
        ):
            with pytest.raises(SettingError):
                call()
        assert store.list("") == []

    def test_one_bad_name_among_many_deletes_nothing(self, store: ObjectStore) -> None:
        store.put("data/a", [b"x"])
        with pytest.raises(SettingError):
            store.delete(["data/a", "../b"])
        assert store.get("data/a") == b"x"

    def test_names_may_hold_spaces_and_other_scripts(self, store: ObjectStore) -> None:
        store.put("data/größe = 1+2%20", [b"x"])
        assert [info.name for info in store.list("data/g")] == ["data/größe = 1+2%20"]
        assert store.get("data/größe = 1+2%20") == b"x"

    def test_of_racing_creators_exactly_one_wins(self, store: ObjectStore) -> None:
        creating(store)
        for round_number in range(10):
            name = f"log/{round_number}"
            start = threading.Barrier(RACERS)

            def race(racer: int, name: str = name, start: threading.Barrier = start) -> bool:
                start.wait()
                return store.create(name, [b"%d" % racer]) is CreateOutcome.CREATED

            with ThreadPoolExecutor(RACERS) as pool:
                won = list(pool.map(race, range(RACERS)))
            assert won.count(True) == 1
            assert store.get(name) == b"%d" % won.index(True)

    def test_a_reader_never_sees_half_an_object(self, store: ObjectStore) -> None:
        if not store.capabilities.atomic_put:
            pytest.skip(store.capabilities.reason)
        bodies = [bytes([letter]) * 200_000 for letter in b"abcdef"]
        store.put("data/hot", [bodies[0]])
        done = threading.Event()

        def read() -> int:
            reads = 0
            while not done.is_set() or reads == 0:
                assert store.get("data/hot") in bodies
                tail, total_bytes = store.get_tail("data/hot", 5)
                assert total_bytes == 200_000
                assert len(set(tail)) == 1
                reads += 1
            return reads

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            try:
                for body in bodies * 3:
                    store.put("data/hot", [body[:100_000], body[100_000:]])
            finally:
                done.set()
            assert all(reader.result() for reader in readers)

    def test_a_created_object_appears_whole_or_not_at_all(self, store: ObjectStore) -> None:
        creating(store)
        body = b"x" * 300_000
        seen: set[int] = set()
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                seen.update(info.size_bytes for info in store.list("log/"))

        with ThreadPoolExecutor(1) as pool:
            watcher = pool.submit(watch)
            try:
                for number in range(10):
                    store.create(f"log/{number}", [body])
            finally:
                done.set()
            watcher.result()
        assert seen <= {len(body)}

    def test_a_store_does_not_pickle_and_says_what_to_do(self, store: ObjectStore) -> None:
        with pytest.raises(SettingError, match="open_store"):
            store.__reduce__()
