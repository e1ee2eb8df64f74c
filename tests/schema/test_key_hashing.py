"""The hash from key to key group: conformance cases, Spark's vectors, Arrow's many layouts."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from statebackend.errors import ParallelismError, UnsupportedTypeError, UsageError
from statebackend.key_hashing import hash_columns, key_groups, murmur_mix
from statebackend.keygroups import (
    MAX_PARALLELISM,
    KeyGroupRange,
    check_parallelism,
    default_max_parallelism,
    key_group_range,
    subtask_of,
)
from tests.schema.key_vectors import MAX_PARALLELISMS, Case, load

CASES = load()

MIX = [
    (0, 593689054, 94, 4),
    (42, 1134849565, 29, 5),
    (1000, 3506311, 7, 1),
    (-1, 1982413648, 80, 8),
    (-2147483648, 1718298732, 108, 2),
]


def _slow_mix(code: int) -> int:
    """Step 2 spelled out in Python integers."""
    mask = 0xFFFFFFFF
    c = code * 0xCC9E2D51 & mask
    c = (c << 15 | c >> 17) & mask
    c = c * 0x1B873593 & mask
    c = (c << 13 | c >> 19) & mask
    c = (c * 5 + 0xE6546B64 & mask) ^ 4
    c ^= c >> 16
    c = c * 0x85EBCA6B & mask
    c ^= c >> 13
    c = c * 0xC2B2AE35 & mask
    c ^= c >> 16
    signed = c - (1 << 32) if c >> 31 else c
    return signed if signed >= 0 else (-signed if signed != -(1 << 31) else 0)


def test_the_mix_is_that_of_the_conformance_table() -> None:
    codes = np.array([row[0] for row in MIX], np.int32)
    mixed = murmur_mix(codes)
    assert mixed.tolist() == [row[1] for row in MIX]
    assert (mixed % 128).tolist() == [row[2] for row in MIX]
    assert (mixed % 10).tolist() == [row[3] for row in MIX]


def test_the_mix_is_never_negative_and_agrees_with_plain_integers() -> None:
    codes = np.random.default_rng(7).integers(-(2**31), 2**31, 5000).astype(np.int32)
    assert murmur_mix(codes).tolist() == [_slow_mix(code) for code in codes.tolist()]


def test_the_mix_keeps_the_shape_and_its_input() -> None:
    codes = np.array([[0, 42], [1000, -1]], np.int32)
    assert murmur_mix(codes).shape == (2, 2)
    assert codes.tolist() == [[0, 42], [1000, -1]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.ddl)
def test_codes_are_those_that_spark_gave(case: Case) -> None:
    columns = case.columns()
    assert hash_columns(columns).tolist() == case.codes
    for most in MAX_PARALLELISMS:
        groups = key_groups(columns, most)
        assert groups.dtype == np.uint16
        assert groups.tolist() == case.groups[str(most)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.ddl)
def test_slices_and_chunks_hash_as_the_whole(case: Case) -> None:
    columns = case.columns()
    sliced = [column.slice(1) for column in columns]
    assert hash_columns(sliced).tolist() == case.codes[1:]
    chunked = [pa.chunked_array([c.slice(0, 1), c.slice(1)]) for c in columns]
    assert hash_columns(chunked).tolist() == case.codes


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()],
    ids=str,
)
def test_every_layout_of_a_string_hashes_alike(kind: pa.DataType) -> None:
    texts = ["", "a", None, "Grüße", "y" * 70]
    plain = hash_columns([pa.array(texts)]).tolist()
    assert hash_columns([pa.array(texts).cast(kind)]).tolist() == plain
    assert hash_columns([pa.array(texts).dictionary_encode()]).tolist() == plain


@pytest.mark.parametrize("kind", [pa.large_list(pa.int32()), pa.list_(pa.int32(), 2)], ids=str)
def test_every_layout_of_an_array_hashes_alike(kind: pa.DataType) -> None:
    rows = pa.array([[1, 2], None, [3, None]], pa.list_(pa.int32()))
    other = pa.array([[1, 2], None, [3, None]], kind)
    assert hash_columns([other]).tolist() == hash_columns([rows]).tolist()
    assert hash_columns([other.slice(1)]).tolist() == hash_columns([rows.slice(1)]).tolist()


def test_many_rows_of_many_lengths_hash_as_one_by_one() -> None:
    draw = np.random.default_rng(3)
    texts = ["z" * int(n) for n in draw.integers(0, 30, 40)] + ["w" * 5003, "é" * 777]
    many = pa.array(texts * 900)
    whole = hash_columns([many]).tolist()
    singly = [hash_columns([pa.array([text])]).tolist()[0] for text in texts]
    assert whole == singly * 900


def test_the_type_counts_and_so_does_the_order_of_columns() -> None:
    one, two = pa.array([1], pa.int32()), pa.array([1], pa.int64())
    text = pa.array(["a"])
    assert hash_columns([one]) != hash_columns([two])
    assert hash_columns([one, text]) != hash_columns([text, one])


def test_a_row_of_nulls_keeps_the_seed() -> None:
    assert hash_columns([pa.array([None], pa.int64()), pa.array([None], pa.string())]) == 42


def test_no_rows_give_no_codes() -> None:
    assert hash_columns([pa.array([], pa.string())]).tolist() == []


@pytest.mark.parametrize(
    "kind",
    [pa.map_(pa.string(), pa.int32()), pa.uint32(), pa.null(), pa.float16(), pa.time32("s")],
    ids=str,
)
def test_types_that_cannot_be_keys_are_refused_even_without_rows(kind: pa.DataType) -> None:
    for column in (pa.array([], kind), pa.array([], pa.struct([("f", pa.list_(kind))]))):
        with pytest.raises(UnsupportedTypeError, match="cannot be part of a key"):
            hash_columns([column])


def test_no_columns_or_uneven_columns_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one"):
        hash_columns([])
    with pytest.raises(UsageError, match="different lengths: 1, 2"):
        hash_columns([pa.array([1]), pa.array([1, 2])])


# --- key groups --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallelism", "most"), [(1, 128), (85, 128), (86, 256), (171, 256), (342, 1024)]
)
def test_default_max_parallelism_leaves_room(parallelism: int, most: int) -> None:
    assert default_max_parallelism(parallelism) == most


def test_default_max_parallelism_ends_at_the_limit() -> None:
    assert default_max_parallelism(16384) == 32768
    assert default_max_parallelism(32768) == 32768


@pytest.mark.parametrize(
    ("parallelism", "most", "ranges"),
    [
        (3, 10, [(0, 3), (4, 6), (7, 9)]),
        (7, 128, [(0, 18), (19, 36), (37, 54), (55, 73), (74, 91), (92, 109), (110, 127)]),
    ],
)
def test_ranges_are_those_of_the_conformance_table(
    parallelism: int, most: int, ranges: list[tuple[int, int]]
) -> None:
    got = [key_group_range(i, parallelism, most) for i in range(parallelism)]
    assert [(r.start, r.end) for r in got] == ranges


def _pairs() -> list[tuple[int, int]]:
    draw = np.random.default_rng(11)
    most = draw.integers(1, MAX_PARALLELISM + 1, 1000)
    pairs = [(int(draw.integers(1, m + 1)), int(m)) for m in most]
    return [(1, 1), (2, 13), (13, 32767), (32767, 32767), *pairs]


def test_every_group_lies_in_the_range_of_the_subtask_that_the_formula_gives() -> None:
    for parallelism, most in _pairs():
        groups = np.arange(most)
        subtasks = subtask_of(groups, parallelism, most)
        starts = (np.arange(parallelism) * most + parallelism - 1) // parallelism
        assert (subtasks == np.searchsorted(starts, groups, side="right") - 1).all()
        for subtask in {0, parallelism // 2, parallelism - 1}:
            owned = key_group_range(subtask, parallelism, most)
            assert owned.start == starts[subtask]
            assert len(owned) == np.count_nonzero(subtasks == subtask)
            for group in {owned.start, owned.end}:
                assert subtask_of(group, parallelism, most) == subtask


def test_subtasks_of_narrow_arrays_do_not_wrap() -> None:
    groups = np.array([0, 32767], np.uint16)
    assert subtask_of(groups, 32768, 32768).tolist() == [0, 32767]


@pytest.mark.parametrize(("parallelism", "most"), [(0, 1), (-1, 1), (32769, 32769), (5, 4), (1, 0)])
def test_a_parallelism_outside_its_range_is_refused(parallelism: int, most: int) -> None:
    with pytest.raises(ParallelismError):
        check_parallelism(parallelism, most)
    with pytest.raises(ParallelismError):
        key_group_range(0, parallelism, most)


def test_a_subtask_that_is_not_there_has_no_range() -> None:
    with pytest.raises(ParallelismError, match="no subtask 3"):
        key_group_range(3, 3, 10)


def test_ranges_hold_count_and_meet() -> None:
    left, right = KeyGroupRange(0, 6), KeyGroupRange(4, 9)
    assert 6 in left
    assert 7 not in left
    assert list(left.intersection(right)) == [4, 5, 6]
    nothing = KeyGroupRange(0, 3).intersection(KeyGroupRange(4, 9))
    assert len(nothing) == 0
    assert nothing == KeyGroupRange(5, 6).intersection(KeyGroupRange(0, 1))
