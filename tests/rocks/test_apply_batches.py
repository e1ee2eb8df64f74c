"""A delta applied in pieces: as in one, and never half applied under a wrong marker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from statebackend.errors import CorruptionError
from statebackend.rocks.store import Marker, RocksStore


def marker(epoch: int) -> Marker:
    return Marker(
        job_id="j",
        operator="o",
        key_group_start=0,
        key_group_end=127,
        epoch=epoch,
        chain=f"{epoch:02x}",
    )


PIECES: list[tuple[list[bytes], list[bytes | None]]] = [
    ([b"a", b"b"], [b"1", None]),
    ([], []),
    ([b"c"], [b"3"]),
    ([b"d", b"e"], [None, b"5"]),
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RocksStore]:
    one = RocksStore.open(str(tmp_path / "db"))
    one.apply([b"b", b"d", b"z"], [b"old", b"old", b"old"], marker(1))
    yield one
    one.close()


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_pieces_are_applied_as_one_delta_would_be(
    store: RocksStore, tmp_path: Path, count: int
) -> None:
    other = RocksStore.open(str(tmp_path / "other"))
    other.apply([b"b", b"d", b"z"], [b"old", b"old", b"old"], marker(1))
    pieces = PIECES[:count]
    keys = [key for some, _ in pieces for key in some]
    values = [value for _, some in pieces for value in some]
    other.apply(keys, values, marker(2))
    store.apply_batches(iter(pieces), marker(2))
    assert list(store.scan()) == list(other.scan())
    assert store.marker() == other.marker() == marker(2)
    other.close()


def test_a_store_left_half_applied_says_which_epoch_it_is_good_for(store: RocksStore) -> None:
    def broken() -> Iterator[Any]:
        yield from PIECES[:3]
        raise CorruptionError("The rest is damaged.")

    with pytest.raises(CorruptionError):
        store.apply_batches(broken(), marker(2))
    assert store.marker() == msgspec.structs.replace(marker(1), applying=marker(2).chain)
    store.apply_batches(PIECES, marker(2))
    assert store.marker() == marker(2)
    assert dict(store.scan()) == {b"a": b"1", b"c": b"3", b"e": b"5", b"z": b"old"}


def test_what_fails_before_the_second_piece_changes_nothing(store: RocksStore) -> None:
    def broken() -> Iterator[Any]:
        yield PIECES[0]
        raise CorruptionError("The rest is damaged.")

    before = list(store.scan())
    with pytest.raises(CorruptionError):
        store.apply_batches(broken(), marker(2))
    assert store.marker() == marker(1)
    assert list(store.scan()) == before


def test_a_new_store_may_be_filled_in_pieces(tmp_path: Path) -> None:
    new = RocksStore.open(str(tmp_path / "new"))
    new.apply_batches(PIECES, marker(2))
    assert new.marker() == marker(2)
    assert dict(new.scan()) == {b"a": b"1", b"c": b"3", b"e": b"5"}
    new.close()
