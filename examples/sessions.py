"""Sessions: what a visitor did until half an hour went by without a click.

`python -m examples.sessions` runs it on generated files.

* `build_counts` is one call: `backend.aggregate` with Spark's `session_window`. Take it for counts,
  sums, first, last, top_k and the like; it keeps a few bytes per open session.
* `build` is for what depends on all clicks of a session and their order, here its path. The clicks
  of open sessions are kept, and read once: when a session may be over.

Clicks may come in any order within the watermark's delay, and may join two sessions into one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from examples.local import Run
from statebackend import ArrowContext, ArrowProcessor, StateBackend, last
from statebackend.api.arrow import Keys

CLICKS = "user string, at timestamp, page string"
OUTPUT = (
    "user string, started timestamp, ended timestamp, clicks bigint, path string, bought boolean"
)
GAP_US = 30 * 60 * 1_000_000
_NEVER = np.iinfo(np.int64).max
_UTC = pa.timestamp("us", "UTC")


class ClickPaths(ArrowProcessor):
    """The pages of each session, in order."""

    def open(self, ctx: ArrowContext) -> None:
        self.clicks = ctx.list_state("clicks", "at bigint, page string")  # at in microseconds
        self.alarm = ctx.value_state("alarm", "at bigint")  # the key's one timer, milliseconds

    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
        keys = ctx.keys
        at = batch.column("at").cast(pa.int64())
        self.clicks.append(keys.take(keys.index), {"at": at, "page": batch.column("page")})
        # A session ends no sooner than a gap after the first click. One timer per key, at the
        # earliest such time: `on_timers` then finds each key once, and sees what is over.
        due = _up_to_ms(np.minimum.reduceat(at.to_numpy(), keys.starts[:-1]) + GAP_US)
        before = self.alarm.get(keys).column("at").fill_null(_NEVER).to_numpy()
        sooner = due < before
        moved = sooner & (before < _NEVER)
        ctx.timers.delete(keys.take(moved), before[moved])
        self._wake(keys.take(sooner), due[sooner], ctx)

    def on_timers(self, keys: Keys, at_ms: np.ndarray, ctx: ArrowContext) -> pa.RecordBatch:
        index, clicks = self.clicks.get(keys)
        order = np.lexsort((clicks.column("at").to_numpy(), index))
        index, clicks = index[order], clicks.take(pa.array(order))
        at, page = clicks.column("at").to_numpy(), clicks.column("page")
        # Where sessions begin: another key, or more than a gap after the click before.
        opens = (np.diff(index, prepend=-1) != 0) | (np.diff(at, prepend=0) > GAP_US)
        first = np.flatnonzero(opens)
        end = np.append(first[1:], len(at))
        over = at[end - 1] + GAP_US <= ctx.watermark_ms * 1000

        # What is open stays, and wakes its key when the first of it may be over.
        stays = np.repeat(~over, end - first)
        self.clicks.put(keys, index[stays], clicks.filter(pa.array(stays)))
        self.alarm.delete(keys)
        due = np.full(len(keys), _NEVER)
        np.minimum.at(due, index[first[~over]], _up_to_ms(at[end[~over] - 1] + GAP_US))
        self._wake(keys.take(due < _NEVER), due[due < _NEVER], ctx)

        sizes, gone = (end - first)[over], ~stays
        offsets = pa.array(np.append(0, np.cumsum(sizes)), pa.int32())
        paths = pa.ListArray.from_arrays(offsets, page.filter(pa.array(gone)).fill_null("?"))
        bought = np.logical_or.reduceat(
            pc.equal(page, "/thanks").fill_null(False).to_numpy(zero_copy_only=False), first
        )
        users = keys.take(index[first[over]]).columns
        columns = [
            *users.columns,
            pa.array(at[first[over]]).cast(_UTC),
            pa.array(at[end[over] - 1]).cast(_UTC),
            pa.array(sizes),
            pc.binary_join(paths, " > "),
            pa.array(bought[over]),
        ]
        names = [*users.schema.names, "started", "ended", "clicks", "path", "bought"]
        return pa.RecordBatch.from_arrays(columns, names)

    def _wake(self, keys: Keys, at_ms: np.ndarray, ctx: ArrowContext) -> None:
        ctx.timers.register(keys, at_ms)
        self.alarm.put(keys, at_ms)


def _up_to_ms(at_us: np.ndarray) -> np.ndarray:
    return -(-at_us // 1000)  # rounded up: a timer must not fire before its time


def build(backend: StateBackend, clicks: DataFrame) -> DataFrame:
    """One row per session, once it is over."""
    return backend.transform_arrow(
        clicks,
        keys="user",
        processor=ClickPaths(),
        output_schema=OUTPUT,
        uid="click-paths",
        time_mode="event",
        event_time="at",
        watermark_delay="10 minutes",
    )


def build_counts(backend: StateBackend, clicks: DataFrame) -> DataFrame:
    """How many clicks, and the page of the last one: no code of your own."""
    return backend.aggregate(
        clicks.withWatermark("at", "10 minutes").groupBy("user"),
        clicks="count",
        exit_page=last("page", by="at"),
        window=F.session_window("at", "30 minutes"),
        outputMode="append",
        uid="session-counts",
    )


def generated(files: int = 6, rows: int = 200) -> Iterator[pa.Table]:
    """An hour of clicks per file, some ten minutes late."""
    rng, pages = np.random.default_rng(1), ["/", "/search", "/item", "/cart", "/thanks"]
    for hour in range(files):
        at_s = 1_700_000_000 + 3600 * hour + rng.integers(-500, 3600, rows)
        user, page = rng.integers(0, 60, rows), rng.choice(pages, rows)
        users = [f"user-{i:02}" for i in user]
        yield pa.table({"user": users, "at": pa.array(at_s * 1_000_000).cast(_UTC), "page": page})


def main() -> None:
    with Run("sessions") as run:
        run.show(build(run.backend, run.stream("clicks", CLICKS, generated())), "user", "started")


if __name__ == "__main__":
    main()
