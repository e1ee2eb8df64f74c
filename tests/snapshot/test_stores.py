"""Every store passes the public suite and the probe; and what the stores of the tests do."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from snapshot.storage import (
    Capabilities,
    CountingStore,
    CreateOutcome,
    LocalStore,
    MemoryStore,
    ObjectStore,
    VerbCount,
    probe,
)
from snapshot.storage.object_store import Buffer, ObjectInfo
from snapshot.storage.testing import StoreTests
from statebackend.errors import (
    ObjectNotFoundError,
    SettingError,
    StoreCapabilityError,
    StoreUnreachableError,
)
from tests.snapshot.fresh_ids import new_id
from tests.support.failing_store import FailingStore, Failure
from tests.support.slow_store import SlowStore


class TestLocalStore(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return LocalStore(tmp_path / "made" / "when needed", new_id=new_id)


class TestMemoryStore(StoreTests):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return MemoryStore()


class TestCountingStore(StoreTests):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return CountingStore(MemoryStore())


class TestSlowStore(StoreTests):
    @pytest.fixture
    def store(self) -> ObjectStore:
        def no_wait(seconds: float) -> None:
            raise AssertionError("nothing was to be waited for")

        return SlowStore(MemoryStore(), sleep_s=no_wait)


class TestFailingStore(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        inner = LocalStore(tmp_path / "store", new_id=new_id)
        return FailingStore(inner, lambda verb, name, call_number: None)


# --- CountingStore, the stores of tests, probe ---------------------------------------------------


def test_counts_are_requests_and_bytes_by_verb(tmp_path: Path) -> None:
    store = CountingStore(MemoryStore())
    store.put("a", [b"123", b"45"])
    store.create("b", [b"1"])
    store.create("b", [b"22"])
    store.get("a")
    store.get_range("a", 1, 2)
    store.get_tail("a", 3)
    assert list(store.get_chunks("a", 2)) == [b"12", b"34", b"5"]
    with pytest.raises(ObjectNotFoundError):
        list(store.get_chunks("gone"))
    (tmp_path / "file").write_bytes(b"1234567")
    store.put_file("c", tmp_path / "file")
    with pytest.raises(ObjectNotFoundError):
        store.get("gone")
    before = store.counts
    store.list("")
    store.delete(["a", "b"])
    assert "list" not in before
    assert store.counts == {
        "put": VerbCount(1, 5),
        "create": VerbCount(2, 3),
        "get": VerbCount(2, 5),
        "get_range": VerbCount(1, 2),
        "get_tail": VerbCount(1, 3),
        "get_chunks": VerbCount(2, 5),
        "put_file": VerbCount(1, 7),
        "list": VerbCount(1, 0),
        "delete": VerbCount(1, 0),
    }


def test_a_call_takes_the_latency_and_its_bytes_the_bandwidth() -> None:
    waits: list[float] = []
    inner = MemoryStore()
    store = SlowStore(inner, sleep_s=waits.append, latency_s=0.5, bytes_per_s=1000)
    store.put("a", [b"x" * 250, b"y" * 250])
    assert waits == [0.75, 0.25]
    waits.clear()
    store.get("a")
    assert waits == [0.25, 0.75]
    waits.clear()
    assert len(list(store.get_chunks("a", 250))) == 2
    assert waits == [0.5, 0.25, 0.25]
    with pytest.raises(SettingError):
        SlowStore(inner, sleep_s=waits.append, latency_s=-1)


def test_a_lost_request_does_nothing_and_a_lost_answer_hides_what_was_done() -> None:
    inner = MemoryStore()
    asked: list[tuple[str, str, int]] = []
    failures: dict[int, Failure] = {1: "before", 2: "after", 3: KeyError("as planned")}

    def plan(verb: str, name: str, call_number: int) -> Failure:
        asked.append((verb, name, call_number))
        return failures.get(call_number) if verb == "create" else None

    store = FailingStore(inner, plan)
    with pytest.raises(StoreUnreachableError):
        store.create("log/0", [b"x"])
    assert inner.list("") == []
    with pytest.raises(StoreUnreachableError):
        store.create("log/0", [b"x"])
    assert inner.get("log/0") == b"x"
    with pytest.raises(KeyError):
        store.create("log/1", [b"x"])
    assert store.create("log/0", [b"x"]) is CreateOutcome.EXISTS
    store.list("log/")
    store.delete(["log/0", "log/1"])
    assert asked[-3:] == [("create", "log/0", 4), ("list", "log/", 1), ("delete", "log/0", 1)]


def test_a_stream_breaks_off_after_its_first_piece() -> None:
    inner = MemoryStore()
    inner.put("a", [b"0123"])
    chunks = FailingStore(inner, lambda *_: "after").get_chunks("a", 2)
    assert next(chunks) == b"01"
    with pytest.raises(StoreUnreachableError):
        next(chunks)


def test_a_memory_store_says_by_its_own_clock_when_an_object_was_written() -> None:
    store = MemoryStore(clock_ms=lambda: 7)
    store.put("a", [b"x"])
    assert [info.modified_ms for info in store.list("")] == [7]


def test_listings_compare_by_name_and_size_whenever_they_were_written() -> None:
    assert ObjectInfo("a", 1, 5) == ObjectInfo("a", 1, 6)
    assert sorted([ObjectInfo("b", 1), ObjectInfo("a", 2, 9)])[0].name == "a"


def test_a_store_is_not_shipped_in_a_closure(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="Ship its URI"):
        pickle.dumps(LocalStore(tmp_path, new_id=new_id))


def test_a_good_store_passes_the_probe_and_nothing_is_left(tmp_path: Path) -> None:
    for store in (LocalStore(tmp_path, new_id=new_id), MemoryStore()):
        probe(store, new_id=new_id)
        assert store.list("") == []


def test_an_unwritable_place_fails_the_probe_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnreachableError, match=f"{tmp_path}/file"):
        probe(LocalStore(tmp_path / "file", new_id=new_id), new_id=new_id)


def test_a_probe_costs_four_requests() -> None:
    store = CountingStore(MemoryStore())
    probe(store, new_id=new_id)
    assert sum(count.requests for count in store.counts.values()) == 4


class Overwrites(MemoryStore):
    def create(self, name: str, parts: list[Buffer]) -> CreateOutcome:  # type: ignore[override]
        self.put(name, parts)
        return CreateOutcome.CREATED


class Forgets(MemoryStore):
    def get(self, name: str) -> bytes:
        raise ObjectNotFoundError(name)


class Alters(MemoryStore):
    def get(self, name: str) -> bytes:
        return super().get(name) + b"!"


class AltersOnce(MemoryStore):
    altered = False

    def get(self, name: str) -> bytes:
        data = super().get(name)
        if not self.altered:
            self.altered = True
            data = bytes([data[0] ^ 1]) + data[1:]
        return data


class SaysThatItCannot(MemoryStore):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create_if_absent=False, ranged_read=True, reason="it is a tape")


def test_a_bit_that_flips_on_its_way_to_the_probe_is_not_the_store_s_inability() -> None:
    store = AltersOnce("good")
    probe(store, new_id=new_id)
    assert store.altered


@pytest.fixture(
    params=[
        (Overwrites, "twice"),
        (Forgets, "not there"),
        (Alters, "other bytes"),
        (SaysThatItCannot, "a tape"),
    ]
)
def incapable(request: pytest.FixtureRequest) -> tuple[ObjectStore, str]:
    kind, reason = request.param
    return kind("bad"), reason


def test_a_store_that_cannot_keep_a_log_is_refused_with_the_reason(
    incapable: tuple[ObjectStore, str],
) -> None:
    store, reason = incapable
    with pytest.raises(StoreCapabilityError, match=reason) as caught:
        probe(store, new_id=new_id)
    assert "memory://bad" in caught.value.what
