"""A whole epoch over its budgets, without Spark: what comes out is what comes out within them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from snapshot.formats.delta_in_pieces import encode_frozen
from statebackend.errors import (
    BarrierMissingError,
    HashMismatchError,
    NullKeyError,
    ProcessorError,
)
from statebackend.key_hashing import key_groups
from statebackend.operators import per_key_loop as rows_module
from statebackend.operators.input.staging import InputStage
from statebackend.schema.codec import codec_for
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.spark.worker.epoch_input import NONCE_BITS, EpochInput, InputShape, read_epoch
from statebackend.state.cells import KeyCursor, ListCell, MapCell, ValueCell
from statebackend.state.spill import OverlaySpill
from statebackend.state.table import MemoryBase, StateTable
from tests.support.keyoperators import RowOperator

MAX_PARALLELISM = 16
INPUT = T.StructType([T.StructField("k", T.StringType()), T.StructField("n", T.LongType())])
OUTPUT = T.StructType([*INPUT.fields, T.StructField("seen", T.LongType())])
ARROW = pa.schema([("k", pa.string()), ("n", pa.int64())])
KEY = KeyCodec(T.StructType([INPUT["k"]]))
NUMBER = codec_for(T.StructType([T.StructField("n", T.LongType())]))
MAP_KEY = KeyCodec(T.StructType([T.StructField("n", T.LongType())]))
CONTROL = ["group", "subtask", "stamp"]


def batches_of(
    keys: list[str | None], *, barrier: bool = True, rows: int = 100
) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(keys), rows):
        column = pa.array(keys[start : start + rows], pa.string())
        count = len(column)
        columns = [
            column,
            pa.array(range(start, start + count), pa.int64()),
            pa.array(key_groups([column], MAX_PARALLELISM).astype(np.int32)),
            pa.array(np.zeros(count, np.int32)),
            pa.array(np.zeros(count, np.int64)),
        ]
        yield pa.RecordBatch.from_arrays(columns, names=[*ARROW.names, *CONTROL])
    if barrier:
        columns = [pa.nulls(1, kind) for kind in (pa.string(), pa.int64(), pa.int32())]
        columns += [pa.array([-1], pa.int32()), pa.array([5 << NONCE_BITS], pa.int64())]
        yield pa.RecordBatch.from_arrays(columns, names=[*ARROW.names, *CONTROL])


def read(keys: list[str | None], stage: InputStage | None = None, **options: Any) -> EpochInput:
    return read_epoch(
        batches_of(keys, **options),
        InputShape("totals", ARROW, (0,), 1, MAX_PARALLELISM),
        stage=stage,
    )


class Epochs:
    """A subtask that counts in all kinds of state, with budgets or without."""

    def __init__(self, folder: Path, budget: int | None, limit: int | None) -> None:
        self.base = MemoryBase()
        self._folder, self._budget, self._limit = folder, budget, limit
        self.parts = 0
        self.runs = 0

    def epoch(self, keys: list[str | None], call: Any = None) -> tuple[list[Any], bytes]:
        """One epoch: its output by key, and its delta."""
        stage = InputStage(
            ARROW,
            key_positions=(0,),
            budget_bytes=self._budget,
            folder=lambda: self._folder / "input",
        )
        spill = OverlaySpill(
            limit_bytes=1 << 40 if self._limit is None else self._limit,
            folder=lambda: self._folder / "overlay",
        )
        try:
            taken = read(keys, stage)
            assert taken.stamp_ms == 5
            table = StateTable(self.base, spill=spill)
            output = list(self._operator(table).run_parts(self._counted(taken), call or self.call))
            self.runs = len(list((self._folder / "overlay").glob("*")))
            frozen = table.freeze(0)
            delta = encode_frozen(frozen, lambda: self._folder / "delta")
            self.base.apply(*frozen.sorted())
        finally:
            stage.close()
            spill.close()
        data = delta.data
        if delta.path is not None:
            data = delta.path.read_bytes()
            delta.path.unlink()
        assert data is not None
        rows = [tuple(row.values()) for batch in output for row in batch.to_pylist()]
        return rows, data

    def _counted(self, taken: EpochInput) -> Iterator[Any]:
        self.parts = 0
        for groups in taken.groups(KEY):
            self.parts += 1
            yield groups

    def _operator(self, table: StateTable) -> RowOperator:
        cursor = KeyCursor()
        self.value = ValueCell(cursor, table, "value", 1, NUMBER)
        self.list = ListCell(cursor, table, "list", 2, NUMBER)
        self.map = MapCell(cursor, table, "map", 3, MAP_KEY, NUMBER)
        return RowOperator(
            uid="totals",
            cursor=cursor,
            input_schema=INPUT,
            key_positions=(0,),
            output_schema=OUTPUT,
        )

    def call(self, key: tuple[Any, ...], rows: Iterator[Any]) -> Iterator[Any]:
        for row in rows:
            seen = (self.value.get() or (0,))[0] + 1
            self.value.update((seen,))
            self.list.append((row.n,))
            self.map.update_value((row.n % 10,), (seen,))
            if seen % 5 == 0:
                self.map.remove_key((row.n % 10,))
            if seen % 400 == 0:
                self.list.clear()
            yield (*row, seen)


def by_key(rows: list[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for row in rows:
        found.setdefault(row[0], []).append(row)
    return found


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "_CHUNK_KEYS", 7)
    monkeypatch.setattr(rows_module, "_CHUNK_ROWS", 30)


KEYS: list[str | None] = ["hot" if n % 3 == 0 else f"key {n * 7919 % 700}" for n in range(3000)]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("budget", "limit"),
    [(None, 2000), (20_000, None), (20_000, 2000), pytest.param(1, 0, marks=pytest.mark.full)],
)
def test_two_epochs_over_their_budgets_give_the_rows_and_deltas_of_epochs_within(
    tmp_path: Path, budget: int | None, limit: int | None
) -> None:
    within = Epochs(tmp_path / "a", None, None)
    over = Epochs(tmp_path / "b", budget, limit)
    (tmp_path / "b").mkdir()
    for keys in (KEYS if limit else KEYS[:900], [f"key {n}" for n in range(400)] + ["hot"] * 500):
        expected, delta = within.epoch(list(keys))
        assert (within.parts, within.runs) == (1, 0)
        rows, spilled_delta = over.epoch(list(keys))
        assert spilled_delta == delta
        # Within a key group parted by hash the keys come in another order; rows of a key never.
        assert by_key(rows) == by_key(expected)
        assert over.parts > 1 or budget is None
        assert over.runs > 3 or limit is None
        assert not list((tmp_path / "b").iterdir())


@pytest.mark.usefixtures("small_chunks")
def test_the_rows_of_a_hot_key_are_made_as_they_are_read(tmp_path: Path) -> None:
    def rows_alive() -> int:
        gc.collect()
        return sum(type(o).__mro__[1:2] == (T.Row,) for o in gc.get_objects())

    one, alive = Epochs(tmp_path, 2000, None), []
    of_other_tests = rows_alive()

    def call(key: tuple[Any, ...], rows: Iterator[Any]) -> None:
        for at, row in enumerate(rows):
            assert row.n == at
            if at % 150 == 0:
                alive.append(rows_alive() - of_other_tests)

    one.epoch(["hot"] * 600, call)
    assert len(alive) == 4
    assert max(alive) < 100


@pytest.mark.usefixtures("small_chunks")
def test_a_hot_key_may_leave_its_rows_and_keep_its_iterator(tmp_path: Path) -> None:
    one, kept = Epochs(tmp_path, 2000, None), {}

    def call(key: tuple[Any, ...], rows: Iterator[Any]) -> list[Any]:
        first = next(rows)
        kept[key] = rows
        return [(*first, 0)]

    rows, _ = one.epoch(["hot"] * 500 + ["cold"] * 3, call)
    assert sorted(rows) == [("cold", 500, 0), ("hot", 0, 0)]
    assert [row.n for row in kept[("cold",)]] == [501, 502]
    assert [row.n for row in kept[("hot",)]] == list(range(1, 500))


@pytest.mark.usefixtures("small_chunks")
def test_what_a_processor_raises_for_a_hot_key_is_wrapped_too(tmp_path: Path) -> None:
    def call(key: tuple[Any, ...], rows: Iterator[Any]) -> Iterator[Any]:
        yield (*next(rows), 0)
        raise RuntimeError("too hot")

    with pytest.raises(ProcessorError, match="'hot'") as caught:
        Epochs(tmp_path, 2000, None).epoch(["hot"] * 500, call)
    assert "too hot" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_output_held_at_the_end_of_a_part_comes_before_that_of_the_next(tmp_path: Path) -> None:
    one = Epochs(tmp_path, 20_000, None)
    rows, _ = one.epoch(KEYS, lambda key, rows: [(key[0], next(rows).n, 1)])
    assert one.parts > 3
    assert len(rows) == len({row[0] for row in rows}) == len(set(KEYS))


@pytest.mark.parametrize(
    ("keys", "barrier", "error"),
    [
        (KEYS, False, BarrierMissingError),
        ([None, *KEYS], True, NullKeyError),
    ],
)
def test_an_epoch_that_fails_leaves_nothing_on_disk(
    tmp_path: Path, keys: list[str | None], barrier: bool, error: type[Exception]
) -> None:
    stage = InputStage(
        ARROW, key_positions=(0,), budget_bytes=10_000, folder=lambda: tmp_path / "input"
    )

    def group_all() -> None:
        taken = read(keys, stage, barrier=barrier)
        try:
            assert list((tmp_path / "input").iterdir())
            list(taken.groups(KEY))
        finally:
            taken.close()

    with pytest.raises(error):
        group_all()
    assert not (tmp_path / "input").exists()


def test_a_hash_that_differs_is_found_in_small_batches_too(tmp_path: Path) -> None:
    def wrong() -> Iterator[pa.RecordBatch]:
        for at, batch in enumerate(batches_of(KEYS, rows=3)):
            group = batch.column(2)
            if at == 5:
                group = pa.array((group.to_numpy() + 1) % MAX_PARALLELISM, pa.int32())
            columns = [*batch.columns[:2], group, *batch.columns[3:]]
            yield pa.RecordBatch.from_arrays(columns, names=batch.schema.names)

    with pytest.raises(HashMismatchError):
        read_epoch(wrong(), InputShape("totals", ARROW, (0,), 1, MAX_PARALLELISM))


def test_without_a_budget_the_rows_can_be_looked_at(tmp_path: Path) -> None:
    taken = read(KEYS)
    assert taken.rows.column("k").to_pylist() == KEYS
    assert len(taken.key_groups) == len(KEYS)
    assert sum(len(part.key_groups) for part in taken.parts()) == len(KEYS)


def test_fewer_keys_are_loaded_at_a_time_if_their_state_is_large(tmp_path: Path) -> None:
    table = StateTable(MemoryBase())
    cursor = KeyCursor()
    loads: list[int] = []
    text = codec_for(T.StructType([T.StructField("text", T.StringType())]))
    cell = ValueCell(cursor, table, "text", 1, text)
    cursor.attach(lambda: loads.append(len(cursor.suffixes)))
    keys: list[str | None] = [f"key {n}" for n in range(2500)]

    def call(key: tuple[Any, ...], rows: Iterator[Any]) -> None:
        cell.get()
        cell.update(("x" * 100_000 if key[0].endswith("7") else "",))

    for _ in range(2):
        operator = RowOperator(
            uid="texts",
            cursor=cursor,
            input_schema=INPUT,
            key_positions=(0,),
            output_schema=OUTPUT,
        )
        list(operator.run_parts(read(keys).groups(KEY), call))
        loads.append(0)
    small, large = loads[: loads.index(0)], loads[loads.index(0) + 1 : -1]
    assert small == [128, 512, 1024, 836]
    assert sum(large) == 2500
    assert large[0] == 128
    assert 200 < sum(large[2:-1]) / len(large[2:-1]) < 1000
