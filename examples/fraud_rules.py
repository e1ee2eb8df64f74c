"""Fraud rules: several rules for each account, over one state, in one operator.

`python -m examples.fraud_rules` runs it on generated files.

* jump: an amount of more than five times the account's mean so far.
* burst: five or more small payments in ten minutes (of the clock).
* countries: two payments, one after the other, within an hour from different countries.

Each rule is a few lines over whole columns: what the state knew (`known[index]`: of each row's
key), what came before the row in this batch, and a condition that gives a mask. A new rule is one
more mask. Payments are judged in the order in which they arrive; late ones are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from examples.local import Run
from statebackend import ArrowContext, ArrowProcessor, StateBackend
from statebackend.api.arrow import Keys

PAYMENTS = "account string, at timestamp, cents bigint, country string"
ALERTS = "account string, rule string, at timestamp, detail string"
JUMP, PAYMENTS_MIN = 5, 5  # times the mean, once there are so many
SMALL_CENTS, BURST = 200, 5
WINDOW_MS = 10 * 60 * 1000
HOUR_US = 60 * 60 * 1_000_000
_UTC = pa.timestamp("us", "UTC")


class FraudRules(ArrowProcessor):
    def open(self, ctx: ArrowContext) -> None:
        self.profile = ctx.value_state(
            "profile", "payments bigint, cents bigint, country string, at bigint"
        )
        self.small = ctx.map_state("small", "window bigint", "payments bigint")

    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> Iterator[pa.RecordBatch]:
        keys, first, last = ctx.keys, ctx.keys.starts[:-1], ctx.keys.starts[1:] - 1
        index = keys.index
        known = self.profile.get(keys)
        cents = batch.column("cents").fill_null(0).to_numpy()
        at, country = batch.column("at").cast(pa.int64()).to_numpy(), batch.column("country")

        # What the account had paid before each row.
        payments = known.column("payments").fill_null(0).to_numpy()[index]
        payments = payments + np.arange(len(cents)) - first[index]
        sums = np.cumsum(cents) - cents
        paid = known.column("cents").fill_null(0).to_numpy()[index] + sums - sums[first][index]
        jump = (payments >= PAYMENTS_MIN) & (cents * payments > JUMP * paid)
        yield _alerts(keys.take(index[jump]), "jump", at[jump], pa.array(cents[jump]))

        # The payment before each row: the row above, of a key's first row the one in state.
        above = np.arange(len(cents)) - 1
        above[first] = len(cents) + np.arange(len(keys))
        before = pa.concat_arrays([country, known.column("country")]).take(pa.array(above))
        known_at = known.column("at").fill_null(0).to_numpy()
        other = pc.not_equal(before, country).fill_null(False).to_numpy(zero_copy_only=False)
        moved = other & (np.abs(at - np.append(at, known_at)[above]) <= HOUR_US)
        way = pc.binary_join_element_wise(before, country, " > ").filter(pa.array(moved))
        yield _alerts(keys.take(index[moved]), "countries", at[moved], way)

        yield self._bursts(index[cents < SMALL_CENTS], at[cents < SMALL_CENTS], ctx)
        self.profile.put(
            keys,
            {
                "payments": payments[last] + 1,
                "cents": paid[last] + cents[last],
                "country": country.take(pa.array(last)),
                "at": at[last],
            },
        )

    def _bursts(self, index: np.ndarray, at_us: np.ndarray, ctx: ArrowContext) -> pa.RecordBatch:
        """Counts small payments by account and window, until a timer says that it is over."""
        start_ms = at_us // (WINDOW_MS * 1000) * WINDOW_MS
        both, counts = np.unique(np.column_stack([index, start_ms]), axis=0, return_counts=True)
        keys, window = ctx.keys.take(both[:, 0]), both[:, 1]
        before = self.small.get(keys, window).column("payments").fill_null(0).to_numpy()
        self.small.put(keys, window, before + counts)
        ctx.timers.register(keys, window + WINDOW_MS)
        found = (before < BURST) & (before + counts >= BURST)  # once for each window
        detail = pa.array((before + counts)[found])
        return _alerts(keys.take(found), "burst", window[found] * 1000, detail)

    def on_timers(self, keys: Keys, at_ms: np.ndarray, ctx: ArrowContext) -> None:
        self.small.delete(keys, at_ms - WINDOW_MS)  # a key comes once for each of its windows


def _alerts(keys: Keys, rule: str, at_us: np.ndarray, detail: pa.Array) -> pa.RecordBatch:
    rules = pa.repeat(pa.scalar(rule), len(keys))
    at = pa.array(at_us).cast(_UTC)
    columns = [keys.columns.column("account"), rules, at, detail.cast(pa.string())]
    return pa.RecordBatch.from_arrays(columns, ["account", "rule", "at", "detail"])


def build(backend: StateBackend, payments: DataFrame) -> DataFrame:
    """One row for each rule that a payment (or a window) breaks."""
    return backend.transform_arrow(
        payments,
        keys="account",
        processor=FraudRules(),
        output_schema=ALERTS,
        uid="fraud-rules",
        time_mode="event",
        event_time="at",
        watermark_delay="10 minutes",
    )


def generated(files: int = 6, rows: int = 400) -> Iterator[pa.Table]:
    """Half an hour of payments per file, some minutes late; account-00 pays small sums only."""
    rng = np.random.default_rng(1)
    for number in range(files):
        account = rng.integers(0, 25, rows)
        at_s = 1_700_000_000 + 1800 * number + rng.integers(-300, 1800, rows)
        cents = rng.lognormal(7, 1, rows).astype(np.int64)
        yield pa.table(
            {
                "account": [f"account-{i:02}" for i in account],
                "at": pa.array(at_s * 1_000_000).cast(_UTC),
                "cents": np.where(account == 0, cents % SMALL_CENTS, cents),
                "country": rng.choice(["DE", "FR", "US"], rows, p=[0.97, 0.02, 0.01]),
            }
        )


def main() -> None:
    with Run("fraud-rules") as run:
        run.show(build(run.backend, run.stream("payments", PAYMENTS, generated())), "account", "at")


if __name__ == "__main__":
    main()
