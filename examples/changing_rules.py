"""Rules that change while the stream runs: payments are judged by the limits that are in force.

`python -m examples.changing_rules` runs it on generated files.

Limits come on a stream of their own, a few rows now and then. `connect_broadcast` gives each of
them to every subtask, in one order, before the payments of the same micro-batch. They are kept in
broadcast state: in memory, the same everywhere, stored once in each checkpoint, and there again
after a restart at any parallelism.

A limit of null takes a country's limit away. Each subtask also counts what it let through, in an
operator list: it belongs to no account, and is spread anew when the parallelism changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import Row

from examples.local import Run
from statebackend import BroadcastProcessor, ProcessorContext, StateBackend

PAYMENTS = "account string, id bigint, country string, cents bigint"
LIMITS = "country string, cents bigint"
ALERTS = "account string, id bigint, country string, cents bigint, over bigint, times bigint"


class Limits(BroadcastProcessor):
    """Payments over the limit of their country, with how often the account was over one."""

    def open(self, ctx: ProcessorContext) -> None:
        self.limits = ctx.broadcast_state("limits", "country string", "cents bigint")
        self.times = ctx.value_state("times", "n bigint")
        self.passed = ctx.operator_list("passed", "epoch bigint, payments bigint")
        self.now_passed = 0
        self.epoch = ctx.epoch

    def process_broadcast(self, rows: Iterator[Row], ctx: ProcessorContext) -> None:
        for row in rows:
            if row.cents is None:
                self.limits.remove((row.country,))
            else:
                self.limits.put((row.country,), (row.cents,))

    def process(
        self, key: tuple[Any, ...], rows: Iterator[Row], ctx: ProcessorContext
    ) -> Iterator[tuple[Any, ...]]:
        (times,) = self.times.get() or (0,)
        for row in rows:
            limit = self.limits.get((row.country,))
            if limit is None or row.cents <= limit[0]:
                self.now_passed += 1
                continue
            times += 1
            yield (*key, row.id, row.country, row.cents, row.cents - limit[0], times)
        if times:
            self.times.update((times,))

    def close(self) -> None:
        if self.now_passed:
            self.passed.add((self.epoch, self.now_passed))


def build(backend: StateBackend, payments: DataFrame, limits: DataFrame) -> DataFrame:
    """One row for each payment over the limit that is in force in its micro-batch."""
    return backend.connect_broadcast(
        payments,
        limits,
        keys="account",
        processor=Limits(),
        output_schema=ALERTS,
        uid="limits",
    )


def generated(files: int = 4, rows: int = 500) -> Iterator[pa.Table]:
    """Payments."""
    rng = np.random.default_rng(1)
    for number in range(files):
        yield pa.table(
            {
                "account": np.array([f"account-{i:02}" for i in range(20)])[
                    rng.integers(0, 20, rows)
                ],
                "id": np.arange(rows) + number * rows,
                "country": np.array(["DE", "FR", "IT"])[rng.integers(0, 3, rows)],
                "cents": rng.integers(0, 10_000, rows),
            }
        )


def changes(files: int = 4) -> Iterator[pa.Table]:
    """Limits, some of them anew with each file of payments; the last row of a country counts."""
    told: list[list[tuple[str, int | None]]] = [
        [("DE", 9_000), ("FR", 9_500)],
        [("DE", 1), ("DE", 9_900), ("IT", 9_800)],
        [("FR", None)],
        [("IT", 9_990), ("FR", 5_000), ("FR", 9_700)],
    ]
    for number in range(files):
        some = told[number % len(told)]
        cents = pa.array([cents for _, cents in some], pa.int64())
        yield pa.table({"country": [country for country, _ in some], "cents": cents})


def main() -> None:
    with Run("changing-rules") as run:
        payments = run.stream("payments", PAYMENTS, generated())
        limits = run.stream("limits", LIMITS, changes())
        run.show(build(run.backend, payments, limits), "id")


if __name__ == "__main__":
    main()
