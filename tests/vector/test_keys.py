"""The keys of a batch: which rows each has, and taking some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statebackend.api.arrow import ArrowContext
from statebackend.errors import (
    ProcessorError,
    UsageError,
)
from statebackend.operators.vector.key_vector import Keys
from tests.support.ids import stable
from tests.vector.trials import Scripted, amounts, trial


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["", "a", "ab", "b", "ccc"]), min_size=1, max_size=20))
def test_rows_stand_by_key_and_keep_their_order(names: list[str]) -> None:
    seen = []

    def looks(self: Scripted, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
        keys = ctx.keys
        assert keys is ctx.keys
        rows = batch.column("k").to_pylist(), batch.column("row").to_pylist()
        distinct = keys.columns.column("k").to_pylist()
        assert len(keys) == len(distinct) == len(set(distinct))
        assert keys.starts.dtype == keys.index.dtype == np.int64
        assert keys.starts[0] == 0
        assert keys.starts[-1] == batch.num_rows == len(keys.index)
        for which, name in enumerate(distinct):
            start, end = keys.starts[which], keys.starts[which + 1]
            assert start < end
            assert rows[0][start:end] == [name] * (end - start)
            assert rows[1][start:end] == [n for n, other in enumerate(names) if other == name]
            assert (keys.index[start:end] == which).all()
        seen.append(distinct)

    table = pa.table({"k": names, "row": range(len(names))})
    with trial(looks) as under_test:
        under_test.testBatch(table)
    assert sorted(name for some in seen for name in some) == sorted(set(names))


def with_keys(check: Callable[[Keys], None]) -> None:
    """Calls `check` with the keys a, b, c, d of a batch."""

    def body(self: Scripted, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
        check(ctx.keys)

    with trial(body, maxParallelism=1) as under_test:
        under_test.testBatch(amounts(("c", 1), ("a", 1), ("d", 1), ("b", 1)))


def names_of(keys: Keys) -> list[str]:
    found: list[str] = keys.columns.column("k").to_pylist()
    # Bytes and columns are of the same keys.
    assert [full[7:].decode() for full in keys.full.to_pylist()] == found
    assert len(keys) == len(found)
    return found


@pytest.mark.parametrize(
    ("which", "found", "ascending"),
    [
        (np.array([True, False, True, False]), "ac", True),
        ([True, False, True, False], "ac", True),
        (pa.array([True, None, True, False]), "ac", True),
        (pa.chunked_array([[True, False], [True, True]]), "acd", True),
        (pa.array([False, True, False, False, True]).slice(1), "ad", True),
        (np.zeros(4, bool), "", True),
        ([], "", True),
        (np.zeros(0, np.int64), "", True),
        ([0, 1, 3], "abd", True),
        ([3, 0], "da", False),
        ([1, 1], "bb", False),
        (np.array([2], np.uint8), "c", True),
        (np.array([0, 2], np.uint64), "ac", True),
        (pa.array([3, 3, 0], pa.int32()), "dda", False),
        (pa.array([9, 1, 2]).slice(1), "bc", True),
        (range(4), "abcd", True),
    ],
    ids=stable,
)
def test_keys_are_taken_by_mask_or_by_place(which: Any, found: str, ascending: bool) -> None:
    def check(keys: Keys) -> None:
        taken = keys.take(which)
        assert names_of(taken) == list(found)
        assert taken.ascending is ascending
        assert names_of(taken.take(np.arange(len(taken))[::-1])) == list(found)[::-1]
        with pytest.raises(UsageError, match="not a batch's own"):
            _ = taken.starts
        with pytest.raises(UsageError, match="not a batch's own"):
            _ = taken.index
        assert "Keys(4 of (k))" in repr(keys)

    with_keys(check)


@pytest.mark.parametrize(
    "which",
    [
        3,
        None,
        "a",
        [0.5],
        [True],
        np.zeros(0, bool),
        np.zeros(5, bool),
        np.zeros((4, 1), bool),
        np.array([[0]]),
        [4],
        [-1],
        pa.array([0, None]),
        pa.array([0.0]),
        pa.array(["a"]),
        np.array([2**63], np.uint64),
        [None],
        [[0], [1, 2]],
        object(),
    ],
    ids=stable,
)
def test_what_selects_no_keys_is_refused_with_the_users_line(which: Any) -> None:
    def check(keys: Keys) -> None:
        keys.take(which)

    with pytest.raises(UsageError, match=r"test_keys\.py") as caught:
        with_keys(check)
    assert not isinstance(caught.value, ProcessorError), caught.value


def test_distinct_keys_come_once_and_say_where_each_went() -> None:
    def check(keys: Keys) -> None:
        several = keys.take([3, 1, 2, 1])
        distinct, index = several.distinct()
        assert len(distinct) == 3
        assert distinct.take(index).columns.equals(several.columns)
        again, same = distinct.distinct()
        assert again is distinct
        assert same.tolist() == [0, 1, 2]

    with_keys(check)


def test_items_under_the_first_fields_of_map_keys_are_those_alone() -> None:
    def body(self: Scripted, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
        keys = ctx.keys
        for day in (1, 2):
            for page in ("x", "longer"):
                self.pairs.put(
                    keys,
                    [np.full(len(keys), day), pa.array([page] * len(keys))],
                    [np.full(len(keys), 10 * day)],
                )
        several = keys.take([1, 0, 1])
        index, map_keys, values = self.pairs.items(several, under=[np.array([2, 1, 7])])
        assert index.tolist() == [0, 0, 1, 1]
        assert sorted(map_keys.column("day").to_pylist()[:2]) == [2, 2]
        assert values.column("n").to_pylist() == [20, 20, 10, 10]

    with trial(body) as under_test:
        under_test.testBatch(amounts(("c", 1), ("a", 1)))
