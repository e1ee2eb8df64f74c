"""A continuous job's state as tables: while it runs, and of its savepoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import statebackend
from statebackend import OperatorState
from statebackend.continuous.sinks.collect_sink import CollectSink
from tests.continuous.runtime.jobs import (
    KEYS,
    OUTPUT,
    Counting,
    HeldClock,
    Numbers,
    check_counts,
    truth,
)
from tests.continuous.runtime.world import soon

if TYPE_CHECKING:
    from tests.continuous.runtime.world import World

ROWS = 4000


def test_its_state_is_read_while_it_runs_and_of_its_savepoint(world: World) -> None:
    clock: HeldClock = world.held(1.0)
    keyed = world.source(Numbers(ROWS, splits=4, rows_per_s=1000, clock=clock)).key_by("key")
    keyed.process(Counting(), uid="count", output_schema=OUTPUT).sink(CollectSink())
    query = world.start(2)
    soon(lambda: (query.epoch or 0) >= 1)
    uri, job = f"file://{world.folder}/state", "job"
    rows = statebackend.states(uri, job).to_pylist()
    assert {(row["operator"], row["state"]) for row in rows} >= {("count", "counts")}
    running = statebackend.read_state(uri, job, "count", "counts").read_all()
    assert running.num_rows > 0
    made = query.stop_with_savepoint()
    saved = statebackend.read_state(
        "", savepoint=made.uri, operator="count", state="counts"
    ).read_all()
    assert sum(row["value"]["n"] for row in saved.to_pylist()) >= sum(
        row["value"]["n"] for row in running.to_pylist()
    )
    for row in statebackend.states("", savepoint=made.uri).to_pylist():
        given = {"operator": row["operator"], "state": row["state"]}
        statebackend.read_state("", savepoint=made.uri, **given).read_all()


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_job_goes_on_from_tables(world: World, parallelism: int) -> None:
    rows = pa.table({"key": list(range(KEYS)), "n": [100] * KEYS, "total": [7] * KEYS})
    to = f"file://{world.folder}/made"
    made = statebackend.write_savepoint(
        to, {"count": OperatorState("key bigint", {"counts": rows})}, parallelism=2
    )
    world.renew(job="bootstrapped", savepoint=made)
    sink = CollectSink()
    keyed = world.source(Numbers(ROWS, splits=4)).key_by("key")
    keyed.process(Counting(), uid="count", output_schema=OUTPUT).sink(sink)
    assert world.start(parallelism).await_termination(60.0)
    wanted = {key: (n + 100, total + 7) for key, (n, total) in truth(ROWS).items()}
    check_counts(sink.rows(), wanted)
