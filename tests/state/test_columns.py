"""Binary columns against what lists of bytes do."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statebackend.state.binary_columns import (
    EMPTY,
    ascends,
    bools_of,
    fixed_column,
    indices_of,
    joined,
    matrix_of,
    newest,
    order_of,
    places_array,
    rows_in_order,
    take,
    valid_bits,
    width_of,
)

Items = list[bytes]
FEW = st.sampled_from([0, 1, 127, 128, 255])


@st.composite
def of_one_width(draw: st.DrawFn) -> Items:
    """Items of one width, of 0 to 20 bytes; many of their bytes are the same."""
    width = draw(st.integers(0, 20))
    varied = draw(st.sets(st.integers(0, max(0, width - 1)), max_size=10))
    items = []
    for _ in range(draw(st.integers(0, 30))):
        item = bytearray(b"\x42" * width)
        for place in varied:
            if place < width:
                item[place] = draw(FEW)
        items.append(bytes(item))
    return items


ITEMS = of_one_width() | st.lists(st.binary(max_size=4), max_size=30)
CUTS = st.tuples(st.integers(0, 9), st.integers(0, 9))


def column(items: list[bytes | None], cut: tuple[int, int] = (0, 0)) -> pa.BinaryArray:
    """Items with others around them that a slice has cut off."""
    before, after = cut
    padded = pa.array([b"\xff\xff"] * before + items + [b"x", None] * after, pa.binary())
    return padded.slice(before, len(items))


@given(ITEMS, CUTS)
def test_the_order_is_that_of_sorted_and_stable(items: Items, cut: tuple[int, int]) -> None:
    order = order_of(column(items, cut))
    assert order.dtype == np.int64
    assert order.tolist() == sorted(range(len(items)), key=items.__getitem__)


@pytest.mark.parametrize("width", range(21))
def test_numbers_of_every_width_are_ordered_as_their_bytes(width: int) -> None:
    rng = np.random.default_rng(width)
    for spread in (1, 3, 256):
        matrix = rng.integers(0, spread, (500, width), np.uint8)
        items = [row.tobytes() for row in matrix]
        given = fixed_column(matrix)
        assert given.to_pylist() == items
        expected = sorted(range(500), key=items.__getitem__)
        assert order_of(given).tolist() == expected
        assert order_of(given.slice(100)).tolist() == sorted(
            range(400), key=items[100:].__getitem__
        )


@given(ITEMS, CUTS)
def test_a_column_ascends_if_each_item_is_above_the_one_before(
    items: Items, cut: tuple[int, int]
) -> None:
    assert ascends(column(items, cut)) == all(a < b for a, b in pairwise(items))
    distinct = sorted(set(items))
    assert ascends(column(distinct, cut))


@given(ITEMS, CUTS)
def test_a_width_is_known_where_all_have_it(items: Items, cut: tuple[int, int]) -> None:
    widths = {len(item) for item in items}
    given = column(items, cut)
    assert width_of(given) == (widths.pop() if len(widths) == 1 else None)
    width = width_of(given)
    if width is not None:
        matrix = matrix_of(given, width)
        assert [row.tobytes() for row in matrix] == items
        again = fixed_column(np.ascontiguousarray(matrix))
        again.validate(full=True)
        assert again.equals(given)
    assert width_of(column([*items, None], cut)) is None


def test_widths_that_are_only_equal_on_the_whole_are_none() -> None:
    assert width_of(column([b"ab", b"a", b"abc"])) is None
    assert width_of(column([b"a", b"", b"aa"])) is None


@given(st.data(), st.integers(0, 8))
def test_columns_are_glued_row_by_row(data: st.DataObject, rows: int) -> None:
    parts: list[pa.BinaryArray | bytes] = []
    expected = [b""] * rows
    for _ in range(data.draw(st.integers(1, 4))):
        same = data.draw(st.booleans())
        size = st.integers(0, 5).flatmap(lambda n: st.binary(min_size=n, max_size=n))
        width = data.draw(st.integers(0, 5))
        one = st.binary(min_size=width, max_size=width) if same else size
        items = [data.draw(one) for _ in range(rows)]
        parts.append(column(items, data.draw(CUTS)))
        expected = [a + b for a, b in zip(expected, items, strict=True)]
        if data.draw(st.booleans()):
            constant = data.draw(st.binary(max_size=3))
            parts.append(constant)
            expected = [a + constant for a in expected]
    if data.draw(st.booleans()):
        parts.insert(0, b"front")
        expected = [b"front" + a for a in expected]
    got = joined(parts)
    got.validate(full=True)
    assert got.type == pa.binary()
    assert got.to_pylist() == expected


@given(st.lists(st.integers(0, 2**17 - 1), max_size=50), st.integers(0, 3))
def test_codes_are_ordered_stably(codes: list[int], extra: int) -> None:
    count = max(codes, default=0) + 1 + extra
    got = rows_in_order(np.array(codes, np.int32), count)
    assert got.tolist() == sorted(range(len(codes)), key=codes.__getitem__)


def test_more_codes_than_sixteen_bits_are_ordered_stably() -> None:
    codes = np.random.default_rng(1).integers(0, 200_000, 300_000).astype(np.int32)
    assert rows_in_order(codes, 200_000).tolist() == np.argsort(codes, kind="stable").tolist()


Change = tuple[bytes, bytes | None]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from([b"", b"\0", b"a", b"ab", b"b" * 9, b"c" * 9, b"\xff"]),
        st.none() | st.binary(max_size=3),
    ),
    max_size=8,
)


@given(st.lists(st.tuples(CHANGES, CUTS, st.booleans()), max_size=4))
def test_the_newest_word_for_each_key_counts(
    parts: list[tuple[list[Change], tuple[int, int], bool]],
) -> None:
    truth: dict[bytes, bytes | None] = {}
    columns = []
    for changes, cut, ordered in parts:
        some = sorted(dict(changes).items()) if ordered else changes
        truth.update(some)
        columns.append((column([k for k, _ in some], cut), column([v for _, v in some], cut)))
    keys, values = newest(columns)
    assert keys.to_pylist() == sorted(truth)
    assert values.to_pylist() == [truth[key] for key in sorted(truth)]


@given(st.lists(st.none() | st.binary(max_size=2), max_size=40), CUTS)
def test_bits_say_what_is_there(items: list[bytes | None], cut: tuple[int, int]) -> None:
    given = column(items, cut)
    assert valid_bits(given).tolist() == [item is not None for item in items]
    flags = pa.array([None, True, *(item is not None for item in items)], pa.bool_()).slice(2)
    assert bools_of(flags).tolist() == [item is not None for item in items]


@given(st.lists(st.integers(0, 255), max_size=20), st.integers(0, 5))
def test_numbers_are_seen_without_a_copy(numbers: list[int], cut: int) -> None:
    for kind in (pa.int64(), pa.uint64(), pa.int32(), pa.uint8(), pa.int16()):
        if kind == pa.int16() or max(numbers, default=0) < 256:
            whole = pa.array([1] * cut + numbers, kind)
            assert indices_of(whole.slice(cut)).tolist() == numbers
    places = np.array(numbers, np.int64)[::-1]  # not contiguous
    assert places_array(places).to_pylist() == numbers[::-1]
    assert places_array(places.astype(np.uint64)).to_pylist() == numbers[::-1]


def test_taking_keeps_order_and_repeats() -> None:
    given = column([b"a", None, b"c"], (3, 1))
    assert take(given, np.array([2, 0, 2, 1])).to_pylist() == [b"c", b"a", b"c", None]
    assert take(given, np.zeros(0, np.int64)).to_pylist() == []


def test_nothing_is_nothing_everywhere() -> None:
    for empty in (EMPTY, column([]), column([b"a"]).slice(1)):
        assert order_of(empty).tolist() == []
        assert ascends(empty)
        assert width_of(empty) is None
        assert joined([empty, b"x", empty]).to_pylist() == []
        assert valid_bits(empty).tolist() == []
        assert [one.to_pylist() for one in newest([(empty, empty)])] == [[], []]
    assert fixed_column(np.zeros((0, 4), np.uint8)).to_pylist() == []
    assert fixed_column(np.zeros((3, 0), np.uint8)).to_pylist() == [b"", b"", b""]
    assert [one.to_pylist() for one in newest([])] == [[], []]
