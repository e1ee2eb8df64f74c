"""The staged input: the same rows in memory or over a budget, in parts, and nothing left behind."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T

from statebackend.errors import LocalDirError
from statebackend.key_hashing import key_groups
from statebackend.operators.input import staging
from statebackend.operators.input.group_by_key import Groups, group_part
from statebackend.operators.input.staging import InputStage, StagedRows
from statebackend.schema.keys.key_codec import KeyCodec

SCHEMA = pa.schema([("n", pa.int64()), ("k", pa.string()), ("many", pa.list_(pa.int32()))])
KEY = KeyCodec(T.StructType([T.StructField("k", T.StringType())]))
MAX_PARALLELISM = 16


def batch_of(keys: list[str], start: int = 0) -> tuple[pa.RecordBatch, Any]:
    numbers = range(start, start + len(keys))
    columns = [
        pa.array(numbers, pa.int64()),
        pa.array(keys, pa.string()),
        pa.array([None if n % 7 == 0 else [n] * (n % 5) for n in numbers], pa.list_(pa.int32())),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    return batch, key_groups([columns[1]], MAX_PARALLELISM)


def stage_of(
    keys: list[str], folder: Path, *, budget: int | None, batch_rows: int = 50
) -> InputStage:
    stage = InputStage(SCHEMA, key_positions=(1,), budget_bytes=budget, folder=lambda: folder)
    for start in range(0, len(keys), batch_rows):
        # Slices of a larger batch, as a filter or a reader may give.
        batch, groups = batch_of(["cut off", *keys[start : start + batch_rows]], start - 1)
        stage.add(batch.slice(1), groups[1:])
    return stage


def grouped(stage: InputStage) -> list[Groups]:
    return [group_part(part, KEY.encode_arrow, (1,)) for part in stage.parts()]


def rows_by_key(groups: list[Groups]) -> dict[tuple[bytes, bytes], list[Any]]:
    found: dict[tuple[bytes, bytes], list[Any]] = defaultdict(list)
    for one in groups:
        for i, key in enumerate(zip(one.key_groups, one.keys, strict=True)):
            start, end = one.starts[i : i + 2].tolist()
            assert key not in found  # whole: a key is in one part only
            found[key] = one.rows.slice(start, end - start).to_pylist()
    return dict(found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "stage"


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(
        st.one_of(
            st.sampled_from(["hot", "warm", "", "ä" * 50]),
            st.integers(0, 300).map(lambda n: f"{n}"),
        ),
        max_size=600,
    ),
    budget=st.sampled_from([1, 500, 4000, 20_000, 10**9]),
    batch_rows=st.sampled_from([1, 7, 100]),
)
def test_rows_come_back_by_key_in_their_order_whatever_the_budget(
    keys: list[str], budget: int, batch_rows: int
) -> None:
    with tempfile.TemporaryDirectory() as path:
        whole = stage_of(keys, Path(path) / "a", budget=None)
        parted = stage_of(keys, Path(path) / "b", budget=budget, batch_rows=batch_rows)
        expected = rows_by_key(grouped(whole))
        assert rows_by_key(grouped(parted)) == expected
        assert sum(map(len, expected.values())) == len(keys)
        parted.close()
        assert not list(Path(path).iterdir())


def test_without_a_spill_there_is_one_part_and_no_folder(folder: Path) -> None:
    stage = stage_of(["a", "b"] * 100, folder, budget=10**6)
    (part,) = stage.parts()
    assert part.rows.num_rows == len(part.key_groups) == 200
    assert not stage.spilled
    stage.close()
    assert not folder.exists()


def test_an_empty_input_is_one_empty_part(folder: Path) -> None:
    (part,) = stage_of([], folder, budget=1).parts()
    assert part.rows.num_rows == len(part.key_groups) == 0


def test_parts_are_ascending_disjoint_ranges_of_key_groups_within_the_budget(folder: Path) -> None:
    keys = [f"key {n}" for n in range(20_000)]
    budget = 400_000
    stage = stage_of(keys, folder, budget=budget, batch_rows=1000)
    ranges, sizes = [], []
    for part in stage.parts():
        assert isinstance(part.rows, pa.Table)
        ranges.append((int(part.key_groups.min()), int(part.key_groups.max())))
        sizes.append(part.rows.nbytes + part.rows.num_rows * staging.ROW_BYTES)
    assert len(ranges) > 4
    assert all(a[1] < b[0] for a, b in pairwise(ranges))
    assert max(sizes) <= budget * 1.1


def test_one_key_group_over_the_budget_is_parted_by_key(folder: Path) -> None:
    keys = [f"key {n}" for n in range(30_000)]
    chosen = np.flatnonzero(key_groups([pa.array(keys)], MAX_PARALLELISM) == 3)
    keys = [keys[i] for i in chosen] * 3
    stage = stage_of(keys, folder, budget=60_000, batch_rows=500)
    groups = grouped(stage)
    assert len(groups) > 3
    found = rows_by_key(groups)
    assert len(found) == len(chosen)
    assert all([r["n"] for r in rows] == sorted(r["n"] for r in rows) for rows in found.values())


def test_a_hot_key_stays_on_disk_and_the_keys_beside_it_come_in_parts(folder: Path) -> None:
    keys = [f"key {n}" for n in range(3000)]
    chosen = np.flatnonzero(key_groups([pa.array(keys)], MAX_PARALLELISM) == 3)
    hot, *others = [keys[i] for i in chosen]
    mixed = [hot if n % 3 else others[n % len(others)] for n in range(6000)]
    groups = grouped(stage_of(mixed, folder, budget=30_000, batch_rows=500))
    on_disk = [one for one in groups if isinstance(one.rows, StagedRows)]
    assert [KEY.decode(one.keys[0])[0] for one in on_disk] == [(hot,)]
    (one,) = on_disk
    assert one.starts.tolist() == [0, mixed.count(hot)]
    numbers = [n for n, key in enumerate(mixed) if key == hot]
    assert one.rows.slice(0, len(numbers)).column("n").to_pylist() == numbers
    for start, length in [(0, 1), (1499, 3), (len(numbers) - 2, 10), (700, 900)]:
        expected = numbers[start : start + length]
        assert one.rows.slice(start, length).column("n").to_pylist() == expected
    assert set(rows_by_key(groups)) == {
        (b"\0\3", KEY.encode((key,))) for key in (hot, *others) if key in mixed
    }


def test_files_go_as_soon_as_their_rows_are_in_memory(folder: Path) -> None:
    stage = stage_of([f"key {n}" for n in range(5000)], folder, budget=50_000)
    left = [len(list(folder.iterdir())) for _ in stage.parts()]
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0
    stage.close()
    assert not folder.exists()


def test_a_stage_that_is_given_up_leaves_nothing(folder: Path) -> None:
    stage = stage_of([f"key {n}" for n in range(5000)], folder, budget=50_000)
    parts = stage.parts()
    next(parts)
    parts.close()
    assert list(folder.iterdir())
    stage.close()
    stage.close()
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LocalDirError, match="file"):
        stage_of(["a"] * 100, tmp_path / "file" / "under", budget=1)


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_what_is_not_read_back_as_it_was_written_is_an_error(folder: Path, damage: str) -> None:
    stage = stage_of([f"key {n}" for n in range(5000)], folder, budget=50_000)
    for path in folder.iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data if damage == "flipped" else data[:-1])
        if damage == "gone":
            path.unlink()
    with pytest.raises(LocalDirError, match="rows-"):
        list(stage.parts())


def test_one_row_over_the_budget_alone_still_comes_through(folder: Path) -> None:
    stage = stage_of(["x" * 10_000, "y" * 10_000, "x" * 10_000], folder, budget=2000)
    found = rows_by_key(grouped(stage))
    assert [[r["n"] for r in rows] for rows in found.values()] in ([[0, 2], [1]], [[1], [0, 2]])
