"""Reducing and aggregating state: what is kept is what a plain fold gives."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T

from statebackend.errors import KeyContextError, UsageError, ValueMismatchError
from statebackend.rocks.store import Marker, RocksStore
from statebackend.schema.codec import codec_for
from statebackend.state.cells import KeyCursor
from statebackend.state.folding_cells import AggregatingCell, ReducingCell
from statebackend.state.table import MemoryBase, StateTable

NUMBER = codec_for(T.StructType().add("n", T.LongType()))
PAIR = codec_for(T.StructType().add("sum", T.LongType()).add("count", T.LongType()))
MARKER = Marker(job_id="j", operator="o", key_group_start=0, key_group_end=9, epoch=0, chain="c")
KEYS = [b"\1a", b"\1b", b"\1c"]


class Folds:
    def __init__(self, base: Any) -> None:
        self.base = base
        self.table = StateTable(base)
        self.begin()

    def begin(self) -> None:
        self.cursor = KeyCursor()
        self.least = ReducingCell(self.cursor, self.table, "least", 1, NUMBER, min)
        self.mean: AggregatingCell[float] = AggregatingCell(
            self.cursor,
            self.table,
            "mean",
            2,
            PAIR,
            lambda: (0, 0),
            lambda acc, n: (acc[0] + n, acc[1] + 1),
            lambda acc: acc[0] / acc[1],
            lambda one, other: (one[0] + other[0], one[1] + other[1]),
        )
        self.at(0)

    def at(self, owner: int) -> None:
        self.cursor.load([b"\0\5"] * len(KEYS), KEYS)
        self.cursor.index = owner

    def end(self, *, confirm: bool) -> None:
        frozen = self.table.freeze(0)
        if confirm:
            rows = frozen.sorted()
            for earlier in self.table._frozen[:-1]:
                self._apply(earlier)
            self._apply(frozen, rows)
        self.begin()

    def _apply(self, frozen: Any, rows: Any = None) -> None:
        rows = rows or frozen.sorted()
        self.base.apply(*rows, *([MARKER] if isinstance(self.base, RocksStore) else []))
        self.table.applied(frozen)


@pytest.fixture
def folds() -> Folds:
    return Folds(MemoryBase())


def test_nothing_added_is_nothing_there(folds: Folds) -> None:
    assert (folds.least.exists(), folds.least.get()) == (False, None)
    assert (folds.mean.exists(), folds.mean.get(), folds.mean.accumulator()) == (False, None, None)
    folds.least.add_all([])
    folds.mean.add_all([])
    folds.least.clear()
    folds.mean.clear()
    assert len(folds.table.freeze(0)) == 0


def test_the_first_row_is_kept_as_it_is() -> None:
    def refuse(one: Any, other: Any) -> Any:
        raise AssertionError("there is nothing to reduce with")

    table, cursor = StateTable(MemoryBase()), KeyCursor()
    cell = ReducingCell(cursor, table, "r", 1, NUMBER, refuse)
    cursor.load([b"\0\5"], KEYS[:1])
    cursor.index = 0
    cell.add((4,))
    assert cell.get() == (4,)


def test_an_accumulator_can_be_merged_into_another_key_s(folds: Folds) -> None:
    folds.mean.add_all([1, 2, 3])
    taken = folds.mean.accumulator()
    assert taken is not None
    folds.cursor.index = 1
    folds.mean.merge(taken)
    assert folds.mean.get() == 2.0
    folds.mean.merge((10, 1))
    assert folds.mean.get() == 4.0


def test_merging_without_a_merge_is_refused_by_name() -> None:
    table, cursor = StateTable(MemoryBase()), KeyCursor()
    cell: AggregatingCell[int] = AggregatingCell(
        cursor, table, "sums", 1, NUMBER, lambda: (0,), lambda acc, n: (acc[0] + n,), sum
    )
    cursor.load([b"\0\5"], KEYS[:1])
    cursor.index = 0
    with pytest.raises(UsageError, match="sums"):
        cell.merge((1,))


def test_a_result_that_does_not_fit_changes_nothing() -> None:
    table, cursor = StateTable(MemoryBase()), KeyCursor()
    cell = ReducingCell(cursor, table, "r", 1, NUMBER, lambda one, other: ("not a number",))
    cursor.load([b"\0\5"], KEYS[:1])
    cursor.index = 0
    cell.add((4,))
    for call in (lambda: cell.add((5,)), lambda: cell.add_all([(5,)]), lambda: cell.add(("x",))):
        with pytest.raises(ValueMismatchError):
            call()
    assert cell.get() == (4,)


def test_folding_outside_the_call_for_a_key_is_refused(folds: Folds) -> None:
    folds.cursor.index = -1
    for cell in (folds.least, folds.mean):
        for call in (cell.get, cell.exists, cell.clear, lambda cell=cell: cell.add((1,))):
            with pytest.raises(KeyContextError):
                call()


STEP = st.tuples(
    st.sampled_from(["add", "add", "add all", "clear", "end", "confirm"]),
    st.integers(0, len(KEYS) - 1),
    st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=4),
)


@pytest.mark.parametrize("on_disk", [False, True])
@given(steps=st.lists(STEP, max_size=25))
@settings(deadline=None, max_examples=40)
def test_what_is_kept_is_what_a_plain_fold_gives(
    tmp_path_factory: pytest.TempPathFactory, on_disk: bool, steps: Any
) -> None:
    folder: Path = tmp_path_factory.mktemp("folds", numbered=True)
    store = RocksStore.open(str(folder / "db")) if on_disk else None
    folds = Folds(store or MemoryBase())
    added: dict[int, list[int]] = {n: [] for n in range(len(KEYS))}
    try:
        for verb, owner, numbers in steps:
            folds.cursor.index = owner
            if verb == "add":
                added[owner].append(numbers[0])
                folds.least.add((numbers[0],))
                folds.mean.add(numbers[0])
            elif verb == "add all":
                added[owner] += numbers
                folds.least.add_all([(n,) for n in numbers])
                folds.mean.add_all(iter(numbers))
            elif verb == "clear":
                added[owner] = []
                folds.least.clear()
                folds.mean.clear()
            else:
                folds.end(confirm=verb == "confirm")
            for n, numbers_added in added.items():
                folds.cursor.index = n
                expected = functools.reduce(min, numbers_added) if numbers_added else None
                assert folds.least.get() == (None if expected is None else (expected,))
                mean = sum(numbers_added) / len(numbers_added) if numbers_added else None
                assert folds.mean.get() == mean
    finally:
        if store is not None:
            store.close()
