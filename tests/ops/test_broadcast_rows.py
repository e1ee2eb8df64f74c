"""Rules come back in the order of their numbers, whatever the way and the memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructType

from statebackend.errors import ForeignRowError, LocalDirError
from statebackend.key_hashing import key_groups
from statebackend.keygroups import key_group_range, subtask_of
from statebackend.operators.input.broadcast_rows import BroadcastRows
from statebackend.operators.rows.row_conversion import arrow_schema
from statebackend.spark.worker.epoch_input import NONCE_BITS, EpochInput, InputShape, read_epoch

SCHEMA = StructType().add("name", StringType()).add("n", LongType())


def batch(numbers: list[int]) -> pa.RecordBatch:
    columns = [pa.array([f"r{n}" for n in numbers]), pa.array(numbers), pa.array(numbers)]
    return pa.RecordBatch.from_arrays(columns, ["a", "b", "c"])


@pytest.mark.parametrize("budget_bytes", [None, 100_000_000, 100_000, 1])
def test_one_order_whatever_the_order_of_arrival(tmp_path: Path, budget_bytes: int | None) -> None:
    found = []
    for seed in range(3):
        numbers = np.random.default_rng(seed).permutation(20_000).tolist()
        folder = tmp_path / str(seed)
        rows = BroadcastRows(
            arrow_schema(SCHEMA), budget_bytes=budget_bytes, folder=partial(Path, folder)
        )
        for start in range(0, len(numbers), 1000):
            rows.add(batch(numbers[start : start + 1000]))
        assert rows.rows == 20_000
        assert (rows.staged_bytes > 0) == (budget_bytes is not None and budget_bytes < 10**6)
        found.append(list(rows.shown(SCHEMA, "UTC")))
        rows.close()
        rows.close()
        assert not folder.exists()
    assert [row.n for row in found[0]] == list(range(20_000))
    assert found[0][7].name == "r7"
    assert found[0] == found[1] == found[2]


def test_no_rules_are_no_rows() -> None:
    rows = BroadcastRows(arrow_schema(SCHEMA))
    assert list(rows.shown(SCHEMA, "UTC")) == []
    rows.add(batch([]))
    assert list(rows.shown(SCHEMA, "UTC")) == []


def test_pieces_stay_small_when_many_runs_are_merged(tmp_path: Path) -> None:
    rows = BroadcastRows(arrow_schema(SCHEMA), budget_bytes=1, folder=lambda: tmp_path / "x")
    numbers = count()
    for _ in range(20):
        rows.add(batch([next(numbers) for _ in range(5_000)]))
    assert all(piece.num_rows <= 16_384 for piece in rows.pieces())


def test_a_disk_that_fails_is_said(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("no folder")
    rows = BroadcastRows(arrow_schema(SCHEMA), budget_bytes=1, folder=lambda: tmp_path / "x")
    with pytest.raises(LocalDirError):
        rows.add(batch([1, 2]))


# --- at intake -----------------------------------------------------------------------------------

GROUPS, SUBTASKS = 16, 3
DATA = StructType().add("k", LongType())


def arriving(subtask: int, *numbers: int, group: int | None = None) -> Iterator[pa.RecordBatch]:
    """Rows of data and rules as they come to a task, and the barrier."""
    keys = [k for k in range(50) if owner(k) == subtask]
    first = key_group_range(subtask, SUBTASKS, GROUPS).start if group is None else group
    width = len(numbers)
    groups = [*key_groups([pa.array(keys, pa.int64())], GROUPS).tolist(), *[first] * width, None]
    columns = [
        pa.array([*keys, *[None] * width, None], pa.int64()),
        pa.array([*[None] * len(keys), *[f"r{n}" for n in numbers], None]),
        pa.array([*[None] * len(keys), *numbers, None], pa.int64()),
        pa.array([*[None] * len(keys), *numbers, None], pa.int64()),
        pa.array(groups, pa.int32()),
        pa.array([*[subtask] * (len(groups) - 1), ~subtask], pa.int32()),
        pa.array([*[None] * (len(groups) - 1), 5 << NONCE_BITS], pa.int64()),
    ]
    whole = pa.RecordBatch.from_arrays(columns, [str(i) for i in range(7)])
    yield whole.take(pa.array([*reversed(range(len(groups) - 1)), len(groups) - 1]))


def owner(key: int) -> int:
    return int(subtask_of(key_groups([pa.array([key])], GROUPS), SUBTASKS, GROUPS)[0])


def read(subtask: int, *numbers: int, group: int | None = None) -> EpochInput:
    return read_epoch(
        arriving(subtask, *numbers, group=group),
        InputShape("rules", arrow_schema(DATA), (0,), SUBTASKS, GROUPS),
        rules=BroadcastRows(arrow_schema(SCHEMA)),
    )


@pytest.mark.parametrize("subtask", range(SUBTASKS))
def test_rules_are_kept_apart_from_data(subtask: int) -> None:
    taken = read(subtask, 3, 1, 2)
    assert (taken.subtask, taken.stamp_ms) == (subtask, 5)
    assert sorted(taken.rows.column(0).to_pylist()) == [k for k in range(50) if owner(k) == subtask]
    assert taken.rules is not None
    assert [row.n for row in taken.rules.shown(SCHEMA, "UTC")] == [1, 2, 3]
    taken.close()


def test_an_epoch_without_rules_has_none() -> None:
    taken = read(1)
    assert taken.rules is not None
    assert taken.rules.rows == 0
    assert taken.rows.num_rows > 0


def test_rules_of_another_subtask_are_refused() -> None:
    with pytest.raises(ForeignRowError):
        read(1, 1, 2, group=GROUPS - 1)
