"""Running totals: each payment with the balance after it; and totals per account in one line.

`python -m examples.running_totals` runs it on generated files.

* `build_totals` is all you need for *one* row per account and batch: `backend.aggregate`. It adds
  up before the shuffle and keeps a few bytes per account.
* `build` is for what an aggregation cannot say: every payment comes out, with the balance after
  it. Write an `ArrowProcessor` when the output has other rows than "one per key", or when the
  state should expire.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame

from examples.local import Run
from statebackend import TTL, ArrowContext, ArrowProcessor, StateBackend

PAYMENTS = "account string, id bigint, cents bigint"
OUTPUT = "account string, id bigint, cents bigint, payments bigint, balance bigint"
QUIET_MS = 400 * 24 * 60 * 60 * 1000


class RunningTotals(ArrowProcessor):
    """The balance of each account; of one that is quiet for longer than a year it starts anew."""

    def open(self, ctx: ArrowContext) -> None:
        # Money in whole cents: sums of doubles depend on the order in which they are added.
        # A TTL, since accounts are closed and nobody says so: without one, state only grows.
        schema = "payments bigint, balance bigint"
        self.totals = ctx.value_state("totals", schema, ttl=TTL(QUIET_MS))

    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> pa.RecordBatch:
        keys, index = ctx.keys, ctx.keys.index
        first, last = keys.starts[:-1], keys.starts[1:] - 1  # the rows of a key are together
        known = self.totals.get(keys)  # one row per key, null for new ones
        payments = known.column("payments").fill_null(0).to_numpy()
        balance = known.column("balance").fill_null(0).to_numpy()

        cents = batch.column("cents").fill_null(0).to_numpy()
        running = np.cumsum(cents)  # over all keys: less what was there before the key's first row
        running += (balance - running[first] + cents[first])[index]
        numbers = payments[index] + np.arange(len(cents)) - first[index] + 1

        self.totals.put(keys, {"payments": numbers[last], "balance": running[last]})
        return batch.append_column("payments", pa.array(numbers)).append_column(
            "balance", pa.array(running)
        )


def build(backend: StateBackend, payments: DataFrame) -> DataFrame:
    """Every payment with the number and the sum of the account's payments up to it."""
    return backend.transform_arrow(
        payments,
        keys="account",
        processor=RunningTotals(),
        output_schema=OUTPUT,
        uid="running-totals",
    )


def build_totals(backend: StateBackend, payments: DataFrame) -> DataFrame:
    """One row for each account that a batch touched."""
    return backend.aggregate(
        payments.groupBy("account"), payments="count", balance=("sum", "cents"), uid="totals"
    )


def generated(files: int = 4, rows: int = 500, accounts: int = 20) -> Iterator[pa.Table]:
    """Payments, and their reversals."""
    rng = np.random.default_rng(1)
    for number in range(files):
        names = np.array([f"account-{i:02}" for i in range(accounts)])
        yield pa.table(
            {
                "account": names[rng.integers(0, accounts, rows)],
                "id": np.arange(rows) + number * rows,
                "cents": rng.integers(-2_000, 10_000, rows),
            }
        )


def main() -> None:
    with Run("running-totals") as run:
        run.show(build(run.backend, run.stream("payments", PAYMENTS, generated())), "account", "id")


if __name__ == "__main__":
    main()
