"""A store in three parts over eight key groups, and what is written to it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from statebackend.rocks.parted import PartedStore, open_store
from statebackend.rocks.parts_layout import Layout, write_layout
from statebackend.rocks.store import Marker, RocksStore
from tests.rocks.stores import TINY

__all__ = ["path", "store"]

# Eight key groups; the first part has two ranges of them.
ROUTES = [(0, 0), (2, 1), (4, 0), (6, 2)]


Model = dict[bytes, bytes]


def make(path: str, routes: Sequence[tuple[int, int]] = ROUTES) -> PartedStore:
    os.mkdir(path)
    parts = [f"p{number}" for number in range(1 + max(part for _, part in routes))]
    for part in parts:
        RocksStore.open(os.path.join(path, part), TINY).close()
    write_layout(path, Layout(parts=parts, routes=list(routes)))
    return opened(path)


def opened(path: str) -> PartedStore:
    store = open_store(path, TINY)
    assert isinstance(store, PartedStore)
    return store


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "db")


@pytest.fixture
def store(path: str) -> Iterator[PartedStore]:
    one = make(path)
    yield one
    one.close()


def rows_of(epoch: int, count: int = 80) -> dict[bytes, bytes | None]:
    """A delta over all key groups; some of it deletes, and some keys are of other epochs too."""
    drawn = random.Random(epoch)
    rows: dict[bytes, bytes | None] = {}
    for _ in range(count):
        key = bytes([0, drawn.randrange(8), 0, 1, drawn.randrange(40)])
        rows[key] = None if drawn.random() < 0.2 else b"%d" % epoch + drawn.randbytes(20)
    return rows


def state_after(epoch: int, count: int = 80) -> Model:
    model: Model = {}
    for one in range(1, epoch + 1):
        changed(model, rows_of(one, count))
    return model


def changed(model: Model, rows: dict[bytes, bytes | None]) -> None:
    for key, value in rows.items():
        if value is None:
            model.pop(key, None)
        else:
            model[key] = value


def apply(store: PartedStore | RocksStore, rows: dict[bytes, Any], at: Marker | None) -> None:
    keys = sorted(rows)
    store.apply(keys, [rows[key] for key in keys], at)
