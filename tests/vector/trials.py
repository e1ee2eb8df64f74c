"""Small vectorised processors, and how to try them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statebackend.api.arrow import ArrowContext, ArrowProcessor
from statebackend.operators.vector.key_vector import Keys
from statebackend.state.ttl_cells import TTL
from statebackend.testing.processor_tester import ProcessorTester

KEY, OUT = "k string", "k string, total double"
Body = Callable[["Scripted", pa.RecordBatch, ArrowContext], Any]


class Totals(ArrowProcessor):
    """Sums amounts by key."""

    def __init__(self, ttl: TTL | None = None) -> None:
        self.ttl = ttl

    def open(self, ctx: ArrowContext) -> None:
        self.total = ctx.value_state("total", "amount double", ttl=self.ttl)

    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> pa.RecordBatch:
        old = self.total.get(ctx.keys).column("amount").fill_null(0.0)
        added = np.add.reduceat(batch.column("amount").to_numpy(), ctx.keys.starts[:-1])
        total = pc.add(old, pa.array(added))
        self.total.put(ctx.keys, [total])
        return pa.RecordBatch.from_arrays([*ctx.keys.columns.columns, total], ["k", "total"])

    def on_initial(self, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
        self.total.put(ctx.keys, batch.take(ctx.keys.starts[:-1]).select(["amount"]))


class Scripted(ArrowProcessor):
    """Has states of each kind; what it does with them is given."""

    def __init__(self, body: Body) -> None:
        self.body = body

    def open(self, ctx: ArrowContext) -> None:
        self.value = ctx.value_state("value", "x bigint, s string")
        self.map = ctx.map_state("map", "m string", "x bigint")
        self.pairs = ctx.map_state("pairs", "day bigint, page string", "n bigint")
        self.list = ctx.list_state("list", "x bigint")
        self.ttl_list = ctx.list_state("ttl_list", "x bigint", ttl=TTL(1000))

    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> Any:
        return self.body(self, batch, ctx)


def trial(processor: ArrowProcessor | Body, **options: Any) -> ProcessorTester:
    made = processor if isinstance(processor, ArrowProcessor) else Scripted(processor)
    return ProcessorTester(made, **{"keySchema": KEY, "outputSchema": OUT, **options})


def amounts(*rows: tuple[str, float]) -> pa.Table:
    return pa.table({"amount": [amount for _, amount in rows], "k": [k for k, _ in rows]})


def pairs(table: pa.Table) -> dict[str, float]:
    return {row["k"]: row["total"] for row in table.to_pylist()}


SOME = amounts(("b", 1.0), ("a", 2.0), ("b", 4.0))


Timer = tuple[str, int]
FIRED = "k string, at bigint"


class Alarms(ArrowProcessor):
    """Sets (or deletes) the timers that come in; says which fire."""

    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
        keys, at = ctx.keys.take(ctx.keys.index), batch.column("at").to_numpy()
        deletes = batch.column("deletes").to_numpy(zero_copy_only=False)
        ctx.timers.register(keys.take(~deletes), at[~deletes])
        ctx.timers.delete(keys.take(deletes), at[deletes])

    def on_timers(self, keys: Keys, at_ms: Any, ctx: ArrowContext) -> pa.RecordBatch:
        assert len(keys) == len(at_ms)
        assert at_ms.dtype == np.int64
        self.fired(keys, at_ms, ctx)
        return pa.RecordBatch.from_arrays([keys.columns.column(0), pa.array(at_ms)], ["k", "at"])

    def fired(self, keys: Keys, at_ms: Any, ctx: ArrowContext) -> None:
        """What else happens."""


def alarms(processor: ArrowProcessor | None = None, **options: Any) -> ProcessorTester:
    options = {"timeMode": "ProcessingTime", "keySchema": "k string", **options}
    return ProcessorTester(processor or Alarms(), outputSchema=FIRED, **options)


def timers(some: Sequence[Timer], deletes: bool = False) -> pa.RecordBatch:
    kinds = pa.schema([("k", pa.string()), ("at", pa.int64()), ("deletes", pa.bool_())])
    rows = [{"k": k, "at": at, "deletes": deletes} for k, at in some]
    return pa.RecordBatch.from_pylist(rows, kinds)


def fired(table: pa.Table) -> list[Timer]:
    return [(row["k"], row["at"]) for row in table.to_pylist()]
