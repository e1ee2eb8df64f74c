"""Grouping an epoch's rows by key: whole groups, in the order of the store, rows in their order."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T

from statebackend.operators.input.group_by_key import Groups, group_rows
from statebackend.schema.keys.key_codec import KeyCodec

GROUPS = [0, 1, 255, 256, 32767]
KEYS = [b"", b"\0", b"\0\0", b"\xff", b"\xff\xff", b"a", b"ab", b"b" * 40]

rows = st.lists(st.tuples(st.sampled_from(GROUPS), st.sampled_from(KEYS)), max_size=60)


def grouped(pairs: list[tuple[int, bytes]], *, cut: int = 0) -> Groups:
    """Group rows that know their own number; `cut` rows were sliced off in front of them."""
    padded = [(0, b"cut off")] * cut + pairs
    table = pa.table({"number": pa.array([n - cut for n in range(len(padded))], pa.int64())})
    encoded = pa.array([key for _, key in padded], pa.binary()).slice(cut)
    key_groups = np.array([group for group, _ in padded], np.uint16)[cut:]
    return group_rows(table.slice(cut), encoded, key_groups)


@given(rows, st.integers(0, 3))
def test_every_row_is_in_the_group_of_its_key_once_and_in_its_order(
    pairs: list[tuple[int, bytes]], cut: int
) -> None:
    groups = grouped(pairs, cut=cut)
    numbers = groups.rows.column("number").to_pylist()
    assert sorted(numbers) == list(range(len(pairs)))
    assert groups.starts[0] == 0
    assert groups.starts[-1] == len(pairs)
    for index, (group, key) in enumerate(zip(groups.key_groups, groups.keys, strict=True)):
        own = numbers[groups.starts[index] : groups.starts[index + 1]]
        expected = [n for n, pair in enumerate(pairs) if pair == (int.from_bytes(group), key)]
        assert own == expected
        assert own


@given(rows)
def test_groups_stand_in_the_order_of_the_store_key_group_first(
    pairs: list[tuple[int, bytes]],
) -> None:
    groups = grouped(pairs)
    assert len(groups) == len(groups.keys) == len(set(pairs))
    full = [g + k for g, k in zip(groups.key_groups, groups.keys, strict=True)]
    assert all(a < b for a, b in pairwise(full))


@given(rows, st.randoms(use_true_random=False))
def test_the_order_of_the_groups_does_not_depend_on_the_order_of_arrival(
    pairs: list[tuple[int, bytes]], random: object
) -> None:
    shuffled = list(pairs)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, two = grouped(pairs), grouped(shuffled)
    assert one.keys == two.keys
    assert one.key_groups == two.key_groups
    assert one.starts.tolist() == two.starts.tolist()


def test_no_rows_give_no_groups() -> None:
    groups = grouped([])
    assert len(groups) == 0
    assert groups.keys == []
    assert groups.key_groups == []
    assert groups.starts.tolist() == [0]
    assert groups.rows.num_rows == 0


def test_a_key_of_all_groups_is_a_group_in_each() -> None:
    groups = grouped([(g, b"k") for g in reversed(GROUPS)] * 2)
    assert groups.keys == [b"k"] * 5
    assert [int.from_bytes(g) for g in groups.key_groups] == GROUPS
    assert groups.rows.column("number").to_pylist() == [4, 9, 3, 8, 2, 7, 1, 6, 0, 5]


def test_tables_of_several_chunks_are_grouped_as_one() -> None:
    codec = KeyCodec(T.StructType([T.StructField("k", T.LongType())]))
    table = pa.concat_tables([pa.table({"k": pa.array([3, 1])}), pa.table({"k": pa.array([1, 2])})])
    assert table.column("k").num_chunks == 2
    encoded = codec.encode_arrow([table.column("k").combine_chunks()])
    groups = group_rows(table, encoded, np.zeros(4, np.uint16))
    assert [codec.decode(key)[0] for key in groups.keys] == [(1,), (2,), (3,)]
    assert groups.rows.column("k").to_pylist() == [1, 1, 2, 3]
