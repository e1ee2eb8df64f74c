"""The row operator: one call per key, each with its own rows and state; bounded output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from statebackend.errors import (
    KeyContextError,
    ProcessorError,
    StoreUnreachableError,
    ValueMismatchError,
)
from statebackend.operators.errors.user_errors import call_once
from statebackend.operators.input.group_by_key import Groups, group_rows
from statebackend.schema.codec import codec_for
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.state.cells import KeyCursor, ValueCell
from statebackend.state.table import MemoryBase, StateTable
from tests.support.keyoperators import RowOperator

INPUT = T.StructType([T.StructField("note", T.StringType()), T.StructField("k", T.LongType())])
OUTPUT = T.StructType([T.StructField("k", T.LongType()), T.StructField("n", T.LongType())])
KEY = KeyCodec(T.StructType([INPUT["k"]]))
CHUNK = 1024
BATCH = 10_000


def groups_of(keys: Iterable[int]) -> Groups:
    """Rows (note, k), the note saying which row of all it is; key groups by the key."""
    column = pa.array(list(keys), pa.int64())
    table = pa.table(
        [pa.array([f"row {n}" for n in range(len(column))], pa.string()), column],
        names=["note", "k"],
    )
    key_groups = (column.to_numpy() % 4).astype(np.uint16)
    return group_rows(table, KEY.encode_arrow([column]), key_groups)


class Operated:
    def __init__(self) -> None:
        self.cursor = KeyCursor()
        self.table = StateTable(MemoryBase())
        codec = codec_for(T.StructType([T.StructField("n", T.LongType())]))
        self.count = ValueCell(self.cursor, self.table, "count", 1, codec)
        self.operator = RowOperator(
            uid="totals",
            cursor=self.cursor,
            input_schema=INPUT,
            key_positions=(1,),
            output_schema=OUTPUT,
        )

    def run(self, groups: Groups, call: Any) -> list[pa.RecordBatch]:
        return list(self.operator.run(groups, call))

    def count_rows(self, key: tuple[Any, ...], rows: Iterator[Any]) -> Iterator[tuple[int, int]]:
        """A lazy processor: it touches state while its output is being read."""
        before = self.count.get()
        total = (before[0] if before else 0) + sum(1 for _ in rows)
        self.count.update((total,))
        yield key[0], total


def out(batches: list[pa.RecordBatch]) -> list[tuple[int, int]]:
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("keys", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_every_key_is_called_once_with_its_rows_and_its_state_whatever_the_chunk(
    keys: int,
) -> None:
    one = Operated()
    wanted = [k for k in range(keys) for _ in range(1 + k % 3)]
    for epoch in (1, 2):
        produced = out(one.run(groups_of(wanted), one.count_rows))
        assert sorted(produced) == [(k, epoch * (1 + k % 3)) for k in range(keys)]


def test_keys_are_called_in_the_order_of_the_store() -> None:
    one, called = Operated(), []
    one.run(groups_of(reversed(range(3000))), lambda key, rows: called.append(key[0]))
    assert called == sorted(range(3000), key=lambda k: (k % 4, k))


def test_the_rows_of_a_key_come_as_pyspark_rows_in_their_order() -> None:
    one, seen = Operated(), {}
    one.run(groups_of([7, 8, 7, 9, 7]), lambda key, rows: seen.update({key: list(rows)}))
    assert seen[(7,)] == [("row 0", 7), ("row 2", 7), ("row 4", 7)]
    row = seen[(8,)][0]
    assert isinstance(row, T.Row)
    assert (row.note, row["k"], row.asDict()) == ("row 1", 8, {"note": "row 1", "k": 8})


def test_no_groups_make_no_call_and_no_batch() -> None:
    def never(key: Any, rows: Any) -> None:
        raise AssertionError

    assert Operated().run(groups_of([]), never) == []


@pytest.mark.parametrize("eager", [0, 1, 2])
def test_rows_that_are_not_read_do_not_turn_up_for_the_next_key(eager: int) -> None:
    one, seen = Operated(), {}

    def call(key: tuple[Any, ...], rows: Iterator[Any]) -> None:
        seen[key[0]] = [next(rows).k for _ in range(eager)]

    one.run(groups_of([1, 1, 1, 2, 2, 2, 3, 3, 3]), call)
    assert seen == {k: [k] * eager for k in (1, 2, 3)}


def test_an_iterator_that_is_kept_gives_its_own_rows_even_later() -> None:
    one, kept = Operated(), {}
    one.run(groups_of([1, 1, 2, 2, 3]), lambda key, rows: kept.update({key[0]: rows}))
    assert {k: [row.k for row in rows] for k, rows in kept.items()} == {
        1: [1, 1],
        2: [2, 2],
        3: [3],
    }


def test_state_is_closed_between_keys_and_after_the_last() -> None:
    one = Operated()
    kept: list[Any] = []
    one.run(groups_of([1, 2]), lambda key, rows: kept.append(one.count.get))
    for get in kept:
        with pytest.raises(KeyContextError):
            get()


@pytest.mark.parametrize("output", [None, [], iter(()), ()])
def test_a_processor_may_return_nothing(output: Any) -> None:
    assert Operated().run(groups_of([1, 2]), lambda key, rows: output) == []


def test_output_comes_in_batches_of_a_bounded_size_while_the_keys_are_read() -> None:
    one, called = Operated(), 0

    def call(key: tuple[Any, ...], rows: Iterator[Any]) -> list[tuple[int, int]]:
        nonlocal called
        called += 1
        return [(key[0], n) for n in range(30)]

    sizes, calls_at = [], []
    produced: list[tuple[int, int]] = []
    for batch in one.operator.run(groups_of(range(2000)), call):
        sizes.append(batch.num_rows)
        calls_at.append(called)
        produced += out([batch])
    assert max(sizes) < BATCH + 30
    assert len(sizes) == 6
    assert calls_at[0] == -(-BATCH // 30)  # the first was not held back until all were called
    assert sorted(produced) == [(k, n) for k in range(2000) for n in range(30)]


def test_the_output_of_one_key_is_cut_into_batches_too() -> None:
    def call(key: tuple[Any, ...], rows: Iterator[Any]) -> Iterator[tuple[int, int]]:
        return ((key[0], n) for n in range(3 * BATCH))

    batches = Operated().run(groups_of([1]), call)
    assert sum(batch.num_rows for batch in batches) == 3 * BATCH
    assert max(batch.num_rows for batch in batches) <= BATCH


def test_the_schema_of_a_batch_is_what_spark_wants_to_the_letter() -> None:
    one = Operated()
    (batch,) = one.run(groups_of([1]), one.count_rows)
    assert batch.schema == pa.schema([("k", pa.int64()), ("n", pa.int64())])


# --- errors --------------------------------------------------------------------------------------


class Mine(Exception):
    """The user's own."""


