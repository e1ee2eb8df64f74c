"""A query goes on from a savepoint that was edited: of two, renamed, without a state, rescaled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F

import statebackend
from statebackend import OperatorState
from tests.spark.local.world import durable_state

if TYPE_CHECKING:
    from tests.spark.local.world import World


def totals(ids: dict[str, list[int]], n: int = 0, total: int = 0) -> dict[tuple[str], tuple]:
    return {(k,): (len(some) + n, sum(some) + total) for k, some in ids.items()}


def test_a_query_goes_on_from_the_operators_of_two_savepoints(world: World) -> None:
    world.input.add_batches(2)
    before = world.input.ids()
    of_query = world.run_ledger().savepoint().uri
    rows = pa.table({"k": list(before), "n": [10] * len(before), "total": [1000] * len(before)})
    made, merged = ((world.root / name).as_uri() for name in ("made", "merged"))
    states = {"sum": rows, "old": rows}
    statebackend.write_savepoint(made, {"counts": OperatorState("k string", states)})
    statebackend.edit_savepoint(
        [of_query, made],
        merged,
        rename_operators={"ledger": "first", "counts": "second"},
        rename_states={("counts", "sum"): "acc"},
        drop_states=[("counts", "old")],
        max_parallelism=48,
        sources=of_query,
    )
    world.location, world.store = world.root / "location-2", world.root / "store-2"
    for _ in range(2):  # also started again
        world.input.add_batches(1)
        backend = world.backend(savepoint=merged, local_dir=str(world.root / "local-2"))
        first = world.ledger(backend, uid="first")
        each = first.select("k", F.explode("ids").alias("id"))
        world.run(backend, world.ledger(backend, each, uid="second"))
        backend.wait_durable()
        now = world.input.ids()
        later = {k: ids[len(before[k]) :] for k, ids in now.items()}
        assert durable_state(backend, "first")["acc"] == totals(now)
        second = durable_state(backend, "second")
        assert second["acc"] == totals(later, 10, 1000)
        assert set(second) == {"acc"}
