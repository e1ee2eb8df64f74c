"""Rows in payloads: what goes in before the shuffle comes out after it, or is refused."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from statebackend.errors import BarrierMissingError, CorruptionError, ForeignRowError
from statebackend.key_hashing import key_groups
from statebackend.keygroups import subtask_of
from statebackend.operators.input.lateness import EventMaxima
from statebackend.operators.input.packing import GROUP, PACKED_SCHEMA, RowPacker, unpacked
from statebackend.operators.input.staging import InputStage
from statebackend.operators.rows.row_conversion import arrow_schema
from statebackend.spark.worker.epoch_input import NONCE_BITS, EpochInput, InputShape, read_epoch

GROUPS = 16
SUBTASKS = 3
SCHEMA = T.StructType(
    [
        T.StructField("k", T.StringType()),
        T.StructField("at", T.TimestampType()),
        T.StructField("n", T.LongType()),
    ]
)
ARROW = arrow_schema(SCHEMA)


def as_they_are(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def packer(schema: T.StructType = SCHEMA, keys: tuple[int, ...] = (0,), **given: Any) -> RowPacker:
    return RowPacker(as_they_are, schema, keys, SUBTASKS, GROUPS, **given)


def rows(count: int, *, step: int = 1) -> pa.RecordBatch:
    numbers = range(0, count * step, step)
    columns = [
        pa.array([None if n % 11 == 0 else f"key {n}" for n in numbers], pa.string()),
        pa.array([n * 1_000_000 for n in numbers], pa.int64()).cast(ARROW.field("at").type),
        pa.array(numbers, pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ARROW)


def packed(batches: Sequence[pa.RecordBatch], **given: Any) -> pa.Table:
    made = list(packer(**given)(iter(batches)))
    return pa.Table.from_batches(made, schema=pa.schema(made[0].schema))


def owners(batch: pa.RecordBatch) -> Any:
    return subtask_of(key_groups([batch.column(0)], GROUPS), SUBTASKS, GROUPS)


def arriving(payloads: list[bytes | None], subtask: int, *, whole: bool = True) -> Any:
    """Payloads as a task reads them, and what the anchor adds."""
    count = len(payloads)
    columns = [
        pa.array(payloads, pa.binary()),
        pa.array([0] * count, pa.int32()),
        pa.array([subtask] * count, pa.int32()),
        pa.nulls(count, pa.int64()),
    ]
    names = ["c0", "group", "subtask", "stamp"]
    yield pa.RecordBatch.from_arrays(columns, names=names)
    if whole:
        barrier = [pa.nulls(1, pa.binary()), pa.nulls(1, pa.int32())]
        barrier += [pa.array([~subtask], pa.int32()), pa.array([5 << NONCE_BITS | 9], pa.int64())]
        yield pa.RecordBatch.from_arrays(barrier, names=names)


def read(payloads: list[bytes | None], subtask: int, **given: Any) -> EpochInput:
    whole = given.pop("whole", True)
    return read_epoch(
        arriving(payloads, subtask, whole=whole),
        InputShape("totals", ARROW, (0,), SUBTASKS, GROUPS, packed=True),
        **given,
    )


def payloads_of(table: pa.Table, subtask: int) -> list[bytes | None]:
    groups = table.column(GROUP).to_numpy()
    there = subtask_of(groups, SUBTASKS, GROUPS) == subtask
    return [p for p, mine in zip(table.column("rows").to_pylist(), there, strict=True) if mine]


@pytest.mark.parametrize("payload_bytes", [1, 300, 1 << 20])
def test_each_subtask_gets_its_rows_in_the_order_in_which_they_came(payload_bytes: int) -> None:
    batches = [rows(500), rows(0), rows(200, step=7)]
    table = packed(batches, payload_bytes=payload_bytes)
    assert table.schema.names == PACKED_SCHEMA.names
    for subtask in range(SUBTASKS):
        taken = read(payloads_of(table, subtask), subtask)
        wanted = [batch.filter(pa.array(owners(batch) == subtask)) for batch in batches]
        assert taken.rows == pa.Table.from_batches(wanted)
        assert (
            taken.key_groups.tolist()
            == key_groups([taken.rows.column(0).combine_chunks()], GROUPS).tolist()
        )
        assert (taken.subtask, taken.stamp_ms, taken.nonce) == (subtask, 5, 9)


def test_payloads_are_small_unless_a_row_is_large() -> None:
    table = packed([rows(5_000)], payload_bytes=4_000)
    sizes = [len(payload) for payload in table.column("rows").to_pylist()]
    assert len(sizes) > 20
    assert max(sizes) < 6_000
    one = packed([rows(1)], payload_bytes=10)
    assert one.num_rows == 1


def test_rows_of_any_type_of_key_and_value_come_back() -> None:
    entry = T.StructType([T.StructField("a", T.IntegerType(), False)])
    schema = T.StructType(
        [
            T.StructField("d", T.DecimalType(30, 2), False),
            T.StructField("l", T.ArrayType(T.StringType(), False)),
            T.StructField("s", entry),
            T.StructField("t", T.TimestampNTZType()),
            T.StructField("b", T.BinaryType()),
            T.StructField("f", T.BooleanType()),
        ]
    )
    values = [[Decimal("1.25"), Decimal("-7.50"), Decimal("0.00")], [["x"], [], ["y", "z"]]]
    values += [[{"a": 1}, None, {"a": -1}], [None, 5, 7], [b"", None, b"\xff"], [True, False, None]]
    arrow = arrow_schema(schema)
    columns = [pa.array(v, f.type) for v, f in zip(values, arrow, strict=True)]
    batch = pa.RecordBatch.from_arrays(columns, schema=arrow)
    (made,) = packer(schema, (0, 1, 2))(iter([batch]))
    found = [rows for rows, _ in unpacked(made.column(0), arrow)]
    key = [batch.column(i) for i in range(3)]
    order = np.argsort(subtask_of(key_groups(key, GROUPS), SUBTASKS, GROUPS), kind="stable")
    assert pa.Table.from_batches(found).to_pylist() == batch.take(pa.array(order)).to_pylist()


def test_the_largest_event_time_is_that_of_the_rows() -> None:
    table = packed([rows(300)])
    found = []
    for subtask in range(SUBTASKS):
        taken = read(payloads_of(table, subtask), subtask, events=EventMaxima(1))
        found.append(taken.max_event_ms)
        assert taken.max_event_ms == max(taken.rows.column("n").to_pylist()) * 1000
    assert max(found) == 299_000


def test_rows_over_the_budget_go_to_disk(tmp_path: Path) -> None:
    table = packed([rows(5_000)])
    stage = InputStage(
        ARROW, key_positions=(0,), budget_bytes=20_000, folder=lambda: tmp_path / "input"
    )
    taken = read(payloads_of(table, 1), 1, stage=stage)
    assert stage.spilled
    parts = [part.whole() for part in taken.parts()]
    assert len(parts) > 1
    found = sorted(n for part in parts for n in part.rows.column("n").to_pylist())
    batch = rows(5_000)
    assert found == batch.filter(pa.array(owners(batch) == 1)).column("n").to_pylist()
    taken.close()
    assert not (tmp_path / "input").exists()


def test_a_row_of_another_subtask_within_a_payload_is_refused() -> None:
    batch = rows(200)
    mine, other = (batch.filter(pa.array(owners(batch) == subtask)) for subtask in (0, 2))
    mixed = pa.concat_batches([mine, other.slice(3, 1), mine])
    alone = RowPacker(as_they_are, SCHEMA, (0,), 1, GROUPS, payload_bytes=1 << 20)
    (made,) = alone(iter([mixed]))
    assert made.num_rows == 1
    with pytest.raises(ForeignRowError, match=r"\[0, 2\]"):
        read(made.column(0).to_pylist(), 0)


def test_a_payload_for_another_subtask_is_refused() -> None:
    table = packed([rows(200)])
    with pytest.raises(ForeignRowError, match=r"\[0, 1\]"):
        read(payloads_of(table, 1), 0)


def test_payloads_without_a_barrier_are_not_taken() -> None:
    with pytest.raises(BarrierMissingError):
        read(payloads_of(packed([rows(200)]), 1), 1, whole=False)


def damaged(payload: bytes) -> dict[str, bytes | None]:
    (other,) = packer(T.StructType([SCHEMA[0], SCHEMA[2]]))(iter([rows(3).select(["k", "n"])[:1]]))
    return {
        "cut in its body": payload[: len(payload) - 40],
        "cut in its head": payload[:30],
        "nothing": b"",
        "null": None,
        "noise": bytes(range(256)) * 4,
        "other rows": other.column(0)[0].as_py(),
    }


@pytest.mark.parametrize("how", damaged(b""))
def test_a_payload_that_cannot_be_read_is_refused(tmp_path: Path, how: str) -> None:
    whole = payloads_of(packed([rows(200)]), 1)
    assert whole[0] is not None
    stage = InputStage(
        ARROW, key_positions=(0,), budget_bytes=1_000, folder=lambda: tmp_path / "input"
    )
    with pytest.raises(CorruptionError, match="payload"):
        read([*whole, damaged(whole[0])[how]], 1, stage=stage)
    assert not (tmp_path / "input").exists(), "nothing is left behind"


def test_a_packer_goes_to_the_workers() -> None:
    again = pickle.loads(pickle.dumps(packer()))  # what Spark's closure does
    assert list(again(iter([rows(9)]))) == list(packer()(iter([rows(9)])))


def test_texts_that_are_no_utf8_go_through_as_they_came() -> None:
    # Spark does not ask whether a text is UTF-8: a cast of bytes, a file in another encoding.
    raw = pa.array([b"\xff\xfe", b"ok"], pa.binary()).cast(pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    nested = pa.StructArray.from_arrays([texts], names=["s"])
    schema = T.StructType().add("k", "long").add("t", "string")
    schema = schema.add("n", T.StructType().add("s", "string"))
    batch = pa.RecordBatch.from_arrays(
        [pa.array([1, 2], pa.int64()), texts, nested], schema=arrow_schema(schema)
    )
    packer = RowPacker(iter, schema, (0,), 1, 128)
    (payloads,) = packer(iter([batch]))
    ((rows, _),) = unpacked(payloads.column(0), batch.schema)
    assert rows.column(1).view(pa.binary()).to_pylist() == [b"\xff\xfe", b"ok"]