def raising_at_once(key: tuple[Any, ...], rows: Iterator[Any]) -> list[Any]:
    if key == (2,):
        raise Mine("no twos")
    return []


def raising_while_read(key: tuple[Any, ...], rows: Iterator[Any]) -> Iterator[Any]:
    yield key[0], 0
    if key == (2,):
        raise Mine("no twos")


@pytest.mark.parametrize("call", [raising_at_once, raising_while_read])
def test_what_a_processor_raises_is_wrapped_with_its_traceback_as_the_cause(call: Any) -> None:
    one = Operated()
    with pytest.raises(ProcessorError, match="operator 'totals'") as caught:
        one.run(groups_of([1, 2, 3]), call)
    assert "Mine: no twos" in str(caught.value)
    assert "(2,)" in str(caught.value)
    cause = caught.value.__cause__
    assert isinstance(cause, Mine)
    frames, tb = [], cause.__traceback__
    while tb is not None:
        frames.append(tb.tb_frame.f_code.co_name)
        tb = tb.tb_next
    assert call.__name__ in frames
    with pytest.raises(KeyContextError):
        one.count.get()


def test_a_stop_iteration_of_the_users_does_not_end_the_epoch_early() -> None:
    def call(key: tuple[Any, ...], rows: Iterator[Any]) -> list[Any]:
        next(iter(()))
        return []

    with pytest.raises(ProcessorError) as caught:
        Operated().run(groups_of([1, 2]), call)
    assert isinstance(caught.value.__cause__, StopIteration)


def test_errors_of_our_own_are_not_wrapped() -> None:
    def call(key: tuple[Any, ...], rows: Iterator[Any]) -> None:
        raise StoreUnreachableError("The store is down.")

    with pytest.raises(StoreUnreachableError):
        Operated().run(groups_of([1]), call)


def test_a_row_that_does_not_fit_names_operator_and_column() -> None:
    with pytest.raises(ValueMismatchError, match="operator 'totals'") as caught:
        Operated().run(groups_of([1]), lambda key, rows: [(1, 2), (1, "x")])
    assert "'n'" in str(caught.value)
    assert "bigint" in str(caught.value)


@pytest.mark.parametrize("output", [5, object()])
def test_what_is_no_iterable_is_the_processors_error(output: Any) -> None:
    with pytest.raises(ProcessorError, match="not iterable"):
        Operated().run(groups_of([1]), lambda key, rows: output)


def test_a_consumer_that_stops_early_leaves_no_key_current() -> None:
    one = Operated()
    run = one.operator.run(groups_of(range(400)), lambda key, rows: [(1, 1)] * 30)
    next(run)
    run.close()
    with pytest.raises(KeyContextError):
        one.count.get()


def test_init_and_close_of_a_processor_are_typed_too() -> None:
    def broken() -> None:
        raise Mine("not today")

    with pytest.raises(ProcessorError, match=r"init\(\) of operator 'totals'") as caught:
        call_once("totals", "init", broken)
    assert isinstance(caught.value.__cause__, Mine)

    def ours() -> None:
        raise StoreUnreachableError("The store is down.")

    with pytest.raises(StoreUnreachableError):
        call_once("totals", "close", ours)
