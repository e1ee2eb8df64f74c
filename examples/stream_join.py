"""A join of two streams with time bounds: clicks, with the impression at most ten minutes before.

`python -m examples.stream_join` runs it on generated files.

Take it for rules of your own about which rows match. Both streams become one frame, a column says
which of the two a row is of. The watermark goes by the stream that is ahead: its delay must cover
how far the other one is behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, functions

from examples.local import Run
from statebackend import ArrowContext, ArrowProcessor, StateBackend
from statebackend.api.arrow import Keys

ROWS = "id bigint, user string, ad string, at timestamp"  # impressions and clicks
OUTPUT = "user string, ad string, impression bigint, click bigint, clicked timestamp"
BOUND_US = 10 * 60 * 1_000_000
_NEVER = np.iinfo(np.int64).max
_UTC = pa.timestamp("us", "UTC")


class Side(NamedTuple):  # rows of one stream, in state and in this batch, by key and time
    index: np.ndarray  # which of ctx.keys
    id: np.ndarray
    at: np.ndarray  # microseconds
    new: np.ndarray


class ClicksOfImpressions(ArrowProcessor):
    """Gives each pair once. Rows are kept as keys of maps, from which they can go one by one."""

    def open(self, ctx: ArrowContext) -> None:
        self.shown = ctx.map_state("shown", "at bigint, id bigint", "yes boolean")
        self.clicked = ctx.map_state("clicked", "at bigint, id bigint", "yes boolean")
        self.alarm = ctx.value_state("alarm", "at bigint")  # the key's one timer, milliseconds

    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> pa.RecordBatch:
        keys, index = ctx.keys, ctx.keys.index
        ids, at = batch.column("id").to_numpy(), batch.column("at").cast(pa.int64()).to_numpy()
        click = batch.column("click").to_numpy(zero_copy_only=False)
        shown = _side(self.shown.items(keys), index[~click], ids[~click], at[~click])
        clicked = _side(self.clicked.items(keys), index[click], ids[click], at[click])
        for state, of in ((self.shown, ~click), (self.clicked, click)):
            state.put(keys.take(index[of]), {"at": at[of], "id": ids[of]}, np.ones(of.sum(), bool))

        # One timer per key: when the first of its rows is no longer needed.
        last_us = np.where(click, at, at + BOUND_US)
        due = -(-np.minimum.reduceat(last_us, keys.starts[:-1]) // 1000)  # rounded up
        before = self.alarm.get(keys).column("at").fill_null(_NEVER).to_numpy()
        sooner = due < before
        moved = sooner & (before < _NEVER)
        ctx.timers.delete(keys.take(moved), before[moved])
        self._wake(keys.take(sooner), due[sooner], ctx)

        left, right = _pairs(shown, clicked)
        found = keys.take(shown.index[left]).columns  # the key columns, a row for each pair
        found = found.append_column("impression", pa.array(shown.id[left]))
        found = found.append_column("click", pa.array(clicked.id[right]))
        return found.append_column("clicked", pa.array(clicked.at[right]).cast(_UTC))

    def on_timers(self, keys: Keys, at_ms: np.ndarray, ctx: ArrowContext) -> None:
        """Forget what no row can match that is still to come: all are after the watermark."""
        due = np.full(len(keys), _NEVER)
        for state, needed_us in ((self.shown, BOUND_US), (self.clicked, 0)):
            index, rows, _ = state.items(keys)
            last_us = rows.column("at").to_numpy() + needed_us
            stays = last_us > ctx.watermark_ms * 1000
            state.delete(keys.take(index[~stays]), rows.filter(pa.array(~stays)))
            np.minimum.at(due, index[stays], -(-last_us[stays] // 1000))
        self.alarm.delete(keys)
        self._wake(keys.take(due < _NEVER), due[due < _NEVER], ctx)

    def _wake(self, keys: Keys, at_ms: np.ndarray, ctx: ArrowContext) -> None:
        ctx.timers.register(keys, at_ms)
        self.alarm.put(keys, at_ms)


def _side(known: tuple, index: np.ndarray, ids: np.ndarray, at: np.ndarray) -> Side:
    old_index, old, _ = known  # as the map state gave them
    index, at = np.append(old_index, index), np.append(old.column("at").to_numpy(), at)
    ids = np.append(old.column("id").to_numpy(), ids)
    order = np.lexsort((at, index))
    return Side(index[order], ids[order], at[order], order >= len(old_index))


def _pairs(shown: Side, clicked: Side) -> tuple[np.ndarray, np.ndarray]:
    """Places of impressions and clicks of one key, the click 0 to 10 minutes after; one is new."""
    first = _before(shown.index, shown.at, clicked)
    counts = _before(shown.index, shown.at + BOUND_US + 1, clicked) - first
    left = np.repeat(np.arange(len(counts)), counts)
    right = np.arange(len(left)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    fresh = shown.new[left] | clicked.new[right]  # the others were given before
    return left[fresh], right[fresh]


def _before(index: np.ndarray, at: np.ndarray, side: Side) -> np.ndarray:
    """How many rows of a side come before each (key, time)."""
    order = np.lexsort((np.append(at, side.at), np.append(index, side.index)))
    counts = np.empty(len(order), np.int64)
    counts[order] = np.cumsum(order >= len(at))
    return counts[: len(at)]


def build(backend: StateBackend, impressions: DataFrame, clicks: DataFrame) -> DataFrame:
    """One row for each click and each impression of its user and ad that it may be due to."""
    impressions = impressions.withColumn("click", functions.lit(False))
    return backend.transform_arrow(
        impressions.unionByName(clicks.withColumn("click", functions.lit(True))),
        keys=["user", "ad"],
        processor=ClicksOfImpressions(),
        output_schema=OUTPUT,
        uid="clicks-of-impressions",
        time_mode="event",
        event_time="at",
        watermark_delay="5 minutes",
    )


def generated(seed: int, files: int = 6, rows: int = 300) -> Iterator[pa.Table]:
    """Ten minutes per file, some rows up to two minutes late."""
    rng = np.random.default_rng(seed)
    for number in range(files):
        at_s = 1_700_000_000 + 600 * number + rng.integers(-120, 600, rows)
        columns = {
            "id": np.arange(rows) + number * rows,
            "user": [f"user-{i:02}" for i in rng.integers(0, 40, rows)],
            "ad": [f"ad-{i}" for i in rng.integers(0, 3, rows)],
            "at": pa.array(at_s * 1_000_000).cast(_UTC),
        }
        yield pa.table(columns)


def main() -> None:
    with Run("stream-join") as run:
        impressions = run.stream("impressions", ROWS, generated(1))
        clicks = run.stream("clicks", ROWS, generated(2, rows=100))
        run.show(build(run.backend, impressions, clicks), "click", "impression")


if __name__ == "__main__":
    main()
