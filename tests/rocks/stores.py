"""One store on RocksDB, small enough that its reads reach the disk, and what is written to it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from statebackend.rocks.store import Marker, RocksSettings, RocksStore

__all__ = ["path", "store"]

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


def _filled(path: str, rows: int = 3000) -> Entries:
    entries = entries_of(rows)
    store = RocksStore.open(path, TINY)
    apply(store, entries, marker(0))
    store.close()
    return entries
