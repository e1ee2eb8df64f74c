from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statebackend.continuous.exchange.partitioner import (
    broadcast,
    by_key_group,
    forward,
    rebalance,
)
from statebackend.errors import ParallelismError
from statebackend.key_hashing import key_groups
from statebackend.keygroups import key_group_range
from tests.continuous.exchange.peers import rows

KEYS = st.lists(st.tuples(st.one_of(st.none(), st.text(max_size=5)), st.integers(-5, 5)))


@given(KEYS, st.integers(1, 9), st.sampled_from([9, 128, 1000]))
def test_every_row_goes_to_the_owner_of_its_key_group_in_its_order(
    keys: list[tuple[str | None, int]], parallelism: int, max_parallelism: int
) -> None:
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array(range(len(keys)), pa.int64()),
            pa.array([text for text, _ in keys], pa.string()),
            pa.array([number for _, number in keys], pa.int64()),
        ],
        names=["n", "text", "number"],
    )
    dealt = by_key_group([1, 2], parallelism, max_parallelism)(batch)
    assert len({channel for channel, _ in dealt}) == len(dealt)
    seen: list[int] = []
    for channel, part in dealt:
        owned = key_group_range(channel, parallelism, max_parallelism)
        groups = key_groups([part.column(1), part.column(2)], max_parallelism)
        assert all(int(group) in owned for group in groups)
        places = part.column(0).to_pylist()
        assert places == sorted(places)
        assert part.equals(batch.take(pa.array(places, pa.int64())))
        seen += places
    assert sorted(seen) == list(range(len(keys)))


def test_rows_of_one_receiver_are_not_touched() -> None:
    batch = rows(0, 100)  # column 0 is constant
    ((_, part),) = by_key_group([0], 4, 128)(batch)
    assert part is batch
    assert by_key_group([1], 1, 128)(batch) == [(0, batch)]


def test_a_parallelism_that_cannot_be_is_refused() -> None:
    with pytest.raises(ParallelismError):
        by_key_group([0], 129, 128)


def test_the_other_ways_to_deal() -> None:
    batch = rows(0)
    assert forward(3)(batch) == [(3, batch)]
    assert broadcast(3)(batch) == [(0, batch), (1, batch), (2, batch)]
    turns = rebalance(3, first=5)
    assert [turns(batch)[0][0] for _ in range(4)] == [2, 0, 1, 2]


def test_many_receivers_share_out_all_keys() -> None:
    batch = rows(0, 20_000)
    dealt = by_key_group([1], 200, 1024)(batch)
    counts = np.array([part.num_rows for _, part in dealt])
    assert len(dealt) == 200
    assert counts.sum() == 20_000
