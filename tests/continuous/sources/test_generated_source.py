"""Generated rows are a pure function of seed, split and row, and come at the rate asked for."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from statebackend.continuous.sources.generated_source import GeneratedSource, RangeSource
from statebackend.continuous.sources.nexmark_source import FIRST_MS, KINDS, NexmarkSource
from statebackend.continuous.sources.source import Json, SplitReader
from statebackend.errors import SchemaError, SettingError
from statebackend.schema.types import arrow_schema


def drain(reader: SplitReader, max_rows: int = 1_000) -> pa.Table:
    batches = []
    while not reader.ended:
        batch = reader.read(max_rows)
        assert batch is not None
        batches.append(batch)
    return pa.Table.from_batches(batches) if batches else None


def whole(source: GeneratedSource) -> pa.Table:
    tables = [drain(source.open(split, None)) for split in source.discover(None).splits]
    return pa.concat_tables([table for table in tables if table is not None])


def test_a_range_is_in_its_splits_once() -> None:
    source = RangeSource(10, splits=3)
    found = source.discover(None)
    assert found.done
    assert source.discover(found.state).splits == ()
    rows = [drain(source.open(split, None))["id"].to_pylist() for split in found.splits]
    assert rows == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert source.open(found.splits[1], {"rows": 3}).ended


@pytest.mark.parametrize("kind", KINDS)
@given(
    seed=st.integers(-(2**70), 2**70),
    splits=st.integers(1, 4),
    rows=st.integers(0, 300),
    reads=st.lists(st.integers(1, 40), min_size=1),
)
def test_from_any_position_the_rest_is_the_same(
    kind: str, seed: int, splits: int, rows: int, reads: list[int]
) -> None:
    source = NexmarkSource(kind, seed=seed, splits=splits, rows=rows)
    for split in source.discover(None).splits:
        expected = drain(source.open(split, None))
        position: Json | None = None
        batches: list[pa.RecordBatch] = []
        for max_rows in reads:
            reader = source.open(split, position)
            batch = reader.read(max_rows)
            batches += [] if batch is None else [batch]
            position = json.loads(json.dumps(reader.position))
        rest = drain(source.open(split, position), 7)
        parts = [pa.Table.from_batches(batches)] if batches else []
        parts += [] if rest is None else [rest]
        assert (pa.concat_tables(parts) if parts else None) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_splits_does_not_change_the_rows(kind: str) -> None:
    one = whole(NexmarkSource(kind, rows=500))
    for splits in (2, 7):
        found = whole(NexmarkSource(kind, rows=500, splits=splits))
        order = pc.sort_indices(found["dateTime"])
        assert found["dateTime"].take(order).equals(one["dateTime"])
        assert Counter(map(str, found.to_pylist())) == Counter(map(str, one.to_pylist()))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_schema_and_columns_can_be_chosen(kind: str) -> None:
    source = NexmarkSource(kind, rows=100)
    table = whole(source)
    assert table.schema == arrow_schema(source.schema)
    table.validate(full=True)
    assert source.event_time == "dateTime"
    assert table["dateTime"][0].as_py().timestamp() * 1000 - FIRST_MS < 1
    for name in table.column_names:
        few = whole(NexmarkSource(kind, rows=100, columns=[name]))
        assert few.column_names == [name]
        assert few[name].equals(table[name])
    assert pickle.loads(pickle.dumps(source)).discover(None) == source.discover(None)


def test_another_seed_gives_other_rows() -> None:
    one, two = (whole(NexmarkSource(rows=1_000, seed=seed)) for seed in (1, 2))
    for name in ("auction", "bidder", "price", "channel", "url", "extra"):
        assert one[name] != two[name]
    assert one["dateTime"] == two["dateTime"]


def test_the_streams_belong_together() -> None:
    bids = whole(NexmarkSource("bid", rows=46_000))
    auctions = whole(NexmarkSource("auction", rows=3_000))
    persons = whole(NexmarkSource("person", rows=1_000))
    assert auctions["id"].to_pylist() == list(range(1_000, 4_000))
    assert persons["id"].to_pylist() == list(range(1_000, 2_000))
    opened = dict(zip(auctions["id"].to_pylist(), auctions["dateTime"].to_pylist(), strict=True))
    joined = dict(zip(persons["id"].to_pylist(), persons["dateTime"].to_pylist(), strict=True))
    for bid in bids.select(["auction", "bidder", "dateTime"]).to_pylist():
        assert opened[bid["auction"]] <= bid["dateTime"]
        assert joined[bid["bidder"]] <= bid["dateTime"]
    for auction in auctions.select(["seller", "dateTime", "expires"]).to_pylist():
        assert joined[auction["seller"]] <= auction["dateTime"] < auction["expires"]
    assert pc.min(pc.subtract(auctions["reserve"], auctions["initialBid"])).as_py() >= 100


def test_half_of_the_bids_are_for_hot_auctions_and_by_hot_channels() -> None:
    bids = whole(NexmarkSource("bid", rows=20_000, columns=["auction", "channel", "price", "url"]))
    hot = np.mean(np.asarray(bids["auction"]) % 100 == 0)
    assert 0.45 < hot < 0.56
    channels = bids["channel"].to_pylist()
    popular = {"Google", "Facebook", "Baidu", "Apple"}
    assert 0.45 < np.mean([channel in popular for channel in channels]) < 0.55
    assert len(set(channels)) > 5_000
    for channel, url in zip(channels[:200], bids["url"].to_pylist(), strict=False):
        tail = url.partition("&channel_id=")[2]
        assert tail == ("" if channel in popular else channel.removeprefix("channel-"))
    digits = Counter(len(str(price)) for price in bids["price"].to_pylist())
    assert sorted(digits) == [3, 4, 5, 6, 7, 8]
    assert min(digits.values()) > 2_500


UTC = ZoneInfo("UTC")  # before 25, pyarrow shows pytz's


@pytest.mark.parametrize(
    ("kind", "digest"),
    [
        ("bid", "8cece45bd8a71f6666ee70ac66bbd1dc"),
        ("auction", "a5c9644c74e3e4303ce502676b0394b0"),
        ("person", "dc38065359494c951eda02d7f32112ed"),
    ],
)
def test_these_very_rows_in_every_release(kind: str, digest: str) -> None:
    """A position in a checkpoint is a number: the rows behind it must never change."""
    rows = [
        {k: v.replace(tzinfo=UTC) if isinstance(v, datetime) else v for k, v in row.items()}
        for row in whole(NexmarkSource(kind, rows=1_000, seed=42, splits=3)).to_pylist()
    ]
    assert blake3(repr(rows).encode()).hexdigest()[:32] == digest


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rows_come_at_their_rate_and_what_is_late_is_made_up_for() -> None:
    clock = Clock()
    source = RangeSource(None, splits=2, rows_per_s=20, clock=clock)
    assert (source.bounded, source.splits_end) == (False, False)
    reader = source.open(source.discover(None).splits[1], {"rows": 5})
    assert reader.read(100) is None
    clock.now += 0.25
    batch = reader.read(100)
    assert batch is not None
    assert batch["id"].to_pylist() == [11, 13]
    assert reader.read(100) is None
    clock.now += 10
    counts = [batch.num_rows if (batch := reader.read(40)) else 0 for _ in range(4)]
    assert counts == [40, 40, 20, 0]
    assert not reader.ended


@pytest.mark.parametrize("kind", KINDS)
def test_live_rows_come_when_it_is_their_time(kind: str) -> None:
    now = [5_000]
    source = NexmarkSource(
        kind, splits=3, live=True, events_per_s=1_000, first_ms=5_000, clock_ms=lambda: now[0]
    )
    readers = [source.open(split, None) for split in source.discover(None).splits]
    given_rows: list[Any] = []
    for _ in range(300):
        for reader in readers:
            batch = reader.read(1_000)
            given_rows += [] if batch is None else batch["dateTime"].to_pylist()
        all_due = whole(NexmarkSource(kind, rows=600, events_per_s=1_000, first_ms=5_000))
        due = [at for at in all_due["dateTime"].to_pylist() if at.timestamp() * 1000 <= now[0]]
        assert sorted(given_rows) == due
        now[0] += 7 if now[0] > 5_100 else 1
        if now[0] > 5_300:
            break


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"kind": "click"}, SettingError),
        ({"splits": 0}, SettingError),
        ({"rows": -1}, SettingError),
        ({"rows_per_s": -1.0}, SettingError),
        ({"events_per_s": 0}, SettingError),
        ({"live": True, "rows_per_s": 5.0}, SettingError),
        ({"columns": ["id"]}, SchemaError),
        ({"columns": []}, SchemaError),
    ],
)
def test_a_wrong_use_is_refused_where_it_is_made(
    options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        NexmarkSource(**options)
